"""Turning errors a user can mend into one line on the terminal, without a traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer
from rich.console import Console
from rich.markup import escape

from settings.errors import UserError
from settings.redaction import without_secrets


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Print a mendable error as `error: …` and leave with status 2; let every other error rise."""
    try:
        yield
    except (UserError, BaseExceptionGroup) as error:
        leaf: BaseException = error
        while isinstance(leaf, BaseExceptionGroup):
            leaf = leaf.exceptions[0]
        if not isinstance(leaf, UserError):
            raise
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print(f"[bold red]error:[/] {escape(without_secrets(str(leaf)))}")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
