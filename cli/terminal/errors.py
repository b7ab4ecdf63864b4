"""How a command ends that raises: one line for an error that the user can mend, Python's traceback for every other."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator

import typer
from rich.markup import escape

from cli.terminal.console import open_console, reader_is_gone
from settings.errors import InvalidInput, UserError, disk_full, is_disk_full, missing_package, place_in_thread
from settings.places.state_folder import written_places
from settings.redaction import printable, without_secrets

TRACEBACK = "MILLRACE_TRACEBACK"
"""Environment variable: with a value, the errors that are one line show their traceback too."""


_SECONDS_FOR_THREADS = 3.0
"""As long as threads may go on after the end of a command."""


def end_threads(status: int) -> None:
    """Let the process end with `status` although a thread that the user's code has started goes on for ever: Python
    would wait for it."""

    def end() -> None:
        rest = [each for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
        if rest:
            what = f"the command is over, and thread {rest[0].name} goes on: it ends now; start it with daemon=True"
            sys.stderr.write(f"{what}\n{place_in_thread(rest[0].ident)}".rstrip() + "\n")
            os._exit(status)

    timer = threading.Timer(_SECONDS_FOR_THREADS, end)
    timer.daemon = True
    timer.start()


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Print a `UserError` as `error: …` and leave with its status; print any other error as Python does, with status 1.

    Neither shows a secret. Of a group of errors, the first one decides, unless one comes of a full disk. If what reads
    the output has ended, nothing is printed.
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
        if isinstance(first, BrokenPipeError) and reader_is_gone():
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is not flushed yet
            raise typer.Exit(128 + signal.SIGPIPE) from None
        if isinstance(first, ModuleNotFoundError):
            first = missing_package(first.name) or first
        if is_disk_full(error) or not isinstance(first, InvalidInput):  # a state folder may not be known by then
            first = disk_full(error if is_disk_full(error) else first, written_places()) or first
        is_mendable = isinstance(first, UserError)
        if not is_mendable or os.environ.get(TRACEBACK):
            sys.stderr.write(printable(without_secrets("".join(traceback.format_exception(error)))))
        if is_mendable:
            console = open_console(stderr=True, soft_wrap=True)
            console.print(f"[bold red]error:[/] {escape(without_secrets(str(first)))}")
        raise typer.Exit(first.exit_status if isinstance(first, UserError) else 1) from None
