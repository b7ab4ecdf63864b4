"""HotpotQA's files (Yang et al. 2018, arXiv 1809.09600, distractor setting) as a folder for the agent.

In: the JSON files of two splits, lists of objects with `_id`, `question`, `answer`, `supporting_facts`
([title, sentence number] pairs) and `context` ([title, sentences] pairs).
Out: `corpus.jsonl` of all paragraphs, each once, and the questions; a paragraph that holds a supporting fact supports.

    python -m examples.search_agent.prepare_hotpotqa OUT hotpot_train_v1.1.json hotpot_dev_distractor_v1.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.search_agent.dataset import Problem, write_dataset
from examples.search_agent.retrieval.passages import Passage


class Paragraphs:
    """Every paragraph once, numbered as they come."""

    def __init__(self) -> None:
        self.passages: dict[tuple[str, str], Passage] = {}
        """By title and text."""

    def add(self, title: str, text: str) -> str:
        """The id of a paragraph."""
        new = Passage(id=str(len(self.passages)), title=title, text=text)
        return self.passages.setdefault((title, text), new).id


def read_problems(file: Path, paragraphs: Paragraphs, *, limit: int | None = None) -> list[Problem]:
    """The questions of a file; their contexts go into `paragraphs`.

    Raises `ValueError` naming file and question for an empty file, a missing field, a question without an answer, and
    a supporting fact whose paragraph is not in the context.
    """
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{file} holds no list of questions; take one of HotpotQA's JSON files")
    return [_problem(row, paragraphs, where=f"{file}, question {index}") for index, row in enumerate(rows[:limit])]


def _problem(row: Any, paragraphs: Paragraphs, *, where: str) -> Problem:
    if isinstance(row, dict) and row.get("_id"):
        where = f"{where} ({row['_id']})"
    for key in ("_id", "question", "answer", "context", "supporting_facts"):
        if not isinstance(row, dict) or not row.get(key):
            hint = "; the test files of the set have no answers" if key == "answer" else ""
            raise ValueError(f"{where}: {key!r} is missing or empty{hint}")
    try:
        ids = {title: paragraphs.add(title, "".join(sentences).strip()) for title, sentences in row["context"]}
        titles = dict.fromkeys(title for title, _ in row["supporting_facts"])
    except (TypeError, ValueError):
        raise ValueError(
            f"{where}: `context` must be a list of [title, sentences], `supporting_facts` a list of [title, number]"
        ) from None
    if missing := [title for title in titles if title not in ids]:
        raise ValueError(
            f"{where}: supporting paragraph {missing[0]!r} is not in the context; use the distractor setting's files"
        )
    return Problem(
        id=str(row["_id"]),
        question=str(row["question"]),
        answer=str(row["answer"]),
        supporting=tuple(ids[title] for title in titles),
        hops=len(titles),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line, see the top of this file."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.search_agent.prepare_hotpotqa",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, help="folder to write to")
    parser.add_argument("train", type=Path, help="JSON file to train on")
    parser.add_argument("test", type=Path, help="JSON file held out")
    parser.add_argument("--limit", type=int, default=None, help="take only the first questions of each file")
    given = parser.parse_args(arguments)
    paragraphs = Paragraphs()
    try:
        splits = {
            split: read_problems(file, paragraphs, limit=given.limit)
            for split, file in (("train", given.train), ("test", given.test))
        }
        print(write_dataset(given.out, paragraphs.passages.values(), splits))
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
