"""How a command ends that raises: one line for an error that the user can mend, Python's traceback for every other."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator

import typer
from rich.markup import escape

from cli.terminal.console import open_console
from settings.errors import UserError, disk_full, is_disk_full, missing_package
from settings.places.state_folder import written_places
from settings.redaction import printable, without_secrets

TRACEBACK = "MILLRACE_TRACEBACK"
"""Environment variable: with a value, the errors that are one line show their traceback too."""


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Print a `UserError` as `error: …` and leave with its status; print any other error as Python does, with status 1.

    Neither shows a secret. Of a group of errors, the first one decides, unless one comes of a full disk.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (typer.Exit, typer.Abort):
        raise
    except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - all of them are printed
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        if isinstance(first, ModuleNotFoundError):
            first = missing_package(first.name) or first
        first = disk_full(error if is_disk_full(error) else first, written_places()) or first
        is_mendable = isinstance(first, UserError)
        if not is_mendable or os.environ.get(TRACEBACK):
            sys.stderr.write(printable(without_secrets("".join(traceback.format_exception(error)))))
        if is_mendable:
            console = open_console(stderr=True, soft_wrap=True)
            console.print(f"[bold red]error:[/] {escape(without_secrets(str(first)))}")
        raise typer.Exit(first.exit_status if isinstance(first, UserError) else 1) from None
