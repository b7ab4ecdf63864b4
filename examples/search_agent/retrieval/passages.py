"""Passages of a corpus.

In: a file of JSON lines, `{"id", "title", "text"}`. Out: one `Passage` a line, in the order of the file.

Public corpora also write `_id` (BEIR) and `contents`, whose first line is the title (Pyserini); both are read.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace import InvalidInput

_SHOWN_FAULTS = 5
_SHOWN_CHARACTERS = 60

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Passage:
    """A piece of text that can be found and cited."""

    id: str
    title: str
    text: str
    score: float = 0.0
    """How well it matches the query that found it; higher is better. Scores of different modes do not compare."""


class BadCorpus(InvalidInput):
    """The corpus cannot be used; the message names the lines."""


def read_passages(
    path: str | Path, *, skip_broken: bool = False, skipped: list[str] | None = None
) -> Iterator[Passage]:
    """Passages of a JSONL corpus; blank lines are skipped.

    A line is broken if it is no passage, has no text, or repeats an id. Raises `BadCorpus` for the first broken line,
    naming it and the next few; for a file without any passage; and `FileNotFoundError`. With `skip_broken`, broken
    lines are left out and described in `skipped`, and their number is logged.
    """
    faults: list[str] = [] if skipped is None else skipped
    first_line: dict[str, int] = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                passage = _passage(line)
                if first := first_line.get(passage.id):
                    raise ValueError(f"id {passage.id!r} is already on line {first}")
            except ValueError as error:
                faults.append(f"line {number}: {error}")
                if not skip_broken and len(faults) == _SHOWN_FAULTS:
                    break
            else:
                first_line[passage.id] = number
                if skip_broken or not faults:
                    yield passage
    if faults and not skip_broken:
        more = " (and maybe more)" if len(faults) == _SHOWN_FAULTS else ""
        raise BadCorpus(f"{path}: {'; '.join(faults)}{more}. Mend these lines, or leave them out with --skip-broken")
    if not first_line:
        reason = f"; all {len(faults)} lines are broken: {'; '.join(faults[:_SHOWN_FAULTS])}" if faults else ""
        raise BadCorpus(f'{path} holds no passage{reason}. Each line must be {{"id": "…", "title": "…", "text": "…"}}')
    if faults:
        _log.warning("%s: %d broken lines left out: %s", path, len(faults), "; ".join(faults[:_SHOWN_FAULTS]))


def _passage(line: bytes) -> Passage:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # JSON, or bytes that are no UTF-8
        raise ValueError(f"no JSON ({error}): {line[:_SHOWN_CHARACTERS]!r}") from None
    if not isinstance(row, dict):
        raise ValueError(f"not an object: {line[:_SHOWN_CHARACTERS]!r}")
    name = row.get("id", row.get("_id"))
    if not isinstance(name, str | int) or isinstance(name, bool) or name == "":
        raise ValueError(f"no id, neither as `id` nor as `_id`: {line[:_SHOWN_CHARACTERS]!r}")
    title, text = _text(row, "title"), _text(row, "text")
    if not text:
        text = _text(row, "contents")
        if not title and "\n" in text:
            title, text = text.split("\n", 1)
            title = title.strip().strip('"')
    if not text.strip():
        raise ValueError(f"passage {name!r} has no text, neither as `text` nor as `contents`")
    return Passage(id=str(name), title=title, text=text)


def _text(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"`{key}` is {type(value).__name__}, not text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"`{key}` holds half of a surrogate pair, which is no character") from None
    return value
