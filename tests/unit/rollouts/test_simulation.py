"""The real executor, admission and claims in virtual time: what is promised about staleness, on every kind of run."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from tests.simulation import Outcome, Scenario, run_in_virtual_time, simulate

SMALL = Scenario(batch_size=8, max_concurrent=8, n_samples=4, steps=40)
"""A few tenths of a second each."""
LARGE: dict[str, Any] = {"batch_size": 32, "max_concurrent": 32, "n_samples": 8, "steps": 40}


def _outcome(**changes: Any) -> Outcome:
    return simulate(dataclasses.replace(SMALL, **changes))


def test_virtual_time_jumps_to_the_next_timer_and_finds_a_hang():
    async def sleep(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(sleep(1e6)) == pytest.approx(1e6)
    with pytest.raises(RuntimeError, match="waits for another"):
        run_in_virtual_time(asyncio.Event().wait())


@pytest.mark.parametrize(("bound", "max_concurrent"), [(0, 8), (0, 32), (0.5, 32), (1, 8), (2, 32), (8, 32)])
@pytest.mark.parametrize(
    "kind", [{}, {"rejected": 0.4}, {"rejected": 0.4, "dynamic_batch": True}, {"steps_per_update": 3}]
)
@pytest.mark.parametrize("stale_policy", ["strict", "mask"])
def test_no_token_over_the_bound_is_trained(bound: float, max_concurrent: int, kind: dict[str, Any], stale_policy: Any):
    outcome = _outcome(max_staleness=bound, max_concurrent=max_concurrent, stale_policy=stale_policy, steps=20, **kind)
    assert outcome.over_bound == 0
    if stale_policy == "strict":
        assert outcome.lag_max <= -(-bound // 1)
    if bound == 0:
        assert outcome.lag_max == 0 and outcome.drop_rate == 0 and outcome.outcomes["stale"] == 0
    assert outcome.outcomes["trained"] == sum(outcome.batches)


def test_a_batch_is_always_full_unless_steps_take_attempts_as_they_come():
    full = _outcome(max_staleness=2, rejected=0.4)
    assert full == _outcome(max_staleness=2, rejected=0.4), "a simulation gives the same twice"
    assert set(full.batches) == {8} and max(full.attempts) > 8
    dynamic = _outcome(max_staleness=2, rejected=0.4, dynamic_batch=True)
    assert set(dynamic.attempts) == {8} and min(dynamic.batches) < 8


def test_a_filter_that_rejects_everything_skips_steps_and_never_hangs():
    for dynamic in (False, True):
        outcome = _outcome(rejected=1.0, dynamic_batch=dynamic, steps=10)
        assert outcome.batches == [0] * 10 and outcome.drop_rate == 0
        assert all(attempts == 8 if dynamic else 80 <= attempts < 100 for attempts in outcome.attempts)


def test_overlap_keeps_the_engine_busy_where_synchronous_training_waits_for_the_slowest():
    synchronous = _outcome(max_staleness=0, **LARGE)
    assert synchronous.utilisation < 0.4
    half = _outcome(max_staleness=0.5, stale_policy="correct", **LARGE)
    for stale_policy, bound in (("mask", 1), ("correct", 2)):
        overlapped = _outcome(max_staleness=bound, stale_policy=stale_policy, pace=False, **LARGE)
        assert overlapped.utilisation >= 0.95 and overlapped.drop_rate < 0.01 and overlapped.length_bias < 0.05
        assert overlapped.steps_per_hour > 2.5 * synchronous.steps_per_hour
        assert synchronous.steps_per_hour < half.steps_per_hour < overlapped.steps_per_hour


def test_pacing_loses_fewer_groups_and_keeps_the_engine_busy():
    paced, unpaced = (_outcome(max_staleness=3, pace=pace, **LARGE) for pace in (True, False))
    assert paced.drop_rate < 0.7 * unpaced.drop_rate
    assert paced.length_bias < unpaced.length_bias
    assert paced.utilisation >= 0.9
    wide = _outcome(max_staleness=4, **LARGE)
    assert wide.drop_rate < 0.01 and wide.length_bias < 0.05 and wide.utilisation >= 0.9


@pytest.mark.parametrize("stale_policy", ["strict", "mask"])
def test_every_run_comes_to_its_last_step_whatever_went_over_the_bound_on_the_way(stale_policy: Any):
    """Only so many groups may start as the run still needs: one that was dropped must not count as one of them."""
    for seed in range(8):
        outcome = _outcome(max_staleness=1, stale_policy=stale_policy, steps=20, seed=seed)
        assert outcome.outcomes["trained"] == 20 * 8


def test_throughput_follows_the_number_of_workers():
    """Each has room for a sixteenth of what may be in flight; sixteen divide it, and none is in another's way."""
    alone = Scenario(max_concurrent=8, n_samples=4, sigma=0.5, train_seconds=1.0, publish_seconds=0.1, steps=20)
    outcomes = {count: simulate(dataclasses.replace(alone, num_workers=count)) for count in (1, 4, 16)}
    speed = {count: outcome.steps_per_hour / outcomes[1].steps_per_hour for count, outcome in outcomes.items()}
    assert speed[4] > 3.2 and speed[16] > 6
    for outcome in outcomes.values():
        assert outcome.outcomes["trained"] == 20 * alone.batch_size and outcome.over_bound == 0


