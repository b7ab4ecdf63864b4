"""Who ends a flow decides its state in Prefect: a user Cancelled, anything else what Prefect says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from prefect.exceptions import Abort, Pause, TerminationSignal
from prefect.states import AwaitingRetry, Cancelling, Running, State, Suspended

from tasks.prefect import own_flow_run
from tasks.prefect.own_flow_run import cancellable, is_stop

_ENDS: dict[str, tuple[bool, State[Any] | None, BaseException, type[BaseException], list[str]]] = {
    "Ctrl-C on a terminal": (False, Running(), asyncio.CancelledError(), Abort, ["Cancelled"]),
    "Cancel in Prefect": (True, Cancelling(), asyncio.CancelledError(), Abort, ["Cancelled"]),
    "its signal, in a task of a group": (
        *(True, Cancelling(), BaseExceptionGroup("", [TerminationSignal(15), asyncio.CancelledError()])),
        *(Abort, ["Cancelled"]),
    ),
    "a machine that goes": (True, Running(), asyncio.CancelledError(), asyncio.CancelledError, []),
    "a pod that is evicted, whose run is scheduled again": (True, AwaitingRetry(), asyncio.CancelledError(), Abort, []),
    "that, with the server away": (True, None, asyncio.CancelledError(), asyncio.CancelledError, []),
    "an error": (False, Cancelling(), ValueError("one"), ValueError, []),
    "an error beside a stop": (
        *(False, Running(), BaseExceptionGroup("", [ValueError("one"), asyncio.CancelledError()])),
        *(BaseExceptionGroup, []),
    ),
    "a suspension": (False, Running(), Pause(state=Suspended()), Pause, []),
}


@pytest.mark.parametrize("case", _ENDS)
def test_a_user_leaves_the_flow_run_cancelled_and_nothing_else_does(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of_worker, state, error, raised, shown = _ENDS[case]
    states: list[str] = []

    class Client:
        async def read_flow_run(self, _: Any) -> Any:
            if state is None:
                raise ConnectionError("refused")
            return SimpleNamespace(state=state)

        async def set_flow_run_state(self, _: Any, wanted: State[Any], *, force: bool) -> None:
            states.append(str(wanted.name))

    @contextlib.asynccontextmanager
    async def client() -> Any:
        yield Client()

    context = SimpleNamespace(get=lambda: SimpleNamespace(flow_run=SimpleNamespace(id=uuid4())))
    monkeypatch.setattr(own_flow_run, "FlowRunContext", context)
    monkeypatch.setattr(own_flow_run, "get_client", client)
    monkeypatch.delenv("PREFECT__FLOW_RUN_ID", raising=False)
    if of_worker:
        monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "id")

    async def flow() -> None:
        async with cancellable():
            raise error

    with pytest.raises(raised) as ended:
        asyncio.run(flow())
    assert states == shown
    if raised is Abort:
        assert ended.value.state.name == (shown or ["AwaitingRetry"])[0]  # type: ignore[attr-defined]
    assert is_stop(error) == (case not in ("an error", "an error beside a stop"))


def test_a_signal_that_comes_while_another_task_runs_is_heard_and_a_second_one_cuts_nothing_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With Prefect's handler it is an error of the task in whose step it comes."""

    def handler(number: int, _: Any) -> None:
        raise TerminationSignal(number)

    closed = []

    async def other() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    async def flow() -> None:
        async with cancellable():
            try:
                await asyncio.gather(other(), return_exceptions=True)
                await asyncio.Event().wait()
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.to_thread(closed.append, True)

    monkeypatch.setattr(own_flow_run, "FlowRunContext", SimpleNamespace(get=lambda: None))
    before = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(asyncio.wait_for(flow(), 60))
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert closed == [True]
