"""What the programs about equal runs and equal draws make of their numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.common_draws import variances
from benchmarks.repeated_runs import compare
from storage.log.claims import NOTHING
from storage.log.run_state import RunState
from tests.builders import a_log, a_shard, a_step, a_summary


def _state(*digests: str) -> RunState:
    log = a_log()
    for number, digest in enumerate(digests):
        log.append(a_shard(f"s{number}", [a_summary(number)]))
        step = a_step(log.state, trained=[f"0.task{number}"])
        log.append(replace(step, policy=replace(step.policy, weights_sha256=digest), owes=NOTHING))
    return log.state


def test_policies_of_two_runs_are_compared_step_by_step():
    numbers = compare(_state("a" * 64, "b" * 64, "c" * 64), _state("a" * 64, "c" * 64, "c" * 64))
    assert (numbers["steps"], numbers["equal_policies"], numbers["different_policies"]) == (3, 2, 3)
    assert numbers["as_filed"] == [3, 3] and numbers["last_policy"] == "c" * 16
    assert compare(_state("a" * 64, "b" * 64), _state("a" * 64))["equal_policies"] == 1, "a step is missing"


def test_noise_that_both_losses_share_is_not_in_their_difference_with_the_same_seed():
    noise = [0.1, 0.4, 0.2, 0.7]
    shared = variances([1 + each for each in noise], noise)
    assert shared["difference"] == pytest.approx(1) and shared["same_seed"] == pytest.approx(0)
    assert shared["different_seeds"] > 0.05
    alone = variances(noise, [0.5, 0.1, 0.9, 0.3])
    assert alone["same_seed"] >= 0.5 * alone["different_seeds"]
