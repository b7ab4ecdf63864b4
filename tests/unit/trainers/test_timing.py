"""The parts of a round add up to its wall-clock, whatever the clocks of producers, driver and trainer say."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.log.entries import Shard
from tests.builders import a_shard
from trainers.timing import PHASES, PRODUCING, split_wait, time_budget

_SECONDS = st.floats(min_value=0, max_value=1e6)
_SHARD = st.tuples(st.sampled_from("abc"), st.fixed_dictionaries({phase: _SECONDS for phase in PRODUCING}))


def _shard(producer: str, seconds: dict[str, float]) -> Shard:
    return dataclasses.replace(a_shard("s", []), producer=producer, seconds=seconds)


_CLOCKS = st.fixed_dictionaries({f"{phase}_seconds": _SECONDS for phase in ("publish", "load", "train", "save")})


@given(_SECONDS, st.lists(_SHARD, max_size=5), _CLOCKS, st.floats(-1e6, 1e6))
def test_any_timings_add_up_to_the_round_and_none_is_negative(
    waited: float, shards: list[tuple[str, dict[str, float]]], clocks: dict[str, float], wall: float
) -> None:
    split = split_wait(waited, [_shard(*shard) for shard in shards], num_producers=2)
    parts = [split[f"{phase}_seconds"] for phase in (*PRODUCING, "wait")]
    assert sum(parts) == pytest.approx(waited) and min(parts) >= 0
    budget = time_budget({**split, **clocks}, wall_seconds=wall)
    parts = [budget[f"{phase}_seconds"] for phase in (*PHASES, "idle")]
    assert sum(parts) == pytest.approx(budget["round_seconds"]) and min(parts) >= 0
    assert budget["round_seconds"] >= wall
    for side in ("trainer", "rollout"):
        assert 0 <= budget.get(f"{side}_idle_fraction", 0.0) <= 1


def test_several_producers_at_once_account_for_no_more_than_the_busiest_of_them() -> None:
    shards = [
        _shard("a", {"generate": 6.0, "reward": 2.0, "commit": 0.0}),
        _shard("b", {"generate": 3.0, "reward": 1.0}),
    ]
    assert split_wait(10.0, shards, num_producers=2) == {
        "generate_seconds": 6.0, "reward_seconds": 2.0, "commit_seconds": 0.0, "wait_seconds": 2.0,
        "rollout_seconds": 6.0,
    }  # fmt: skip


def test_rollouts_that_ran_ahead_cost_the_round_only_what_was_waited_for() -> None:
    ahead = split_wait(0.5, [_shard("a", {"generate": 9.0, "reward": 0.0, "commit": 1.0})], num_producers=1)
    assert ahead["generate_seconds"] == pytest.approx(0.45) and ahead["commit_seconds"] == pytest.approx(0.05)
    assert ahead["wait_seconds"] == pytest.approx(0.0)
    budget = time_budget({**ahead, "train_seconds": 8.0}, wall_seconds=10.0)
    assert budget["idle_seconds"] == pytest.approx(1.5)
    assert budget["trainer_idle_fraction"] == pytest.approx(0.2)
    assert budget["rollout_idle_fraction"] == 0.0
    split = split_wait(10.0, [_shard("a", {"generate": 10.0})], num_producers=4)
    idle = time_budget(split, wall_seconds=10.0)["rollout_idle_fraction"]
    assert idle == pytest.approx(0.75), "producers that took no part were idle"
