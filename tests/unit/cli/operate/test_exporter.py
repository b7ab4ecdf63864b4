"""`millrace exporter` says in Prometheus' words what the logs say, also of runs that nobody trains."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from cli.main import app
from cli.operate.exporter import RunCollector
from storage.log.entries import Alias, Evaluation, Quarantine
from storage.log.run_log import RunLog
from storage.log.runs import create_run, trainer_lock
from storage.objects.object_store import LocalStore
from tests.builders import BASE, a_shard, a_step, a_summary

Values = dict[tuple[str, ...], float]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    return LocalStore(tmp_path / "store")


@pytest.fixture
def log(store: LocalStore) -> RunLog:
    """One step on one of two groups, and a shard in quarantine."""
    log = create_run(store, "run", {})
    log.append(BASE)
    log.append(a_shard("s1", [a_summary(1), a_summary(2)]))
    metrics = {"loss": 0.5, "engine_gap": 0.001, "round_seconds": 2.0, "train_seconds": 0.75}
    log.append(replace(a_step(log.state, trained=["0.task1"]), metrics=metrics))
    log.append(a_shard("s2", [a_summary(3)]))
    log.append(Quarantine(shard_id="s2", reason="test"))
    return log


def _parsed(text: str) -> Values:
    """Value by metric and label values, the run's first."""
    return {
        (
            sample.name.removeprefix("millrace_"),
            *(sample.labels[label] for label in sorted(sample.labels, key="run".__ne__)),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _scrape(registry: CollectorRegistry) -> Values:
    return _parsed(generate_latest(registry).decode())


@pytest.fixture
def registry(store: LocalStore) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(RunCollector(store))
    return registry


def test_a_run_in_numbers(log: RunLog, registry: CollectorRegistry) -> None:
    values = _scrape(registry)
    assert values["steps", "run"] == 1 and values["policy_version", "run"] == 1 and values["training", "run"] == 0
    assert values["groups", "run", "trained"] == 1 and values["quarantined_shards", "run"] == 1
    outcomes = {key[2]: value for key, value in values.items() if key[0] == "groups"}
    assert outcomes.pop("submitted") == sum(outcomes.values())
    assert values["step_metric", "run", "engine_gap"] == 0.001 and values["step_metric", "run", "loss"] == 0.5
    assert values["phase_seconds", "run", "round"] == 2.0 and values["phase_seconds", "run", "train"] == 0.75
    assert values["last_step_timestamp_seconds", "run"] == log.entries[2].written_at
    assert values["last_entry_timestamp_seconds", "run"] == log.entries[-1].written_at
    assert not any(key[0] in ("score", "champion_version") for key in values)


def test_each_scrape_reads_what_is_new(log: RunLog, registry: CollectorRegistry, store: LocalStore) -> None:
    assert _scrape(registry)["steps", "run"] == 1
    create_run(store, "other", {})
    score = Evaluation(
        version=1, split="test", score=0.75, num_tasks=4, n_samples=1, num_failed=0, shard_id="e1", seconds=1.0
    )
    log.append(score)
    log.append(Alias(name="champion", version=1, checksum="sum"))
    with trainer_lock(log):
        values = _scrape(registry)
    assert values["score", "run", "test"] == 0.75 and values["champion_version", "run"] == 1
    assert values["training", "run"] == 1 and values["training", "other"] == 0 and values["steps", "other"] == 0


def test_a_damaged_log_is_left_out_and_the_others_are_there(
    log: RunLog, registry: CollectorRegistry, store: LocalStore
) -> None:
    create_run(store, "damaged", {}).append(BASE)
    store.put(f"runs/damaged/log/{0:020d}.json", b"{")
    values = _scrape(registry)
    assert ("steps", "run") in values and ("steps", "damaged") not in values


def test_the_command_serves_until_it_is_interrupted(log: RunLog, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.main", "exporter", "--port", "0"],
        env={**os.environ, "MILLRACE_HOME": str(tmp_path), "COLUMNS": "300"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = re.search(r"http://127\.0\.0\.1:\d+/metrics", process.stdout.readline())
        assert address is not None
        assert _parsed(httpx.get(address[0]).text)["steps", "run"] == 1
        process.send_signal(2)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()


def test_a_port_that_is_taken_is_one_sentence(store: LocalStore) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(app, ["exporter", "--port", port], env={"COLUMNS": "300"})
    assert result.exit_code == 2 and f"cannot listen on 127.0.0.1:{port}" in result.output
