"""Tracking keeps one fold of the log, in a thread of its own, and never more than one at work on it."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from storage.log.entries import Alias, Registration
from storage.log.run_log import RunLog
from storage.log.runs import trainer_lock
from storage.tracking.registry import RegistryUnavailable
from tasks import mirror
from tasks.mirror import TrackingMirror
from tests.builders import a_log


@pytest.fixture
def told() -> TrackingMirror:
    return TrackingMirror(a_log(), tracking="", is_trainer=True)


class _Registry:
    """A registry that MLflow has told of the run; a test says what its `sync` does."""

    run_page = "#/experiments/1/runs/2"
    made: list[tuple[RunLog, int]]
    attached: list[str]
    do: Callable[[bool], Any]

    def __init__(self, log: RunLog, *, tracking_uri: str) -> None:
        self.made.append((log, log.state.entries))

    def sync(self, *, finished: bool) -> list[Registration]:
        return type(self).do(finished) or []

    def attach(self, file: Path) -> None:
        self.attached.append(f"{file.name}: {file.read_text()}")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Registry(_Registry):
        made, attached, do = [], [], staticmethod(lambda finished: None)

    monkeypatch.setattr(mirror, "Registry", Registry)
    return Registry


def test_each_call_sees_what_was_committed_since_and_reads_nothing_twice(
    told: TrackingMirror, registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sync(finished: bool) -> list[Registration]:
        if len(registry.made) == 2:
            raise RegistryUnavailable("down")
        return [Registration(version=0, model_name="run", registry_version="1")]

    registry.do = sync
    assert told._sync(False) == 1
    read: list[str] = []
    get_many = told._log.store.get_many
    monkeypatch.setattr(told._log.store, "get_many", lambda keys: read.extend(keys) or get_many(keys))
    told._log.append(Alias(name="rollout", version=0, checksum="sum"))
    assert told._sync(False) == 0, "an outage is a warning"
    assert [entries for _, entries in registry.made] == [2, 4], "what was registered is in the log"
    assert told._log.refresh().registrations[0].registry_version == "1"
    assert registry.made[0][0] is registry.made[1][0]
    assert not any(key.endswith(f"{0:020d}.json") for key in read)


def test_the_report_is_attached_at_the_end_and_only_there_or_a_warning_says_why_not(
    told: TrackingMirror, registry: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mirror, "_report_command", lambda log, page: ["sh", "-c", f"printf page > {page}"])
    asyncio.run(mirror.track.fn(told))
    assert registry.attached == [] and told.run_page == "#/experiments/1/runs/2"
    asyncio.run(mirror.track.fn(told, finished=True))
    assert registry.attached == ["report.html: page"] and not caplog.text
    monkeypatch.setattr(mirror, "_report_command", lambda log, page: ["sh", "-c", "echo no disk left >&2; exit 1"])
    asyncio.run(mirror.track.fn(told, finished=True))
    assert "MLflow has no report of this run" in caplog.text and "no disk left" in caplog.text


def test_who_evaluates_beside_a_training_leaves_mlflow_to_it(told: TrackingMirror, registry: Any) -> None:
    sent: list[bool] = []
    registry.do = sent.append
    told._is_trainer = False
    with trainer_lock(told._log):
        told._sync(False)
    assert sent == [], "both would send the same entries"
    told._sync(False)
    assert sent == [True], "nobody trains it: the MLflow run ends as it was"


def test_two_that_tell_of_a_run_take_turns_and_its_training_may_begin_meanwhile(
    told: TrackingMirror, registry: Any
) -> None:
    telling, begun = threading.Event(), threading.Event()
    sent: list[str] = []

    def sync(finished: bool) -> None:
        if finished:
            telling.set()
            assert begun.wait(30)
        sent.append("evaluation" if finished else "trainer")

    registry.do = sync
    evaluation = copy.copy(told)
    evaluation._is_trainer = False
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(evaluation._sync, False)
        assert telling.wait(30)
        with trainer_lock(told._log):
            second = pool.submit(told._sync, False)
            begun.set()
            assert first.result() == second.result() == 0
    assert sent == ["evaluation", "trainer"], "one after the other"
