"""Turning errors a user can mend into one line on the terminal, without a traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer
from rich.console import Console
from rich.markup import escape

from settings.errors import UserError
from settings.redaction import without_secrets

console = Console(stderr=True, highlight=False)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Print a mendable error as `error: …` and leave with status 2; let every other error rise."""
    try:
        yield
    except BaseExceptionGroup as group:
        found = first_leaf(group)
        if not isinstance(found, UserError):
            raise
        _leave(found)
    except UserError as error:
        _leave(error)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def first_leaf(error: BaseException) -> BaseException:
    """The first real error inside nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _leave(error: BaseException) -> None:
    console.print(f"[bold red]error:[/] {escape(without_secrets(str(error)))}", soft_wrap=True)
    raise typer.Exit(2)
