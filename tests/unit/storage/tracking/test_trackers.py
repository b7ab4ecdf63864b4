"""TensorBoard, Trackio and W&B have what the log says, each row once, whatever was killed or away: from disk."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from settings.errors import InvalidInput, MissingPackage
from settings.run_file import make_config
from storage.log.entries import End, Evaluation, Step
from storage.log.run_log import RunLog
from storage.log.runs import open_run
from storage.objects.digests import sha256_of_json
from storage.objects.object_store import LocalStore
from storage.objects.opening import open_store
from storage.tracking import to_wandb, trackers
from storage.tracking.follower import FollowerUnavailable
from storage.tracking.trackers import TITLES, Tracker, check_trackers, tracked_run
from tests.builders import a_log, a_shard, a_step, a_summary, local_store

ODD = {"reward/pass@1": 0.5, "reward/fmt(strict)": 0.25, "reward/f1 %": 2.0, "reward/a//b": 3.0, "Über": 4.0}
"""Names that MLflow refuses, and these places take."""
Rows = list[tuple[int, float, dict[str, float]]]
"""Step, Unix time and metrics."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import trackio.sqlite_storage

    variables = {"MILLRACE_HOME": "", "WANDB_DIR": "", "WANDB_CACHE_DIR": "cache", "TRACKIO_DIR": "trackio"}
    for name, folder in variables.items():
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(trackio.sqlite_storage, "TRACKIO_DIR", tmp_path / "trackio")
    return tmp_path


@pytest.fixture
def log(tmp_path: Path) -> RunLog:
    return a_log(local_store(tmp_path / "store"))


def train(log: RunLog, loss: float) -> None:
    number = log.state.step
    log.append(a_shard(f"s{number}", [a_summary(number)]))
    step = a_step(log.state, trained=[f"0.task{number}"])
    log.append(dataclasses.replace(step, metrics={"loss": loss, "system/cpu": 50.0, **ODD}))


def evaluate(log: RunLog, score: float) -> None:
    facts: dict[str, Any] = {"split": "test", "num_tasks": 4, "num_failed": 0, "shard_id": "e", "seconds": 1.0}
    log.append(Evaluation(version=log.state.newest_version, score=score, **facts))


def wanted(log: RunLog) -> Rows:
    """The rows of a log whose steps lose 1/1, 1/2, … and whose evaluation before them scores 0.25."""
    at = [entry.written_at for entry in log.entries if isinstance(entry.body, Step | Evaluation)]
    odd = {"system/cpu": 50.0, **{f"train/{name}": value for name, value in ODD.items()}}
    first = (0, at[0], {"eval/test/tasks": 4.0, "eval/test/seconds": 1.0, "eval/test/score": 0.25})
    return [
        first,
        *(
            (n, at[n], {"train/loss": 1 / n if n < 4 else math.inf, "system/cpu": 50.0} | odd)
            for n in range(1, len(at))
        ),
    ]


