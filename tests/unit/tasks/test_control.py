"""A pause comes from the log or from Prefect, reaches the other and the workers, and never by an echo of itself."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prefect.exceptions import Pause as PrefectPause
from prefect.states import Cancelling, Paused, Running, State, Suspended

from storage.log.entries import Pause, Resume
from tasks import control, steps
from tasks.control import Listener, listening, resumed
from tasks.session import RunSession
from tests.builders import a_config, a_session, a_shard, a_summary

_CONFIG = a_config(batch_size=1, min_usable=1, pace=False, attempt_timeout=0.001, stall_timeout=0.001)


class _Server:
    """A Prefect server that does what it is told, or is down."""

    def __init__(self) -> None:
        self.now: State[Any] = Running()
        self.is_up = True
        self.shown: list[bool] = []

    async def state(self) -> State[Any] | None:
        return self.now if self.is_up else None

    async def show(self, *, paused: bool) -> None:
        if self.is_up:
            self.shown.append(paused)
            self.now = Paused() if paused else Running()


class _Worker:
    """Counts how often it was told to look at the log."""

    def __init__(self) -> None:
        self.looked = 0

    async def call(self, method: str, *_: Any) -> None:
        self.looked += method == "refresh"


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunSession:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    session = a_session()
    worker: Any = _Worker()
    session.fleet.workers = {"rollout-0": worker}
    return session


def _look(listener: Listener, times: int = 1) -> None:
    async def look() -> None:
        for _ in range(times):
            await listener.look()

    asyncio.run(look())


def _looked(session: RunSession) -> int:
    worker: Any = session.fleet.workers["rollout-0"]
    return int(worker.looked)


def test_a_pause_in_the_log_is_shown_in_prefect_and_told_to_the_workers_once(session: RunSession) -> None:
    server = _Server()
    listener = Listener(session, server)
    _look(listener)
    session.log.append(Pause(reason="lunch"))
    _look(listener, times=3)
    assert server.shown == [True] and _looked(session) == 1
    session.log.append(Resume(reason="back"))
    _look(listener, times=3)
    assert server.shown == [True, False] and _looked(session) == 2
    assert not session.log.state.paused


def test_a_pause_in_prefect_is_written_into_the_log(session: RunSession) -> None:
    server = _Server()
    listener = Listener(session, server)
    _look(listener)
    server.now = Paused()
    _look(listener, times=2)
    assert session.log.state.paused == "paused in Prefect" and _looked(session) == 1
    server.now = Running()
    _look(listener, times=2)
    assert not session.log.state.paused and server.shown == []


def test_a_run_that_was_paused_before_it_started_stays_so_and_prefect_shows_it(session: RunSession) -> None:
    session.log.append(Pause(reason="lunch"))
    server = _Server()
    _look(Listener(session, server), times=2)
    assert session.log.state.paused == "lunch" and server.shown == [True]


def test_a_server_that_is_down_neither_pauses_nor_resumes_and_hears_of_it_later(session: RunSession) -> None:
    server = _Server()
    listener = Listener(session, server)
    _look(listener)
    server.is_up = False
    session.log.append(Pause(reason="lunch"))
    _look(listener, times=2)
    assert session.log.state.paused == "lunch" and _looked(session) == 1
    server.is_up = True
    _look(listener, times=2)
    assert session.log.state.paused == "lunch", "Running is what the server knew from before, and nobody's wish"
    assert server.shown == [True]


def test_a_resume_in_prefect_right_after_the_pause_was_shown_is_heard(session: RunSession) -> None:
    """Nobody looked in between: the state is of the same kind as before the pause, and another one."""
    server = _Server()
    listener = Listener(session, server)
    _look(listener)
    session.log.append(Pause(reason="lunch"))
    _look(listener)
    server.now = Running()
    _look(listener, times=2)
    assert not session.log.state.paused and server.shown == [True]


def test_a_pause_that_prefect_takes_in_without_answering_is_nobodys_wish(session: RunSession) -> None:
    server = _Server()
    listener = Listener(session, server)
    _look(listener)
    server.is_up = False
    session.log.append(Pause(reason="lunch"))
    _look(listener)
    server.is_up, server.now = True, Paused()
    _look(listener, times=2)
    assert session.log.state.paused == "lunch" and server.shown == []
    session.log.append(Resume(reason="back"))
    server.is_up = False
    _look(listener)
    server.is_up, server.now = True, Running()
    _look(listener, times=2)
    assert not session.log.state.paused and server.shown == []


def test_a_state_that_is_neither_is_no_wish(session: RunSession) -> None:
    server = _Server()
    listener = Listener(session, server)
    _look(listener)
    server.now = Cancelling()
    _look(listener)
    assert not session.log.state.paused and listener.suspended is None


def test_without_prefect_the_log_alone_is_heard(session: RunSession) -> None:
    listener = Listener(session, None)
    session.log.append(Pause(reason="lunch"))
    _look(listener)
    assert _looked(session) == 1


def test_a_suspended_flow_run_ends_with_what_prefect_understands(
    session: RunSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_LOOK_SECONDS", 0.01)
    server, ended = _Server(), []

    async def body() -> None:
        async with listening(session, steps=1, platform=server):
            server.now = Suspended()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("cleanly")

    with pytest.raises(PrefectPause):
        asyncio.run(body())
    assert ended == ["cleanly"] and not session.log.state.paused


def test_a_suspension_that_prefect_raises_inside_a_group_comes_out_of_it(session: RunSession) -> None:
    async def suspended() -> None:
        raise PrefectPause(state=Suspended())

    async def body() -> None:
        async with listening(session, steps=1, platform=_Server()), asyncio.TaskGroup() as group:
            group.create_task(suspended())
            await asyncio.Event().wait()

    with pytest.raises(PrefectPause):
        asyncio.run(body())


def test_other_errors_of_a_group_are_raised_as_they_are(session: RunSession) -> None:
    async def body() -> None:
        async with listening(session, steps=1, platform=_Server()):
            raise ExceptionGroup("two", [ValueError("one"), ValueError("two")])

    with pytest.raises(ExceptionGroup, match="two"):
        asyncio.run(body())


def test_a_cancelled_flow_run_stays_cancelled(session: RunSession) -> None:
    async def body() -> None:
        async with listening(session, steps=1, platform=_Server()):
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(body())


def test_no_batch_is_claimed_while_paused_and_the_wait_is_no_stall(
    session: RunSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.fleet.workers = {}
    session.log.append(a_shard("s0", [a_summary(0)]))
    session.log.append(Pause(reason="lunch"))

    async def claim() -> Any:
        waiting = asyncio.ensure_future(steps.next_batch(session, config=_CONFIG))
        for _ in range(3):
            session.fleet.arrivals.set()
            await asyncio.sleep(0.01)
            assert not waiting.done()
        session.log.append(Resume(reason="back"))
        session.fleet.arrivals.set()
        return await waiting

    assert asyncio.run(claim()).step == 1


def test_what_waits_for_the_run_to_go_on_goes_on(session: RunSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_LOOK_SECONDS", 0.01)
    session.log.append(Pause(reason="lunch"))

    async def body() -> None:
        waiting = asyncio.ensure_future(resumed(session))
        await asyncio.wait([waiting], timeout=0.05)
        assert not waiting.done()
        session.log.append(Resume(reason="back"))
        await waiting

    asyncio.run(body())
