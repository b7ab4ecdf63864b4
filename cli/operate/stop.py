"""`millrace stop`, `pause` and `resume`: end the training of a run on this machine, or begin nothing new anywhere.

In: a run's log. Out: the step it stands at; what was committed stays. A pause is an entry in the log, which trainer and
producers notice within seconds, wherever they are; what runs is finished and committed.
"""

from __future__ import annotations

import contextlib
import signal
import time
from typing import TYPE_CHECKING, Annotated

import typer

from cli.terminal.arguments import StoreOption, open_named
from cli.terminal.console import say
from settings.errors import InvalidInput
from settings.places.hints import command
from settings.redaction import without_secrets

if TYPE_CHECKING:
    from storage.log.run_log import RunLog

_LOOK_SECONDS = 0.05
ReasonOption = Annotated[str, typer.Option(help="Shown by status; by default who asked for it.")]


def stop(run: str, store: StoreOption = "") -> None:
    """End the training of a run on this machine, as Ctrl-C or Prefect's Cancel would; `train` continues it."""
    say(f"run {run} has stopped at step {stop_run(open_named(run, store))}")


def stop_run(log: RunLog, *, seconds: float = 45.0) -> int:
    """Ask the process that trains the run to end, and wait until it has; returns the run's step.

    A flow run of Prefect's is cancelled there, at the server its process reports to. Raises `InvalidInput` if the run
    is not trained on this machine, if Prefect's server does not cancel it, and if the process outlives `seconds`.
    """
    from storage.log.runs import RunBusy, trainer_lock

    try:
        with trainer_lock(log):
            raise InvalidInput(
                f"run {log.run_id!r} is not being trained on this machine; it stands at step {log.state.step}"
            )
    except RunBusy as busy:
        if busy.pid is None:
            raise InvalidInput(f"run {log.run_id!r} is only just starting; try again") from None
        _interrupt(busy.pid, run_id=log.run_id, seconds=seconds)
    return log.refresh().step


def _interrupt(pid: int, *, run_id: str, seconds: float) -> None:
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        environment = process.environ()
        flow_run, api_url = environment.get("PREFECT__FLOW_RUN_ID"), environment.get("PREFECT_API_URL", "")
        if flow_run is None or not _cancel(flow_run, api_url=api_url, run_id=run_id, pid=pid):
            process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + seconds
        # a zombie is one whose parent has yet to hear of its end, or whose other threads still hold the run's lock
        while process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1:
            if time.monotonic() > deadline:
                raise InvalidInput(
                    f"process {pid}, which trains run {run_id!r}, has not ended within {seconds:g} s; `kill -9 {pid}` "
                    "loses nothing that was committed"
                )
            time.sleep(_LOOK_SECONDS)


def _cancel(flow_run_id: str, *, api_url: str, run_id: str, pid: int) -> bool:
    """Let Prefect end it, so that it knows; False if it takes the flow run for over already."""
    import asyncio

    from tasks.prefect.flow_runs import cancel_flow_run

    try:
        return asyncio.run(cancel_flow_run(flow_run_id, api_url=api_url))
    except Exception as error:  # whatever its client raises: the sentence has both ways out
        raise InvalidInput(
            f"run {run_id!r} is trained by Prefect, whose server at {without_secrets(api_url) or 'an unknown URL'} "
            f"did not cancel it ({error!r}); try `prefect flow-run cancel {flow_run_id}` there, or end the process "
            f"with `kill {pid}`, which loses nothing that was committed"
        ) from error


def pause(run: str, reason: ReasonOption = "", store: StoreOption = "") -> None:
    """Pause a run on every machine: nothing new begins; what is running is finished and committed."""
    from storage.log.entries import Pause

    log = open_named(run, store, appends=True)
    if earlier := log.state.paused:
        say(f"run {run} is paused already: {earlier}")
        return
    log.append(Pause(reason=reason or _who_asked()))
    say(
        f"run {run} pauses at step {log.state.step}{_where(log)}; "
        f"`{command('resume', run, store=log.store.uri)}` continues it, also after it was stopped and started again"
    )


def resume(run: str, reason: ReasonOption = "", store: StoreOption = "") -> None:
    """Continue a paused run."""
    from storage.log.entries import Resume

    log = open_named(run, store, appends=True)
    if not log.state.paused:
        say(f"run {run} is not paused; it stands at step {log.state.step}")
        return
    log.append(Resume(reason=reason or _who_asked()))
    say(f"run {run} goes on from step {log.state.step}{_where(log)}")


def _where(log: RunLog) -> str:
    from storage.log.runs import is_training

    return "" if is_training(log) else " as soon as it is trained again: this machine does not train it now"


def _who_asked() -> str:
    import getpass
    import socket

    return f"{getpass.getuser()} on {socket.gethostname()} asked for it"
