"""`millrace pause` and `resume`: a run begins nothing new until it may go on; what runs is finished and committed.

In: a run's log. Out: an entry in it, which trainer and producers notice within seconds, wherever they are.
"""

from __future__ import annotations

import getpass
import socket

from storage.log.entries import Pause, Resume
from storage.log.run_log import RunLog
from storage.log.runs import is_training


def pause_run(log: RunLog, *, reason: str) -> str:
    """Pause the run; returns what to tell the person. Pausing it again changes nothing."""
    if earlier := log.state.paused:
        return f"run {log.run_id} is paused already: {earlier}"
    log.append(Pause(reason=reason or f"{_somebody()} asked for it"))
    return (
        f"run {log.run_id} pauses at step {log.state.step}{_where(log)}; "
        f"`millrace resume {log.run_id}` lets it go on, also after it was stopped and started again"
    )


def resume_run(log: RunLog, *, reason: str) -> str:
    """Let the run go on; returns what to tell the person."""
    if not log.state.paused:
        return f"run {log.run_id} is not paused; it stands at step {log.state.step}"
    log.append(Resume(reason=reason or f"{_somebody()} asked for it"))
    return f"run {log.run_id} goes on from step {log.state.step}{_where(log)}"


def _where(log: RunLog) -> str:
    return "" if is_training(log) else " as soon as it is trained again: nobody on this machine does now"


def _somebody() -> str:
    return f"{getpass.getuser()} on {socket.gethostname()}"
