"""The commands that the documents show, one by one, as a shell would take them.

In: README, docs/ and the READMEs of folders. Out: words of each command, with the document they stand in.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from cli.main import app

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


def refusal(words: list[str]) -> str:
    """What `millrace` says to a command that it cannot take, before it does anything; empty where it takes it."""
    command: Any = typer.main.get_command(app)
    context, arguments = None, list(words)
    try:
        while isinstance(command, TyperGroup):
            context = command.make_context(command.name, arguments, parent=context, allow_extra_args=True)
            name, command, arguments = command.resolve_command(context, [*context._protected_args, *context.args])
        command.make_context(command.name, arguments, parent=context)
    except typer.Exit:
        return ""  # it asks for help
    except TyperException as error:
        return str(error)
    return ""
