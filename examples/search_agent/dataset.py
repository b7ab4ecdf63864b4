"""The folder the agent works on: `corpus.jsonl`, and the questions of each split in a file of their own.

In: passages and problems. Out: the files, one JSON object per line. `agent.py` and the index read them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from examples.search_agent.retrieval.passages import Passage

CORPUS = "corpus.jsonl"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A line of `train.jsonl` or `test.jsonl`."""

    id: str
    question: str
    answer: str
    supporting: tuple[str, ...] = ()
    """Ids of the passages that prove the answer; empty if unknown."""
    hops: int | None = None
    """Number of facts the answer needs; None if unknown."""


def write_dataset(folder: Path, passages: Iterable[Passage], splits: Mapping[str, Sequence[Problem]]) -> str:
    """Write all files and return one line that says what they hold.

    Raises `ValueError` for an empty corpus, a split without problems, and an id that occurs twice.
    """
    problems = [problem for split in splits.values() for problem in split]
    _check_unique("problem", [problem.id for problem in problems])
    for split, own in splits.items():
        if not own:
            raise ValueError(f"there is nothing to write to {split}.jsonl")
    rows = [{"id": each.id, "title": each.title, "text": each.text} for each in passages]
    if not rows:
        raise ValueError("there is no passage to search")
    _check_unique("passage", [row["id"] for row in rows])
    folder.mkdir(parents=True, exist_ok=True)
    _write_lines(folder / CORPUS, rows)
    for split, own in splits.items():
        _write_lines(folder / f"{split}.jsonl", [asdict(problem) for problem in own])
    counts = ", ".join(f"{len(own)} problems in {split}.jsonl" for split, own in splits.items())
    return f"{folder}: {len(rows)} passages, {counts}"


def _check_unique(what: str, ids: Sequence[str]) -> None:
    if len(set(ids)) < len(ids):
        seen: set[str] = set()
        twice = next(each for each in ids if each in seen or seen.add(each))  # type: ignore[func-returns-value]
        raise ValueError(f"{what} id {twice!r} occurs twice")


def _write_lines(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    with open(file, "w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
