"""A producer keeps up with its run by the log alone, and knows when there is no more to do."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from typing import Any

import pytest

from storage.log.entries import Alias, Session, Shard
from storage.log.run_log import RunLog
from storage.log.run_state import RunState
from tasks import producers
from tasks.producers import follow, producer_name, wait_for_policy
from tasks.rollout import load_policy
from tests.builders import a_log, a_session, a_shard, a_step, a_summary


class _Worker:
    """Remembers what it was asked; cannot find version `lost`."""

    def __init__(self, lost: int = -1) -> None:
        self.asked: list[Any] = []
        self._lost = lost

    async def call(self, method: str, *arguments: Any) -> None:
        self.asked.append((method, *(policy.version for policy in arguments)))
        if self.asked[-1] == ("publish", self._lost):
            raise FileNotFoundError("weights")


class _Run:
    """A run and a session that produces for it; one more event happens at every look at the log."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, lost: int = -1) -> None:
        monkeypatch.setattr(producers, "LOOK_SECONDS", 0)
        monkeypatch.setattr(producers, "load_policy", load_policy.fn)
        self.log = a_log()
        self.worker: Any = _Worker(lost)
        log = RunLog(self.log.store, "run")
        log.refresh()
        self.session = a_session(log, id="")
        self.session.fleet.hosted["elsewhere-0"] = self.session.fleet.workers["elsewhere-0"] = self.worker

    def follow(self, *events: Any, shards: int = 0, patience: float = 600.0) -> str:
        script = iter(events)
        refresh = self.session.log.refresh

        def look() -> RunState:
            event = next(script, None)
            if isinstance(event, Exception):
                raise event
            if event is not None:
                self.log.append(event)
            return refresh()

        self.session.log.refresh = look  # type: ignore[method-assign]
        return asyncio.run(asyncio.wait_for(follow(self.session, shards=shards, patience=patience), 60))


def _until(steps: int) -> Session:
    return Session(id=uuid.uuid4().hex, code_version="", steps=steps)


def _ours(number: int) -> Shard:
    return replace(a_shard(f"s{number}", [a_summary(number)]), producer="elsewhere-0")


def _alias(version: int) -> Alias:
    return Alias(name="rollout", version=version, checksum="")


def test_it_loads_what_has_the_alias_and_ends_with_the_runs_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _Run(monkeypatch)
    run.log.append(_until(1))
    run.log.append(_alias(0))
    run.log.append(a_shard("s0", [a_summary(0)]))
    step = a_step(run.log.state, trained=["0.task0"])
    assert run.follow(None, _until(2), step, _alias(1), _until(1)) == "the run has its 1 step"
    loads = [asked for asked in run.worker.asked if asked[0] == "publish"]
    assert loads == [("publish", 0), ("publish", 1)]
    assert run.worker.asked.count(("refresh",)) >= 3, "what others write may leave room"


def test_it_ends_after_as_many_shards_of_its_own_as_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _Run(monkeypatch)
    others = [a_shard(f"s{number}", [a_summary(number)]) for number in range(3)]
    assert run.follow(*others, _ours(10), _ours(11), shards=2) == "2 shards committed"
    assert run.worker.asked.count(("refresh",)) == 3, "its own shards are no news to it"


def test_it_waits_for_a_driver_or_a_store_that_is_gone_and_says_so_and_then_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert _Run(monkeypatch).follow(patience=0.05).startswith("nothing new in its log for 0 s")
    assert "waiting for its driver" in caplog.text
    away = OSError("no route to host")
    assert _Run(monkeypatch).follow(*[away] * 100_000, patience=0.05).endswith(": no route to host")
    assert _Run(monkeypatch).follow(away, away, _ours(0), shards=1) == "1 shard committed"


def test_a_policy_that_is_gone_because_the_next_one_has_come_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _Run(monkeypatch, lost=0)
    with pytest.raises(FileNotFoundError, match="weights"):
        run.follow(_alias(0))
    run = _Run(monkeypatch, lost=0)
    run.log.append(a_shard("s0", [a_summary(0)]))
    run.log.append(a_step(run.log.state, trained=["0.task0"]))
    # Its second look, after the failure, finds the next policy; the third one that the run is over.
    assert run.follow(_alias(0), _alias(1), None, _until(1)) == "the run has its 1 step"
    assert ("publish", 1) in run.worker.asked


def test_a_run_that_is_over_needs_no_engine_and_one_without_a_policy_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _Run(monkeypatch)
    workflow = "tests.flows.guesses:Guesses"
    assert asyncio.run(wait_for_policy(run.session, workflow=workflow, patience=1)) is True
    run.log.append(a_shard("s0", [a_summary(0)]))
    run.log.append(a_step(run.log.state, trained=["0.task0"]))
    run.log.append(_until(1))
    assert asyncio.run(wait_for_policy(run.session, workflow=workflow, patience=1)) is False
    run.log.append(Session(id="other", code_version="", reward_sha256="0" * 64, steps=2))
    with pytest.raises(ValueError, match="rewards of two kinds would be mixed"):
        asyncio.run(wait_for_policy(run.session, workflow=workflow, patience=1))


def test_a_producer_is_called_as_its_machine_and_needs_a_name_for_files() -> None:
    assert producer_name("gpu-7") == "gpu-7" and producer_name("")
    with pytest.raises(ValueError, match="producer name 'a/b'"):
        producer_name("a/b")
