"""Turning errors a user can mend into one line on the terminal, without a traceback."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import typer
from rich.console import Console
from rich.markup import escape

from settings.redaction import without_secrets

console = Console(stderr=True, highlight=False)

MENDABLE = (ValueError, FileNotFoundError, PermissionError)
"""Errors whose message already says what to do; subclasses such as ConfigError and RunExists included."""


MENDABLE_ELSEWHERE = {
    "infra.fleet": ("WorkerDied",),
    "infra.services": ("ServiceFailed",),
    "rollouts.workflow": ("WrongWorkflow",),
    "rollouts.engines.engine": ("EngineError",),
    "rollouts.production.evaluation": ("MixedVersions",),
    "storage.log.claims": ("NothingAccepted",),
    "storage.objects.digests": ("DigestMismatch",),
    "storage.objects.object_store": ("StoreError",),
    "storage.tracking.registry": ("RegistryUnavailable",),
    "storage.log.run_state": ("Conflict", "LogDamaged"),
    "storage.log.runs": ("RunBusy",),
    "storage.shards.shards": ("DamagedShard",),
    "tasks.evaluation": ("EvaluationFailed",),
    "tasks.train": ("EveryClaimRefused",),
    "tasks.watchdog": ("Stalled",),
    "trainers.health": ("NonFinite",),
}
"""More of them, by the module that defines them."""


def mendable_types() -> tuple[type[BaseException], ...]:
    """All such errors that can have been raised: what nobody has imported nobody has raised."""
    elsewhere = [
        getattr(sys.modules[module], name)
        for module, names in MENDABLE_ELSEWHERE.items()
        if module in sys.modules
        for name in names
    ]
    return (*MENDABLE, *elsewhere)


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
    console.print(f"[bold red]error:[/] {escape(without_secrets(str(error)))}", soft_wrap=True)
    raise typer.Exit(2)
