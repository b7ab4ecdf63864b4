"""The task runs of this process's flows: which are tried again, Cancelled if they were cut off, and a wait until
Prefect's server has them.

In: failed task runs, and the flow runs that have ended here. Out: a yes or no, and a wait. A server beside the command
dies with it, and with it the queue of what Prefect's client has sent. Without the wait, the last tasks would be missing
on the flow run's page.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import httpx
from prefect import task_engine
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.states import Cancelled, State, exception_to_crashed_state

from tasks.prefect.own_flow_run import is_stop

CUT_OFF = "cut off: its flow ended, or no longer waited for it"
"""The message of such a task run's state."""
_LOOK_SECONDS = 0.1
_FINAL = ["COMPLETED", "FAILED", "CRASHED", "CANCELLED"]
_expected: dict[str, int] = {}
"""Id of a flow run → how many task runs it has begun."""


def cut_off_is_cancelled() -> None:
    """Let Prefect call a task run Cancelled that is cancelled: its engine calls it Crashed, as one whose process died.

    No hook of the engine says what an exception means, so this replaces its function.
    """
    task_engine.exception_to_crashed_state = _state_of


async def _state_of(exc: BaseException, result_store: Any = None) -> State[Any]:
    return Cancelled(message=CUT_OFF, data=exc) if is_stop(exc) else await exception_to_crashed_state(exc, result_store)


def may_pass(_task: Any, _task_run: Any, state: State[Any]) -> bool:
    """Whether a failed task is worth another try: what the data, the settings, the user's code or a full disk forbid
    stays so. For Prefect's `retry_condition_fn`."""
    return not isinstance(state.data, ValueError) and bool(getattr(state.data, "may_pass", True))


def expect_task_runs() -> None:
    """Call it at the end of a flow: those that it has begun are waited for."""
    context = FlowRunContext.get()
    if context is not None and context.flow_run is not None:  # else a flow's function is called as such
        newest = context.task_run_dynamic_keys.values()
        _expected[str(context.flow_run.id)] = sum(key + 1 for key in newest if isinstance(key, int))


async def task_runs_are_recorded(*, at_most_seconds: float = 20.0) -> bool:
    """Wait until Prefect's server has every one in its last state; False if it does not answer, or not in time."""
    deadline = time.monotonic() + at_most_seconds
    with contextlib.suppress(httpx.TransportError):
        async with get_client() as client:
            while _expected and time.monotonic() < deadline:
                flow_run, expected = next(iter(_expected.items()))
                filters = {
                    "flow_runs": {"id": {"any_": [flow_run]}},
                    "task_runs": {"state": {"type": {"any_": _FINAL}}},
                }
                if int((await client.request("POST", "/task_runs/count", json=filters)).json()) < expected:
                    await asyncio.sleep(_LOOK_SECONDS)  # polling a server: nothing would wake us
                else:
                    del _expected[flow_run]
    is_recorded = not _expected
    _expected.clear()
    return is_recorded
