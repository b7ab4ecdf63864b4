"""`millrace promote` and `rollback`: make a policy the champion unless the log speaks against it, and take that back;
`millrace sync`: bring MLflow up to a run's log.

In: a run and a policy version. Out: the alias `champion` in the log, and in MLflow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from cli.terminal.arguments import JsonOption, StoreOption, TrackingOption, open_named, print_json
from cli.terminal.console import open_console
from infra.environment import tracking_uri
from settings.redaction import without_secrets

if TYPE_CHECKING:
    from storage.log.entries import Alias
    from storage.log.run_log import RunLog


def promote(
    run: str,
    version: Annotated[int | None, typer.Option(min=0, help="Policy version; the newest by default.")] = None,
    max_gap: Annotated[float | None, typer.Option(min=0, help="Largest trainer–engine gap; else the run's.")] = None,
    as_json: JsonOption = False,
    store: StoreOption = "",
    tracking: TrackingOption = "",
) -> None:
    """Put the alias `champion` on a policy, unless the log speaks against it."""
    from storage.log.promotion import gap_of
    from storage.log.promotion import promote as promote_policy
    from storage.log.runs import run_config

    log = open_named(run, store, appends=True)
    if max_gap is None:
        max_gap = gap_of(run_config(log))
    _announce(log, promote_policy(log, version, max_gap=max_gap), "", as_json=as_json, tracking=tracking)


def rollback(run: str, as_json: JsonOption = False, store: StoreOption = "", tracking: TrackingOption = "") -> None:
    """Put the alias `champion` back on the champion before this one."""
    from storage.log.promotion import roll_back

    log = open_named(run, store, appends=True)
    _announce(log, roll_back(log), " again", as_json=as_json, tracking=tracking)


def sync(run: str, store: StoreOption = "", tracking: TrackingOption = "") -> None:
    """Send MLflow, and the other places of `tracking.also`, what they lack of a run."""
    import asyncio

    from settings.errors import counted
    from storage.log.runs import is_training, outcome
    from storage.tracking.follower import FollowerUnavailable
    from tasks.mirror import TrackingMirror

    log = open_named(run, store)
    if is_training(log):
        raise FollowerUnavailable(f"run {run} is being trained, and its own session tells MLflow")
    mirror = TrackingMirror(log, tracking=tracking, is_trainer=True)
    asyncio.run(mirror.tell(is_last=outcome(log) == "finished"))
    if missing := mirror.missing():
        raise FollowerUnavailable("; ".join(missing))
    sent = f"{counted(log.state.step, 'step')} of run {log.run_id}, to the end of its log"
    open_console(soft_wrap=True).print(escape(without_secrets(f"MLflow at {mirror.uri} has {sent}")))


def _announce(log: RunLog, alias: Alias, again: str, *, as_json: bool, tracking: str) -> None:
    """Print the champion and set the alias in MLflow, also if an earlier call could not."""
    from storage.log.history import to_json

    console = open_console(stderr=as_json, soft_wrap=True)
    console.print(escape(f"policy {alias.version} of run {log.run_id} is the champion{again}"))
    console.print(f"[dim]MLflow: {escape(bring_to_mlflow(log, tracking))}[/]")
    if as_json:
        print_json(to_json(alias))


def bring_to_mlflow(log: RunLog, tracking: str = "") -> str:
    """Set the aliases of a run in MLflow; returns where they are, or why not."""
    from storage.log.runs import is_training, teller_lock
    from storage.tracking.follower import FollowerUnavailable
    from storage.tracking.registry import Registry

    uri = tracking_uri(tracking)
    if is_training(log):
        return "the run is being trained, which brings the alias there with its next step"
    try:
        with teller_lock(log):
            for registration in Registry(log, tracking_uri=uri).sync():
                log.append(registration)
    except FollowerUnavailable as error:
        return without_secrets(f"{uri} cannot be reached ({error}); promote again, or continue the run")
    return without_secrets(f"{log.run_id}@champion at {uri}")
