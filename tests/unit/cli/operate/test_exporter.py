"""`millrace exporter` says in Prometheus' words what the logs say, also of runs that are not trained now."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from dataclasses import replace

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cli.operate.exporter import RunCollector
from storage.log.entries import Alias, Quarantine, TaskSet
from storage.log.run_log import RunLog
from storage.log.runs import create_run, trainer_lock
from storage.objects.object_store import LocalStore
from tests.builders import BASE, a_shard, a_step, a_summary
from tests.unit.cli.builders import a_run_of_one_step, an_evaluation, printed, running

Values = dict[tuple[str, ...], float]


@pytest.fixture
def log(log: RunLog) -> RunLog:
    """One step on one of two groups, and a shard in quarantine."""
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


@pytest.fixture
def scrape(store: LocalStore) -> Callable[[], Values]:
    registry = CollectorRegistry()
    registry.register(RunCollector(store))
    return lambda: _parsed(generate_latest(registry).decode())


def test_a_run_in_numbers(log: RunLog, scrape: Callable[[], Values]) -> None:
    values = scrape()
    assert values["steps", "run"] == 1 and values["policy_version", "run"] == 1 and values["training", "run"] == 0
    assert values["groups", "run", "trained"] == 1 and values["quarantined_shards", "run"] == 1
    outcomes = {key[2]: value for key, value in values.items() if key[0] == "groups"}
    assert outcomes.pop("submitted") == sum(outcomes.values())
    assert values["step_metric", "run", "engine_gap"] == 0.001 and values["step_metric", "run", "loss"] == 0.5
    assert values["phase_seconds", "run", "round"] == 2.0 and values["phase_seconds", "run", "train"] == 0.75
    assert values["suspicious_gap", "run"] == 0.05, "of a run in float32"
    assert values["last_step_timestamp_seconds", "run"] == log.entries[2].written_at
    assert values["last_entry_timestamp_seconds", "run"] == log.entries[-1].written_at
    assert not any(key[0] in ("score", "champion_version") for key in values)


def test_each_scrape_reads_what_is_new_and_leaves_a_damaged_log_out(
    log: RunLog, scrape: Callable[[], Values], store: LocalStore
) -> None:
    assert scrape()["steps", "run"] == 1
    create_run(store, "other", {"train": {"dtype": "bfloat16"}})
    create_run(store, "damaged", {}).append(BASE)
    store.put(f"runs/damaged/log/{0:020d}.json", b"{")
    log.append(an_evaluation(1, 0.75))
    log.append(Alias(name="champion", version=1, checksum="sum"))
    with trainer_lock(log):
        values = scrape()
    assert values["score", "run", "test"] == 0.75 and values["score_tasks", "run", "test"] == 4
    assert values["champion_version", "run"] == 1
    assert values["suspicious_gap", "other"] == 0.15
    assert values["training", "run"] == 1 and values["training", "other"] == 0 and values["steps", "other"] == 0
    assert ("steps", "damaged") not in values


def test_the_score_is_one_that_the_run_itself_asks(scrape: Callable[[], Values], store: LocalStore) -> None:
    log = a_run_of_one_step(store, {"evaluation": {"num_tasks": 4}}, run_id="asks")
    log.append(an_evaluation(0, 0.25))
    of_four = TaskSet(count=4, sha256="t", ids_sha256="i")
    log.append(an_evaluation(1, 1.0, num_tasks=1, tasks=of_four, shard_id="one"))  # by hand, of one task
    log.append(an_evaluation(1, 0.5, split="hard", shard_id="hard"))
    values = scrape()
    assert values["score", "asks", "test"] == 0.25 and values["score_tasks", "asks", "test"] == 4
    assert values["score", "asks", "hard"] == 0.5


def test_the_command_serves_until_it_is_interrupted(log: RunLog) -> None:
    with running("-m", "cli.main", "exporter", "--port", "0") as process:
        address = re.search(r"http://127\.0\.0\.1:\d+/metrics", process.stdout.readline())
        assert address is not None
        assert _parsed(httpx.get(address[0]).text)["steps", "run"] == 1
        process.send_signal(2)
        assert process.wait(timeout=30) == 0


def test_a_port_that_is_taken_is_one_sentence(store: LocalStore) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"cannot listen on 127.0.0.1:{port}" in printed(f"exporter --port {port}", status=2)