@pytest.mark.parametrize(
    "kind",
    [
        {"max_staleness": 1},
        {"max_staleness": 1, "rejected": 0.4},
        {"max_staleness": 2, "rejected": 0.4, "dynamic_batch": True},
        {"max_staleness": 0.5, "rejected": 0.4},
        {"max_staleness": 0, "rejected": 0.4},
        {"max_staleness": 1, "rejected": 0.4, "steps_per_update": 3},
    ],
)
def test_in_a_fixed_schedule_neither_claims_nor_versions_depend_on_the_moment(kind: dict[str, Any]):
    """Durations, workers and concurrency differ; what the filter says of a prompt does not."""
    others: list[dict[str, Any]] = [
        {"sigma": 0.1},
        {"median_seconds": 3.0, "train_seconds": 200.0, "shard_seconds": 1.0},
        {"num_workers": 2},
        {"num_workers": 3, "max_concurrent": 4, "sigma": 2.0},
        {"max_concurrent": 64},
        {"max_concurrent": 5},
    ]
    outcome = _outcome(schedule="fixed", steps=15, **kind)
    assert not outcome.owes and outcome.drop_rate == 0 and outcome.over_bound == 0
    for changes in others:
        other = _outcome(schedule="fixed", steps=15, **{**kind, **changes})
        assert other.claims == outcome.claims, changes
        assert not other.owes, changes


def test_in_a_fixed_schedule_a_batch_is_sampled_whole_by_the_policy_so_many_steps_before_it():
    for bound in (0, 1, 2):
        outcome = _outcome(schedule="fixed", max_staleness=bound, rejected=0.4, steps=10)
        versions = [{version for version in versions} for _, versions in outcome.claims]
        assert versions == [{f"[{max(0, n - bound)}]"} for n in range(10)]
    free = [_outcome(max_staleness=1, rejected=0.4, num_workers=workers, steps=10) for workers in (1, 2)]
    assert free[0].claims != free[1].claims, "the schedule makes no difference"


def test_a_fixed_schedule_still_overlaps_generation_and_training():
    synchronous = _outcome(max_staleness=0, train_seconds=60.0, sigma=0.2)
    fixed = _outcome(max_staleness=1, schedule="fixed", train_seconds=60.0, sigma=0.2)
    free = _outcome(max_staleness=1, train_seconds=60.0, sigma=0.2)
    assert fixed.steps_per_hour > 1.4 * synchronous.steps_per_hour
    assert fixed.steps_per_hour > 0.9 * free.steps_per_hour
