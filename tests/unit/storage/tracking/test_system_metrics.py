"""What the machine did is measured by MLflow's monitors, under the names its page for it looks for."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from storage.tracking.system_metrics import SystemMetrics


def test_processors_memory_disk_and_network_are_measured_in_their_range() -> None:
    system = SystemMetrics()
    system.sample()
    sum(number * number for number in range(2_000_000))  # something to measure
    found = system.sample()
    assert 0 < found["system/cpu_utilization_percentage"] <= 100 * 1024
    assert 0 < found["system/system_memory_usage_percentage"] <= 100
    assert 0 <= found["system/disk_usage_percentage"] <= 100
    assert found["system/network_receive_megabytes"] >= 0
    assert all(isinstance(value, float) for value in found.values())


def test_a_gpu_is_measured_where_its_driver_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.system_metrics.metrics import gpu_monitor

    class Answers(types.ModuleType):
        """The five questions that MLflow asks NVIDIA's library, answered as a card would."""

        NVMLError = RuntimeError

        def nvmlInit(self) -> None: ...

        def nvmlDeviceGetCount(self) -> int:
            return 1

        def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
            return index

        def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
            return types.SimpleNamespace(used=40e9, total=80e9)

        def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
            return types.SimpleNamespace(gpu=75)

        def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
            return 350_000

        def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
            return 700_000

    card = Answers("pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", card)
    monkeypatch.setattr(gpu_monitor, "pynvml", card, raising=False)
    found = SystemMetrics().sample()
    assert found["system/gpu_0_utilization_percentage"] == 75.0
    assert found["system/gpu_0_memory_usage_percentage"] == 50.0
