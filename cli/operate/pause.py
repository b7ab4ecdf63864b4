"""`millrace pause` and `resume`: a run begins nothing new until it may go on; what runs is finished and committed.

In: a run. Out: an entry in its log, which trainer and producers notice within seconds, wherever they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cli.terminal.arguments import StoreOption, open_named

if TYPE_CHECKING:
    from storage.log.run_log import RunLog

ReasonOption = Annotated[str, typer.Option(help="Shown by status; by default who asked for it.")]


def pause(run: str, reason: ReasonOption = "", store: StoreOption = "") -> None:
    """Begin nothing new in a run, wherever it is trained; what runs is finished and committed."""
    from storage.log.entries import Pause

    log = open_named(run, store)
    if earlier := log.state.paused:
        typer.echo(f"run {run} is paused already: {earlier}")
        return
    log.append(Pause(reason=reason or _who_asked()))
    typer.echo(
        f"run {run} pauses at step {log.state.step}{_where(log)}; "
        f"`millrace resume {run}` lets it go on, also after it was stopped and started again"
    )


def resume(run: str, reason: ReasonOption = "", store: StoreOption = "") -> None:
    """Let a paused run go on."""
    from storage.log.entries import Resume

    log = open_named(run, store)
    if not log.state.paused:
        typer.echo(f"run {run} is not paused; it stands at step {log.state.step}")
        return
    log.append(Resume(reason=reason or _who_asked()))
    typer.echo(f"run {run} goes on from step {log.state.step}{_where(log)}")


def _where(log: RunLog) -> str:
    from storage.log.runs import is_training

    return "" if is_training(log) else " as soon as it is trained again: this machine does not train it now"


def _who_asked() -> str:
    import getpass
    import socket

    return f"{getpass.getuser()} on {socket.gethostname()} asked for it"