def in_tensorboard(log: RunLog, home: Path) -> Rows:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tracked_run(log)
    (folder,) = (home / "tensorboard").iterdir()
    assert folder.name == f"{run.name}-{run.id}"
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    rows: dict[tuple[int, float], dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        for scalar in events.Scalars(tag):
            row = rows.setdefault((scalar.step, scalar.wall_time), {})
            assert tag not in row, "twice"
            row[tag] = scalar.value
    return sorted((step, at, metrics) for (step, at), metrics in rows.items())


def in_trackio(log: RunLog, home: Path) -> Rows:
    from trackio.sqlite_storage import SQLiteStorage

    assert [path.name for path in home.glob("trackio/*.db")] == ["millrace.db"]
    rows = SQLiteStorage.get_logs("millrace", run_id=tracked_run(log).id)
    assert SQLiteStorage.get_run_config("millrace", log.run_id) is not None
    return [
        (row.pop("step"), datetime.datetime.fromisoformat(row.pop("timestamp")).timestamp(), row)
        for row in (dict(row) for row in rows)
    ]


def in_wandb(log: RunLog, home: Path) -> Rows:
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its process writes on after the run is finished
    rows, numbers = [], []
    for file in sorted(home.glob(f"wandb/offline-run-*/run-{tracked_run(log).id}.wandb")):
        for record in map(Record.FromString, to_wandb._records(file.read_bytes())):
            if record.HasField("history"):
                items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                numbers.append(items.pop("_step"))
                del items["_runtime"]
                step, at = items.pop("global_step"), items.pop("_timestamp")
                rows.append((step, at, {name: float(value) for name, value in items.items()}))
    assert numbers == list(range(len(rows))), "rows are in order, none twice and none missing"
    return rows


READ: dict[str, Callable[[RunLog, Path], Rows]] = {
    "tensorboard": in_tensorboard,
    "trackio": in_trackio,
    "wandb": in_wandb,
}
each_kind = pytest.mark.parametrize("kind", READ)


def assert_same(found: Rows, expected: Rows) -> None:
    assert [(step, metrics.keys()) for step, _, metrics in found] == [(s, m.keys()) for s, _, m in expected]
    for (_, at, metrics), (_, wanted_at, values) in zip(found, expected, strict=True):
        assert at == pytest.approx(wanted_at, abs=1e-5)
        assert metrics == pytest.approx(values, rel=1e-6)


@each_kind
def test_it_has_each_step_and_evaluation_once_also_of_a_run_that_goes_on(kind: str, log: RunLog, home: Path) -> None:
    tracker = Tracker(log, kind)
    assert tracker.sync() == [] and not list(home.glob("tensorboard")), "nothing to say yet, nothing is made"
    evaluate(log, 0.25)
    for n in (1, 2, 3):
        train(log, 1 / n)
        if n < 3:
            tracker.sync()
    log.append(End(session_id="first", outcome="finished"))
    tracker.sync(), tracker.sync()
    assert_same(READ[kind](log, home), wanted(log))
    train(log, math.inf)  # beside the run that ended, and by another process
    Tracker(log, kind).sync(), Tracker(log, kind).sync()
    assert_same(READ[kind](log, home), wanted(log))


def _sync_and_die(store: str, kind: str) -> None:
    Tracker(open_run(open_store(store), "run"), kind).sync()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.server
@each_kind
def test_a_run_whose_process_is_killed_goes_on_there_without_doubled_or_missing_rows(
    kind: str, log: RunLog, home: Path
) -> None:
    evaluate(log, 0.25)
    train(log, 1.0)
    child = multiprocessing.get_context("spawn").Process(target=_sync_and_die, args=(log.store.uri, kind))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    train(log, 0.5)
    log.append(End(session_id="first", outcome="failed"))
    Tracker(log, kind).sync()
    assert_same(READ[kind](log, home), wanted(log))


def test_an_event_that_was_cut_off_is_written_again(log: RunLog, home: Path) -> None:
    evaluate(log, 0.25)
    train(log, 1.0)
    log.append(End(session_id="first", outcome="finished"))
    Tracker(log, "tensorboard").sync()
    (file,) = home.glob("tensorboard/*/*")
    file.write_bytes(file.read_bytes()[:-9])
    Tracker(log, "tensorboard").sync()
    assert_same(in_tensorboard(log, home), wanted(log))


@each_kind
def test_an_outage_is_an_error_of_its_own_and_made_up_for_later(
    kind: str, log: RunLog, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    evaluate(log, 0.25)
    train(log, 1.0)
    log.append(End(session_id="first", outcome="finished"))
    monkeypatch.setattr(to_wandb, "_SECONDS_TO_START", 1.0)
    with monkeypatch.context() as away:
        away.setenv("WANDB_MODE", "online")
        away.setenv("WANDB_API_KEY", "0" * 40)
        away.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
        for name in ("tensorboard", "trackio"):
            (home / name).write_text("no folder")
        wandb.teardown()  # it has read the environment
        with pytest.raises(FollowerUnavailable):
            Tracker(log, kind).sync()
        for name in ("tensorboard", "trackio"):
            (home / name).unlink()
    wandb.teardown()
    Tracker(log, kind).sync()
    assert_same(READ[kind](log, home), wanted(log))


def test_a_run_that_was_removed_and_made_anew_is_another_one_there(tmp_path: Path) -> None:
    first, second = (a_log(local_store(tmp_path / name)) for name in ("a", "b"))
    assert len({tracked_run(first).id, tracked_run(second).id, tracked_run(first).id}) == 2


def test_a_missing_tracker_is_refused_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    check_trackers(list(TITLES))
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    for kind in TITLES:
        with pytest.raises(MissingPackage, match=rf"tracking.also = \['{kind}'\]: the package {kind} is not installed"):
            check_trackers([kind])


def test_wandb_without_a_key_is_refused_unless_it_stays_offline(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(home / "netrc"))
    monkeypatch.setenv("HOME", str(home))
    with pytest.raises(InvalidInput, match="no key for Weights & Biases; run `wandb login`, or set WANDB_API_KEY"):
        check_trackers(["wandb"])


@pytest.mark.parametrize(
    ("tracking", "also"),
    [
        ("sqlite:///x.db", []),
        ({"also": "wandb"}, ["wandb"]),
        ({"also": ["tensorboard", "trackio"]}, ["tensorboard", "trackio"]),
    ],
)
def test_one_or_more_are_named_in_the_run_file(tracking: Any, also: list[str]) -> None:
    assert make_config({"workflow": "a:B", "tracking": tracking}, source="test").tracking.also == also


def test_a_moved_run_is_the_same_one_there_and_one_made_again_under_its_name_another(tmp_path: Path) -> None:
    log = a_log(local_store(tmp_path))
    first = tracked_run(log).id
    moved = shutil.copytree(tmp_path / "store", tmp_path / "elsewhere")
    assert tracked_run(open_run(LocalStore(moved), "run")).id == first
    shutil.rmtree(tmp_path / "store")
    assert tracked_run(a_log(local_store(tmp_path))).id != first
    document = json.loads(log.store.get("runs/run/run.json"))
    del document["birth"]  # as runs were recorded before there was one
    log.store.put("runs/run/run.json", json.dumps(document).encode())
    assert tracked_run(log).id == sha256_of_json([log.store.uri, "run", "first"])[:8]
