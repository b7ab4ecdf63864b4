"""Tracking keeps one fold of the log, in a thread of its own, and never more than one at work on it."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from storage.log.entries import Alias, Registration
from storage.log.run_log import RunLog
from storage.log.runs import trainer_lock
from storage.tracking.registry import RegistryUnavailable
from tasks import mirror
from tasks.mirror import TrackingMirror
from tests.builders import a_log


class _Told:
    """A registry that MLflow has told of the run."""

    run_page = "#/experiments/1/runs/2"


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrackingMirror:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    return TrackingMirror(a_log(), tracking="", is_trainer=True)


def test_each_call_sees_what_was_committed_since_and_reads_nothing_twice(
    told: TrackingMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[RunLog, int]] = []

    class Registry(_Told):
        def __init__(self, log: RunLog, *, tracking_uri: str) -> None:
            seen.append((log, log.state.entries))

        def sync(self, *, finished: bool) -> list[Registration]:
            if len(seen) == 2:
                raise RegistryUnavailable("down")
            return [Registration(version=0, model_name="run", registry_version="1")]

    monkeypatch.setattr(mirror, "Registry", Registry)
    assert told._sync(False) == 1
    read: list[str] = []
    get_many = told._log.store.get_many
    monkeypatch.setattr(told._log.store, "get_many", lambda keys: read.extend(keys) or get_many(keys))
    told._log.append(Alias(name="rollout", version=0, checksum="sum"))
    assert told._sync(False) == 0, "an outage is a warning"
    assert [entries for _, entries in seen] == [2, 4], "what was registered is in the log"
    assert told._log.refresh().registrations[0].registry_version == "1"
    assert seen[0][0] is seen[1][0]
    assert not any(key.endswith(f"{0:020d}.json") for key in read)


def test_two_calls_at_once_take_turns(told: TrackingMirror, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, second_asked = threading.Event(), threading.Event()
    at_work, most = 0, 0

    class Registry(_Told):
        def __init__(self, log: RunLog, *, tracking_uri: str) -> None: ...

        def sync(self, *, finished: bool) -> list[Registration]:
            nonlocal at_work, most
            at_work += 1
            most = max(most, at_work)
            inside.set()
            assert second_asked.wait(30)
            at_work -= 1
            return []

    class Lock:
        """Tells when the second caller has come to the lock, which the first one holds."""

        def __init__(self, lock: threading.Lock) -> None:
            self.lock = lock

        def __enter__(self) -> None:
            if inside.is_set():
                assert self.lock.locked()
                second_asked.set()
            self.lock.acquire()

        def __exit__(self, *error: object) -> None:
            self.lock.release()

    monkeypatch.setattr(mirror, "Registry", Registry)
    monkeypatch.setattr(told, "_lock", Lock(told._lock))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(told._sync, False)
        assert inside.wait(30)
        second = pool.submit(told._sync, True)
        assert first.result() == second.result() == 0
    assert most == 1


def test_an_outage_is_said_once_and_its_end_too(
    told: TrackingMirror, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="millrace.track")
    is_down = [False, True, True, True, False, False, True]

    class Registry(_Told):
        def __init__(self, log: RunLog, *, tracking_uri: str) -> None: ...

        def sync(self, *, finished: bool) -> list[Registration]:
            if is_down.pop(0):
                raise RegistryUnavailable("connection refused")
            return []

    monkeypatch.setattr(mirror, "Registry", Registry)
    for _ in range(7):
        told._sync(False)
    assert [(record.levelname, record.getMessage()[:43]) for record in caplog.records] == [
        ("WARNING", "MLflow at sqlite:///" + caplog.messages[0][20:43]),
        ("INFO", "MLflow has everything again that it missed"),
        ("WARNING", "MLflow at sqlite:///" + caplog.messages[0][20:43]),
    ]


def test_the_report_is_attached_at_the_end_and_only_there(
    told: TrackingMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached: list[str] = []

    class Registry(_Told):
        def __init__(self, log: RunLog, *, tracking_uri: str) -> None: ...

        def sync(self, *, finished: bool) -> list[Registration]:
            return []

        def attach(self, file: Path) -> None:
            attached.append(f"{file.name}: {file.read_text()}")

    monkeypatch.setattr(mirror, "Registry", Registry)
    monkeypatch.setattr(mirror, "_report_command", lambda log, page: ["sh", "-c", f"printf page > {page}"])
    asyncio.run(mirror.track.fn(told))
    assert attached == [] and told.run_page == "#/experiments/1/runs/2"
    asyncio.run(mirror.track.fn(told, finished=True))
    assert attached == ["report.html: page"]


def test_a_report_that_cannot_be_made_is_a_warning(
    told: TrackingMirror, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Registry(_Told):
        def __init__(self, log: RunLog, *, tracking_uri: str) -> None: ...

        def sync(self, *, finished: bool) -> list[Registration]:
            return []

    monkeypatch.setattr(mirror, "Registry", Registry)
    monkeypatch.setattr(mirror, "_report_command", lambda log, page: ["sh", "-c", "echo no disk left >&2; exit 1"])
    asyncio.run(mirror.track.fn(told, finished=True))
    assert "MLflow has no report of this run" in caplog.text and "no disk left" in caplog.text


def test_who_evaluates_beside_a_training_leaves_mlflow_to_it(
    told: TrackingMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bool] = []

    class Registry(_Told):
        def __init__(self, log: RunLog, *, tracking_uri: str) -> None: ...

        def sync(self, *, finished: bool) -> list[Registration]:
            sent.append(finished)
            return []

    monkeypatch.setattr(mirror, "Registry", Registry)
    told._is_trainer = False
    with trainer_lock(told._log):
        told._sync(False)
    assert sent == [], "both would send the same entries"
    told._sync(False)
    assert sent == [True], "nobody trains it: the MLflow run ends as it was"


def test_a_training_may_begin_while_somebody_else_tells_of_its_run(
    told: TrackingMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    telling, begun = threading.Event(), threading.Event()
    sent: list[str] = []

    class Registry(_Told):
        def __init__(self, log: RunLog, *, tracking_uri: str) -> None: ...

        def sync(self, *, finished: bool) -> list[Registration]:
            if finished:
                telling.set()
                assert begun.wait(30)
            sent.append("evaluation" if finished else "trainer")
            return []

    monkeypatch.setattr(mirror, "Registry", Registry)
    monkeypatch.setattr(told, "_lock", contextlib.nullcontext())  # two sessions have two
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
