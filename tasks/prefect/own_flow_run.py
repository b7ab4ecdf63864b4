"""The Prefect flow run that this code runs in: its state there, and how it ends if a user ends it.

In: the work of a flow. Out: the flow run's state; if a user ends the work it is Cancelled, and not Crashed, of which
people are notified.

| who ends it | what the flow sees |
|---|---|
| Cancel in Prefect, of a run of a worker | SIGTERM, here a cancellation; its state is Cancelling |
| Cancel in Prefect, of a run on a terminal | `Cancelling`, at the next look of `tasks/control.py` |
| Ctrl-C, `millrace stop`, SIGTERM on a terminal | a cancellation |
| SIGTERM to a process of a worker, as when its machine goes | the same in another state, Prefect's matter |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any, TypeVar
from uuid import UUID

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.objects import StateType
from prefect.context import FlowRunContext
from prefect.exceptions import Abort, Pause, TerminationSignal
from prefect.states import Cancelled, Cancelling, Paused, Running, State

logger = logging.getLogger("millrace.control")

Reply = TypeVar("Reply")

_ANSWER_SECONDS = 5.0
"""Longest wait for Prefect's server: what stands in the log must not wait for a server that is down."""
_STOPS = (asyncio.CancelledError, Abort, KeyboardInterrupt, TerminationSignal, Pause)


class OwnFlowRun:
    """The Prefect flow run this code runs in."""

    def __init__(self, client: PrefectClient, flow_run_id: UUID) -> None:
        self._client = client
        self._id = flow_run_id

    async def state(self) -> State[Any] | None:
        """The flow run's state; None if the server does not answer."""
        flow_run = await _reply(self._client.read_flow_run(self._id))
        return None if flow_run is None else flow_run.state

    async def cancelled(self) -> State[Any]:
        """Make the flow run Cancelled; returns the state, also if the server does not answer."""
        state = Cancelled(message="ended by a user; what was committed is safe, and starting it again continues it")
        await _reply(self._client.set_flow_run_state(self._id, state, force=True))
        return state

    async def show(self, *, paused: bool) -> None:
        """Make the flow run Paused, or Running; if the server does not take that in, the next look tries again."""
        await _reply(self._client.set_flow_run_state(self._id, Paused() if paused else Running()))


async def _reply(request: Awaitable[Reply]) -> Reply | None:
    try:
        return await asyncio.wait_for(request, _ANSWER_SECONDS)
    except Exception as error:  # noqa: BLE001 - whatever it is: the run does not need Prefect to go on
        logger.debug("Prefect did not answer: %r", error)
        return None


def is_stop(error: BaseException) -> bool:
    """True if a user or the platform ended the work, and nothing failed."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_stop, error.exceptions))
    return isinstance(error, _STOPS)


@contextlib.contextmanager
def _cancelled_by_sigterm() -> Iterator[None]:
    """The first SIGTERM cancels this task, and others find it ending.

    Prefect's handler raises in whatever the main thread runs: an error in another task's step, which ends that task and
    goes unheard, so that a worker kills the process in half a minute.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    if task is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    came = threading.Event()

    def cancel() -> None:
        if not came.is_set():
            came.set()
            task.cancel()

    before = signal.getsignal(signal.SIGTERM)
    loop.add_signal_handler(signal.SIGTERM, cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)


@contextlib.asynccontextmanager
async def cancellable() -> AsyncIterator[None]:
    """Leave the flow run Cancelled if a user ends the body, and Scheduled if Prefect has put it off until later.

    Raises `prefect.exceptions.Abort` then, which ends a flow without another state.
    """
    with _cancelled_by_sigterm():
        try:
            yield
        except BaseException as error:
            context = FlowRunContext.get()
            if isinstance(error, Pause) or not is_stop(error) or context is None or context.flow_run is None:
                raise
            task = asyncio.current_task()
            while task is not None and task.cancelling():
                task.uncancel()
            async with get_client() as client:
                flow_run = OwnFlowRun(client, context.flow_run.id)
                abort = Abort("ended")
                # A worker's process is ended with Cancel, or as it has to go; outside of one a flow is ended here only.
                state = await flow_run.state() if "PREFECT__FLOW_RUN_ID" in os.environ else Cancelling()
                if state is not None and state.type in (StateType.CANCELLING, StateType.CANCELLED):
                    state = await flow_run.cancelled()
                elif state is None or state.type != StateType.SCHEDULED:
                    raise
                abort.state = state  # Prefect reads it
            raise abort from error
