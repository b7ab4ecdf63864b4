"""Housekeeping as a flow calls it, and that a run goes on from what it leaves, bit for bit."""

from __future__ import annotations

import asyncio
import inspect
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from storage.log.claims import next_claim
from storage.log.run_log import RunLog
from storage.log.runs import open_run
from storage.objects.object_store import LocalStore
from storage.retention.retention import reading
from tasks.maintain import collect_from_runs
from tests.builders import a_config
from tests.unit.trainers.builders import commit, config_of, group_of, new_run, open_trainer, random_rows, tiny_model
from trainers.worker import TrainerWorker

RULES: dict[str, Any] = {"keep_last": 1, "keep_every": 0, "older_than": "", "max_size": ""}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of seven steps with a state after the third and sixth, and a group no step has taken; never written to."""
    root = tmp_path_factory.mktemp("trained")
    folder = tiny_model(root / "tiny")
    log = new_run(root, folder)
    rows = random_rows(folder, num_groups=9)
    for number in range(9):
        commit(log, f"shard-{number + 1}", [group_of([row for row in rows if row.group == number], position=number)])
    worker = _worker(log)
    for _ in range(7):
        _step(worker, log)
    return root / "store"


@pytest.fixture
def log(trained: Path, tmp_path: Path) -> RunLog:
    """A copy of it."""
    return open_run(LocalStore(Path(shutil.copytree(trained, tmp_path / "store"))), "run")


def _worker(log: RunLog) -> TrainerWorker:
    cache = Path(urlsplit(log.store.uri).path).parent / "cache"
    return open_trainer(log, config_of(max_staleness=100, checkpoint_every=3), cache=cache)


def _step(worker: TrainerWorker, log: RunLog) -> str:
    """Train on the next group; returns the digest of the weights."""
    rules = a_config(batch_size=1, max_staleness=100, stale_policy="strict", min_usable=2)
    claim = next_claim(log.refresh(), rules)
    assert claim is not None
    step = worker.train_step(claim, extra_metrics={}, round_seconds=0.0, session_id="")
    log.refresh()
    return step.policy.weights_sha256


def _collect(log: RunLog, **changes: Any) -> dict[str, Any]:
    arguments = {"runs": [], "store": log.store.uri, "dry_run": False, "ignore_readers": False, **RULES, **changes}
    freed: dict[str, Any] = asyncio.run(collect_from_runs.fn(**arguments))
    return freed


def test_a_run_goes_on_bit_for_bit_from_what_is_left(log: RunLog, trained: Path, tmp_path: Path) -> None:
    untouched = open_run(LocalStore(Path(shutil.copytree(trained, tmp_path / "untouched"))), "run")
    expected = [_step(worker, untouched) for worker in [_worker(untouched)] for _ in range(2)]
    _collect(log)
    assert log.refresh().retired_policies == set(range(1, 7))
    assert sorted(log.store.names("runs/run/shards")) == [f"shard-{number}.arrow" for number in (7, 8, 9)]
    assert [name.split("-")[0] for name in log.store.names("runs/run/state")] == ["6"]
    worker = _worker(log)  # the state of step 6, then step 7 once more
    _collect(log)
    assert [_step(worker, log), _step(worker, log)] == expected
    _collect(log)
    assert log.refresh().counters()["trained"] == 9 and log.state.step == 9


def test_what_is_freed_is_said(log: RunLog, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "millrace.maintain")
    would = _collect(log, dry_run=True)
    assert would["run"]["freed_bytes"] > 0 and not would["run"]["removed"]
    assert "run: would remove 6 × shard, 1 × state, 6 × policy" in caplog.text
    with reading(log, "replay"):
        assert not _collect(log)["run"]["removed"]
    assert "in use by replay" in caplog.text
    assert _collect(log) == {"run": {"freed_bytes": would["run"]["freed_bytes"], "removed": True}}
    assert _collect(log)["run"]["freed_bytes"] == 0


def test_the_form_and_the_command_have_the_same_knobs() -> None:
    from cli.operate.housekeeping import gc
    from flows.maintain import maintain

    form, command = inspect.signature(maintain.fn).parameters, inspect.signature(gc).parameters
    assert form.keys() == command.keys() - {"sure", "as_json"}
    assert maintain.fn.__doc__ is not None and all(f"\n        {name}: " in maintain.fn.__doc__ for name in form)
