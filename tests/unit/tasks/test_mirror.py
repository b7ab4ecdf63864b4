"""Tracking keeps one fold of the log, in a thread of its own, and never more than one at work on it."""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from settings.places.hints import command
from storage.log.entries import Alias, Evaluation, Registration, Session
from storage.log.run_log import RunLog
from storage.log.runs import trainer_lock
from storage.objects.object_store import StoreError
from storage.tracking.mlflow_run import RegistryUnavailable
from tasks import mirror
from tasks.mirror import TrackingMirror
from tests.builders import a_log, a_step


@pytest.fixture
def told(registry: Any) -> TrackingMirror:
    return TrackingMirror(a_log(), tracking="", is_trainer=True)


class _Registry:
    """A registry that MLflow has told of the run; a test says what its `sync` does."""

    run_page = "#/experiments/1/runs/2"
    num_entries = 0
    made: list[Any]
    attached: list[str]
    do: Callable[[], Any]

    def __init__(self, log: RunLog, *, tracking_uri: str) -> None:
        self.name = f"MLflow at {tracking_uri}"
        self.log = log
        self.made.append(self)

    def sync(self) -> list[Registration]:
        return type(self).do() or []

    def attach(self, file: Path) -> None:
        self.attached.append(f"{file.name}: {file.read_text()}")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Registry(_Registry):
        made, attached, do = [], [], staticmethod(lambda: None)

    monkeypatch.setattr(mirror, "Registry", Registry)
    return Registry


def test_each_call_sees_what_was_committed_since_and_reads_nothing_twice(
    told: TrackingMirror, registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def sync() -> list[Registration]:
        seen.append(told.log.state.entries)
        if len(seen) == 2:
            raise RegistryUnavailable("down")
        return [Registration(version=0, model_name="run", registry_version="1")]

    registry.do = sync
    assert told._sync() == 1
    read: list[str] = []
    get_many = told.log.store.get_many
    monkeypatch.setattr(told.log.store, "get_many", lambda keys: read.extend(keys) or get_many(keys))
    told.log.append(Alias(name="rollout", version=0, checksum="sum"))
    assert told._sync() == 0, "an outage is a warning"
    assert seen == [2, 4], "what was registered is in the log"
    assert told.log.refresh().registrations[0].registry_version == "1"
    assert [each.log for each in registry.made] == [told.log] * 2, "made anew after the outage, on the same fold"
    assert not any(key.endswith(f"{0:020d}.json") for key in read)


def _is_down() -> None:
    raise RegistryUnavailable("down")


def test_the_report_is_attached_at_the_end_and_only_there_or_a_warning_says_why_not(
    told: TrackingMirror, registry: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mirror, "_report_command", lambda log, page: ["sh", "-c", f"printf page > {page}"])
    asyncio.run(mirror.track.fn(told))
    assert registry.attached == [] and told.run_page == "#/experiments/1/runs/2"
    asyncio.run(mirror.track.fn(told, is_last=True))
    assert registry.attached == ["report.html: page"] and not caplog.text
    registry.do = _is_down
    asyncio.run(mirror.track.fn(told, is_last=True))
    assert registry.attached == ["report.html: page"], "what is away gets none"
    monkeypatch.setattr(mirror, "_report_command", lambda log, page: ["sh", "-c", "echo no disk left >&2; exit 1"])
    asyncio.run(mirror.track.fn(told, is_last=True))
    assert "MLflow has no report of this run" in caplog.text and "no disk left" in caplog.text


@pytest.mark.parametrize("reads", ["log", "follower"])
def test_a_store_that_is_away_is_a_sentence_and_no_traceback(
    told: TrackingMirror, registry: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reads: str
) -> None:
    def away(*_: object) -> None:
        raise StoreError("store s3://lake: cannot read log/1.json")

    if reads == "log":
        monkeypatch.setattr(RunLog, "refresh", away)
    else:
        registry.do = staticmethod(away)
    asyncio.run(told.tell())
    (record,) = (record for record in caplog.records if record.name == "millrace.track")
    assert record.getMessage().endswith("cannot read log/1.json") and record.exc_info is None


def test_what_a_place_lacks_at_the_end_is_counted_in_steps(told: TrackingMirror, registry: Any) -> None:
    def sync(has: int) -> None:
        registry.num_entries = has
        raise RegistryUnavailable("down")

    log = told.log
    told._sync()
    assert told.missing() == []
    for _ in range(7):
        log.append(a_step(log.state, trained=[]))
    sync_command = f"`{command('sync', 'run', store='memory:')}` writes them"
    for has, lacks in ((0, "up to 7 of 7 steps"), (6, "3 of 7 steps"), (0, "3 of 7 steps"), (9, "how the run ended")):
        registry.do = functools.partial(sync, has)
        told._sync()
        assert told.missing() == [f"MLflow at {told.uri} lacks {lacks}; the next start or {sync_command}"]
    registry.do = lambda: None
    told._sync()
    assert told.missing() == []


def test_who_evaluates_beside_a_training_leaves_mlflow_to_it(told: TrackingMirror, registry: Any) -> None:
    sent: list[str] = []
    registry.do = lambda: sent.append("all")
    told._is_trainer = False
    with trainer_lock(told.log):
        told._sync()
    assert sent == [], "both would send the same entries"
    told._sync()
    assert sent == ["all"], "it is not trained"


def test_two_that_tell_of_a_run_take_turns_and_its_training_may_begin_meanwhile(
    told: TrackingMirror, registry: Any
) -> None:
    telling, begun = threading.Event(), threading.Event()
    sent: list[str] = []

    def sync() -> None:
        if not telling.is_set():
            telling.set()
            assert begun.wait(30)
            sent.append("evaluation")
        else:
            sent.append("trainer")

    registry.do = sync
    evaluation = copy.copy(told)
    evaluation._is_trainer = False
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(evaluation._sync)
        assert telling.wait(30)
        with trainer_lock(told.log):
            second = pool.submit(told._sync)
            begun.set()
            assert first.result() == second.result() == 0
    assert sent == ["evaluation", "trainer"], "one after the other"


def test_the_places_beside_mlflow_are_those_that_the_newest_session_names(
    told: TrackingMirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    told.log.append(Evaluation(version=0, split="test", score=0.5, num_tasks=1, num_failed=0, shard_id="e", seconds=1))
    told._sync()
    assert [path.name for path in tmp_path.iterdir()] == ["locks"], "no other place was asked for"
    told.log.append(Session(id="second", code_version="", also=("tensorboard",)))
    told._sync(), told._sync()
    assert [path.name[:4] for path in (tmp_path / "tensorboard").iterdir()] == ["run-"]


def test_what_one_service_refuses_is_said_once_and_does_not_keep_another_from_it(
    told: TrackingMirror, registry: Any, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[str] = []

    class Other:
        name = "another place"
        num_entries = 0

        def sync(self) -> list[Registration]:
            heard.append("all")
            return []

    def refuse() -> None:
        raise RegistryUnavailable("down")

    registry.do = refuse
    told._following.append(mirror._Following(Other))
    with caplog.at_level(logging.INFO):
        told._sync(), told._sync()
        registry.do = lambda: None
        told._sync()
    assert heard == ["all"] * 3
    address = f"MLflow at {told.uri}"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", f"{address} did not take everything in; the log keeps it for later: down"),
        ("INFO", f"{address} has everything again that it missed"),
    ]
