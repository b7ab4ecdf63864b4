"""The commands that the documents show, one by one, as a shell would take them.

In: README, docs/ and the READMEs of folders. Out: words of each command, with the document they stand in.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    [PROJECT / "README.md", *PROJECT.glob("docs/*.md"), *PROJECT.glob("infra/*.md"), *PROJECT.glob("examples/**/*.md")]
)

_SHELL_BLOCK = re.compile(r"^```(?:sh|bash|console)?\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"^ {4}(?:\.venv/bin/)?((?:millrace|make|prefect|python -m) (?:[^\n\\]|\\\n)*)", re.MULTILINE)
_IN_A_SENTENCE = re.compile(r"`((?:\.venv/bin/)?(?:millrace|make|prefect|python -m) [^`]+)`")
_PROGRAM = re.compile(r"^(?:\.venv/bin/)?(millrace|make|prefect|python -m) ")


def commands(document: Path, *, sentences: bool = True) -> Iterator[list[str]]:
    """Words of every command of a document, without comments and shell operators."""
    text = document.read_text()
    lines = [line for block in _SHELL_BLOCK.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    lines += [found.replace("\\\n", " ") for found in _INDENTED.findall(text)]
    lines += _IN_A_SENTENCE.findall(text) if sentences else []
    for line in lines:
        line = re.sub(r"\s+", " ", line.strip())
        if not _PROGRAM.match(line) or "…" in line or "..." in line:
            continue
        words = shlex.split(line, comments=True)
        words[0] = words[0].removeprefix(".venv/bin/")
        yield words[: words.index("&")] if "&" in words else words
