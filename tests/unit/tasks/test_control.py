"""A pause comes from the log or from Prefect, reaches the other and the workers, and never by an echo of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from prefect.exceptions import Pause as PrefectPause
from prefect.states import Cancelling, Paused, Running, State, Suspended

from storage.log.entries import Pause, Resume
from tasks import control, steps
from tasks.control import Listener, listening, resumed
from tasks.session import RunSession
from tests.builders import a_config, a_shard, a_summary

_CONFIG = a_config(batch_size=1, min_usable=1, pace=False, attempt_timeout=0.001, stall_timeout=0.001)


class _Server:
    """A Prefect server that does what it is told, or is down; and a worker that counts its looks at the log."""

    def __init__(self) -> None:
        self.now: State[Any] = Running()
        self.is_up = True
        self.shown: list[bool] = []
        self.looked = 0

    async def state(self) -> State[Any] | None:
        return self.now if self.is_up else None

    async def show(self, *, paused: bool) -> None:
        if self.is_up:
            self.shown.append(paused)
            self.now = Paused() if paused else Running()

    async def call(self, method: str, *_: Any) -> None:
        self.looked += method == "refresh"


@pytest.fixture
def server() -> Any:
    return _Server()


@pytest.fixture
def session(session: RunSession, monkeypatch: pytest.MonkeyPatch, server: Any) -> RunSession:
    monkeypatch.setattr(control, "_LOOK_SECONDS", 0.01)
    session.fleet.workers = {"rollout-0": server}
    return session


_AWAY: list[Any] = [1, "down", "pause", 1, "up", Paused, 2]
_ALONE = "outside of a flow run the log alone is heard"
_CASES: dict[str, tuple[list[Any], str, list[bool], int]] = {
    "a pause in the log is shown and told once": ([1, "pause", 3], "lunch", [True], 1),
    "and so is its end": ([1, "pause", 3, "resume", 3], "", [True, False], 2),
    "a pause in Prefect comes into the log": ([1, Paused, 2], "paused in Prefect", [], 1),
    "and so does its end": ([1, Paused, 2, Running, 2], "", [], 2),
    "a run that was paused before it started stays so": (["pause", 2], "lunch", [True], 1),
    "without Prefect's server the log is heard": ([1, "down", "pause", 2], "lunch", [], 1),
    # Running is what the server knew from before, and no user's wish.
    "and the server hears of it later": ([1, "down", "pause", 2, "up", 2], "lunch", [True], 1),
    # The state is of the same kind as before the pause, and another one.
    "a resume right after the pause was shown counts": ([1, "pause", 1, Running, 2], "", [True], 2),
    "a pause that was taken in without an answer is no user's wish": (_AWAY, "lunch", [], 1),
    "nor is the resume": ([*_AWAY, "resume", "down", 1, "up", Running, 2], "", [], 2),
    "a state that is neither is no wish": ([1, Cancelling, 1], "", [], 0),
    _ALONE: (["pause", 1, Running, 1], "lunch", [], 1),
}


@pytest.mark.parametrize("case", _CASES)
def test_a_pause_and_its_end_are_carried_between_log_and_prefect(session: RunSession, server: Any, case: str) -> None:
    """Numbers are looks, in between are entries in the log, states set in Prefect, and a server that is away."""
    script, *expected = _CASES[case]
    listener = Listener(session, None if case == _ALONE else server)

    async def play() -> None:
        for step in script:
            if isinstance(step, int):
                for _ in range(step):
                    await listener.look()
            elif step in ("down", "up"):
                server.is_up = step == "up"
            elif isinstance(step, str):
                session.log.append(Pause(reason="lunch") if step == "pause" else Resume(reason="back"))
            else:
                server.now = step()

    asyncio.run(play())
    assert [session.log.state.paused, server.shown, server.looked] == expected
    assert listener.ended is None


def test_a_suspended_flow_run_ends_with_what_prefect_understands(session: RunSession, server: Any) -> None:
    ended = []

    async def body() -> None:
        async with listening(session, platform=server):
            server.now = Suspended()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("cleanly")

    with pytest.raises(PrefectPause):
        asyncio.run(body())
    assert ended == ["cleanly"] and not session.log.state.paused


def test_a_flow_run_that_stays_cancelling_ends_the_body(session: RunSession, server: Any) -> None:
    """One of a terminal, which no worker ends by a signal; Prefect's own states say no more of it."""

    async def body() -> None:
        async with listening(session, platform=server):
            server.now = Cancelling()
            await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(body())
    assert server.shown == []


async def _suspended() -> None:
    raise PrefectPause(state=Suspended())


async def _suspended_in_a_group() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(_suspended())
        await asyncio.Event().wait()


async def _two_errors() -> None:
    raise ExceptionGroup("two", [ValueError("one"), ValueError("two")])


async def _cancelled() -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("body", "raised"),
    [
        (_suspended_in_a_group, PrefectPause),
        (_two_errors, ExceptionGroup),
        (_cancelled, asyncio.CancelledError),
    ],
)
def test_a_suspension_comes_out_of_its_group_and_other_errors_stay_as_they_are(
    session: RunSession, server: Any, body: Callable[[], Awaitable[None]], raised: type[BaseException]
) -> None:
    async def listened() -> None:
        async with listening(session, platform=server):
            await body()

    with pytest.raises(raised):
        asyncio.run(listened())


async def _held_up_until_resumed(session: RunSession, wait: Awaitable[Any]) -> Any:
    waiting = asyncio.ensure_future(wait)
    for _ in range(3):
        session.fleet.arrivals.set()
        await asyncio.sleep(0.01)
        assert not waiting.done()
    session.log.append(Resume(reason="back"))
    session.fleet.arrivals.set()
    return await waiting


@pytest.mark.parametrize("waits_for", ["a batch", "the run"])
def test_no_batch_is_claimed_while_paused_and_the_wait_is_no_stall(session: RunSession, waits_for: str) -> None:
    session.fleet.workers = {}
    session.log.append(a_shard("s0", [a_summary(0)]))
    session.log.append(Pause(reason="lunch"))

    async def script() -> Any:
        wait: Any = resumed(session) if waits_for == "the run" else steps.next_batch(session, config=_CONFIG)
        return await _held_up_until_resumed(session, wait)

    claim = asyncio.run(script())
    assert waits_for == "the run" or claim.step == 1


def test_a_pause_while_running_groups_are_waited_for_holds_the_next_batch_up(session: RunSession) -> None:
    config = a_config(batch_size=1, min_usable=1, pace=True, stale_policy="strict", max_staleness=1)
    session.fleet.workers = {}
    session.log.append(a_shard("s0", [a_summary(0)]))
    waited_for: list[int] = []

    async def wait_for_stragglers(version: int) -> None:
        waited_for.append(version)
        session.log.append(Pause(reason="lunch"))

    async def script() -> Any:
        session.fleet.wait_for_stragglers = wait_for_stragglers
        return await _held_up_until_resumed(session, steps.next_batch(session, config=config))

    assert asyncio.run(script()).step == 1 and waited_for == [0]
