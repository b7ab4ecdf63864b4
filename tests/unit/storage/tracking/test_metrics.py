"""What the machine did is measured by MLflow's monitors, under the names its page for it looks for; whose score is the
run's."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from storage.log.entries import Evaluation, LogEntry, TaskSet
from storage.tracking.metrics import SystemMetrics, charted


def test_processors_memory_disk_and_network_are_measured_in_their_range() -> None:
    system = SystemMetrics()
    system.sample()
    sum(number * number for number in range(2_000_000))  # something to measure
    measured = system.sample()
    assert 0 < measured["system/cpu_utilization_percentage"] <= 100 * 1024
    assert 0 < measured["system/system_memory_usage_percentage"] <= 100
    assert 0 <= measured["system/disk_usage_percentage"] <= 100
    assert measured["system/network_receive_megabytes"] >= 0
    assert all(isinstance(value, float) for value in measured.values())


def test_a_gpu_is_measured_if_its_driver_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.system_metrics.metrics import gpu_monitor

    card: Any = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=40e9, total=80e9),
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=75),
        nvmlDeviceGetPowerUsage=lambda handle: 350_000,
        nvmlDeviceGetEnforcedPowerLimit=lambda handle: 700_000,
    )
    monkeypatch.setitem(sys.modules, "pynvml", card)
    monkeypatch.setattr(gpu_monitor, "pynvml", card, raising=False)
    measured = SystemMetrics().sample()
    assert measured["system/gpu_0_utilization_percentage"] == 75.0
    assert measured["system/gpu_0_memory_usage_percentage"] == 50.0


def test_what_a_user_asked_otherwise_is_not_among_the_runs_own_scores() -> None:
    """MLflow shows the newest of a name as the run's."""
    tasks = TaskSet(count=200, sha256="t", ids_sha256="i")

    def named(**fields: Any) -> set[str]:
        facts = {"version": 3, "num_tasks": 100, "num_failed": 0, "shard_id": "e", "seconds": 1.0, "tasks": tasks}
        body = Evaluation(**{"split": "test", "score": 0.5, **facts, **fields})
        step, values = charted(
            LogEntry(number=9, kind="eval", written_at=1.0, body=body), {"num_tasks": 100, "temperature": 0.0}
        )
        return {name.rpartition("/")[0] for name in values} if step == 3 else set()

    assert named() == {"eval/test"} == named(temperature=0.0)
    assert named(num_tasks=20) == {"eval-by-hand/test"} == named(temperature=1.0)
    assert named(split="hard", num_tasks=20) == {"eval/hard"}
