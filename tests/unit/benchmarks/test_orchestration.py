"""What the orchestration benchmark makes of a run's log and of the looks at its processes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.orchestration import SKIPPED, Sample, disk_usage, report
from storage.log.entries import LogEntry
from tests.builders import a_log, a_step


def _entries(*, rounds: int, first: float, then: float) -> list[LogEntry]:
    """Steps that take `first` seconds, and `then` seconds after those that are not counted."""
    log = a_log()
    step = a_step(log.state, trained=[])
    phases = {"generate": 0.2, "reward": 0.1, "train": 0.3, "save": 0.05, "commit": 0.02}
    metrics = {f"{phase}_seconds": seconds for phase, seconds in phases.items()}
    at, entries = 0.0, []
    for number in range(rounds):
        at += first if number < SKIPPED else then
        body = dataclasses.replace(step, metrics=metrics)
        entries.append(LogEntry(number=number, kind="step", written_at=at, body=body))
    return entries


def _samples(process: str, *, rss: list[int]) -> list[Sample]:
    return [
        Sample(rounds=100 * number, process=process, rss_bytes=size, cpu_seconds=5.0 + 8.0 * number)
        for number, size in enumerate(rss, 2)
    ]


def test_overhead_is_what_is_neither_generation_nor_reward_nor_training():
    numbers = report(_entries(rounds=30, first=9.0, then=0.85), _samples("driver", rss=[1000] * 3), task_runs=120)
    assert numbers["overhead_seconds"]["median"] == pytest.approx(0.25)
    assert numbers["median_seconds"]["save"] == 0.05 and numbers["median_seconds"]["publish"] == 0.0
    assert numbers["share_of_usual_round"] == pytest.approx(0.25 / 30)
    assert numbers["task_runs_per_round"] == 4
    bars = {"overhead": True, "share": True, "task_runs": True, "memory": True, "bytes": True, "store": None}
    assert numbers["met"] == bars
    slow = report(_entries(rounds=30, first=1.0, then=0.95), _samples("driver", rss=[1000] * 3), task_runs=330)
    assert slow["met"] == bars | {"overhead": False, "share": False, "task_runs": False}


def test_memory_is_a_line_through_each_process_from_when_it_has_started():
    entries = _entries(rounds=30, first=1.0, then=0.7)
    samples = [
        *_samples("driver", rss=[1000, 1020, 1040, 1060]),  # 200 more in 1,000 rounds
        *_samples("trainer-0", rss=[2000, 2040, 1960, 2000]),
    ]
    numbers = report(entries, samples, task_runs=90)
    driver, trainer = numbers["processes"]["driver"], numbers["processes"]["trainer-0"]
    assert driver["slope_bytes_per_1000_rounds"] == pytest.approx(200) and driver["growth_per_1000_rounds"] == 0.2
    assert abs(trainer["growth_per_1000_rounds"]) < 0.1
    assert driver["cpu_seconds_per_round"] == pytest.approx(0.08)
    assert numbers["met"]["memory"] is False

    early = Sample(rounds=10, process="driver", rss_bytes=500, cpu_seconds=5.0)
    numbers = report(entries, [early, *_samples("driver", rss=[1000] * 3)], task_runs=90)
    assert numbers["met"]["memory"] is True
    assert list(numbers["processes"]["driver"]["rss_bytes"]) == [10, 200, 300, 400]
    two_looks = report(entries, _samples("driver", rss=[1000, 9000]), task_runs=90)
    assert two_looks["met"]["memory"] is None


def test_growth_of_the_disk_and_of_a_process_is_judged_in_bytes():
    entries, size = _entries(rounds=30, first=1.0, then=0.7), 10**8
    for grown, met in ((400_000, True), (2_000_000, False)):  # in 100 rounds
        disk = {100 * n: {"policies": size + n * grown, "log": size * n} for n in range(2, 6)}
        samples = _samples("trainer-0", rss=[size + n * grown for n in range(4)])
        numbers = report(entries, samples, task_runs=90, disk=disk)
        assert numbers["disk"]["policies"]["slope_bytes_per_1000_rounds"] == pytest.approx(10 * grown)
        assert (numbers["met"]["store"], numbers["met"]["bytes"]) == (met, met)
        assert list(numbers["disk"]["log"]["bytes"]) == [200, 300, 400, 500]


def test_what_a_run_has_written_is_counted_by_place(tmp_path: Path):
    for name in ("store/runs/r/policies/1-a/model", "store/runs/r/log/0.json", "prefect/prefect.db", "mlflow.db"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 5000)
    assert disk_usage(tmp_path) == dict.fromkeys(("policies", "log", "prefect", "mlflow.db"), 8192)
