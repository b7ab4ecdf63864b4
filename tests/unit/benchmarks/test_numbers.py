"""What benchmarks make of their runs, and runs that are too short to measure anything."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from benchmarks.producers import rate
from benchmarks.trainer_kinds import KINDS, REST, by_kind, kind_of, workload
from benchmarks.trl_speed import mean_reaches_target
from storage.log.entries import LogEntry
from tests.builders import a_shard, a_summary
from tests.documents import PROJECT


def _run(*scores: tuple[float, float]) -> dict[str, Any]:
    return {"scores": [list(score) for score in scores]}


def test_the_mean_accuracy_is_taken_over_runs_and_drawn_as_a_line_between_evaluations() -> None:
    early, late = _run((1, 0.4), (3, 0.8), (5, 1.0)), _run((1, 0.6), (5, 0.8), (7, 0.9))
    # at 4 s 0.8 on average, at 6 s 0.95
    assert mean_reaches_target([early, late]) == pytest.approx(4 + 2 * 0.1 / 0.15)
    for never in ([_run((1, 0.4), (3, 0.89))], [_run(), _run()]):
        assert mean_reaches_target(never) is None


def test_only_attempts_committed_within_the_window_count() -> None:
    shards = [a_shard(f"s{number}", [a_summary()]) for number in range(4)]
    entries = [
        LogEntry(number=number, kind="shard", written_at=float(number), body=shard)
        for number, shard in enumerate(shards)
    ]
    found = rate(entries, 1.0, 3.0)
    counted = sum(shard.num_rows for shard in shards[1:3])
    assert counted and found["attempts_per_second"] == pytest.approx(counted / 2)
    assert sum(found["rows_of"].values()) == counted


@pytest.mark.parametrize(
    ("command", "message"),
    [("staleness --steps 2", "at least 3"), ("trl_speed --workload arithmetic --steps 3", "at least 4")],
)
def test_too_few_steps_are_refused(command: str, message: str) -> None:
    words = [sys.executable, "-m", *f"benchmarks.{command}".split()]
    done = subprocess.run(words, cwd=PROJECT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "--steps" in done.stderr and message in done.stderr, done.stderr


def test_the_seconds_of_a_step_are_counted_by_what_they_are_spent_on() -> None:
    operations = {
        "aten::mm": "matrix products",
        "aten::mul": "other arithmetic",  # not a product of matrices, though its name begins alike
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
        "aten::copy_": "copies and casts",
        "aten::_to_copy": "copies and casts",
        "aten::exp": "softmax and the like",
        "aten::_fused_adamw_": "optimizer and norms of gradients",
        "aten::add_": "other arithmetic",
        "aten::view": REST,
    }
    assert {name: kind_of(name) for name in operations} == operations
    numbers = by_kind(lambda: torch.ones(300, 300) @ torch.ones(300, 300))
    assert numbers["matrix products"] > 0 and list(numbers) == [*KINDS, REST]
    samples = workload(num_groups=16, attempts=2)
    flat = [len(set(samples.rewards_B[samples.groups_B == group])) == 1 for group in range(16)]
    assert flat == [True] * 7 + [False] * 9
