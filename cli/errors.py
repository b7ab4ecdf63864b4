"""Turning errors a user can mend into one line on the terminal, without a traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer
from rich.console import Console
from rich.markup import escape

console = Console(stderr=True, highlight=False)

MENDABLE = (ValueError, FileNotFoundError, PermissionError)
"""Errors whose message already says what to do; subclasses such as ConfigError and RunExists included."""


def mendable_types() -> tuple[type[BaseException], ...]:
    """All such errors; imported late, because storage is not needed to print a usage message."""
    from infra.fleet import WorkerDied
    from infra.services import ServiceFailed
    from rollouts.executor import NothingAccepted, WrongWorkflow
    from storage.object_store import StoreError
    from storage.run_state import Conflict, LogDamaged
    from storage.runs import RunBusy
    from tasks.train import Stalled

    return (
        *MENDABLE,
        StoreError,
        RunBusy,
        Conflict,
        LogDamaged,
        NothingAccepted,
        WrongWorkflow,
        WorkerDied,
        ServiceFailed,
        Stalled,
    )


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Print a mendable error as `error: …` and leave with status 2; let every other error rise."""
    try:
        yield
    except BaseExceptionGroup as group:
        found = first_leaf(group)
        if not isinstance(found, mendable_types()):
            raise
        _leave(found)
    except mendable_types() as error:
        _leave(error)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def first_leaf(error: BaseException) -> BaseException:
    """The first real error inside nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _leave(error: BaseException) -> None:
    console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
    raise typer.Exit(2)
