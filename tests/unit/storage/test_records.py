"""Records survive JSON exactly, and a reader is not upset by a newer writer."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.log.entries import ENTRY_KINDS, Claim, Policy, Shard, Step, from_json, to_json
from storage.records import TRAINABLE_STATUSES, RolloutGroup, Sampling, Task, Trajectory
from tests.builders import a_group, a_shard, a_summary, a_trajectory, a_turn

EVERY_KIND = [*ENTRY_KINDS.values(), RolloutGroup, Trajectory, Task, Sampling]


@pytest.mark.parametrize("kind", EVERY_KIND, ids=lambda kind: kind.__name__)
def test_every_record_survives_json(kind: type):
    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(record=st.from_type(kind))
    def survives(record: Any) -> None:
        text = json.dumps(to_json(record))
        again = from_json(kind, json.loads(text))
        assert repr(again) == repr(record)  # repr, because NaN differs from itself
        assert json.dumps(to_json(again)) == text

    survives()


def test_a_key_of_a_newer_writer_is_ignored_at_every_depth():
    value = to_json(a_shard("s0", [a_summary(0)]))
    value["colour"] = "blue"
    value["groups"][0]["shape"] = {"corners": 3}
    assert from_json(Shard, value) == a_shard("s0", [a_summary(0)])


def test_a_missing_key_is_an_error_unless_it_has_a_default():
    value = to_json(a_turn())
    del value["tool_calls"]
    assert from_json(type(a_turn()), value) == a_turn()
    del value["sampled_ids"]
    with pytest.raises(TypeError, match="sampled_ids"):
        from_json(type(a_turn()), value)


def test_null_stays_null_and_nested_records_come_back_as_records():
    assert from_json(Policy, {"version": 0, "path": "p", "weights_sha256": "w", "parent": None}).parent is None
    group = from_json(RolloutGroup, json.loads(json.dumps(to_json(a_group(rewards=[1, None])))))
    assert [t.reward for t in group.trajectories] == [1, None]
    assert group.trajectories[0].turns[0] == a_turn()


def test_the_kinds_of_the_log_are_named_once_and_frozen():
    assert len(set(ENTRY_KINDS.values())) == len(ENTRY_KINDS)
    for kind in [*ENTRY_KINDS.values(), Claim, Step]:
        assert dataclasses.fields(kind)
        assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("attempt", "usable"),
    [
        (a_trajectory(1.0), True),
        (a_trajectory(0.0), True),
        (a_trajectory(0.5, status="truncated"), True),
        (a_trajectory(0.5, status="max_turns"), True),
        (a_trajectory(None), False),
        (a_trajectory(1.0, status="timeout"), False),
        (a_trajectory(1.0, turns=[]), False),
    ],
)
def test_an_attempt_is_usable_with_a_reward_a_trainable_status_and_tokens(attempt: Trajectory, usable: bool):
    assert attempt.usable is usable


def test_failures_are_no_trainable_statuses():
    assert TRAINABLE_STATUSES.isdisjoint({"env_error", "reward_error", "timeout", "engine_error", "cancelled"})
