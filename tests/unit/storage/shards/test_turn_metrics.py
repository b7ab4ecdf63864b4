"""Turns and tool calls, counted per attempt of the claimed groups."""

from __future__ import annotations

import pyarrow as pa
import pytest

from storage.log.entries import ClaimedGroup
from storage.records import RolloutGroup, ToolCall, Trajectory
from storage.shards.codec import shard_table
from storage.shards.turn_metrics import turn_metrics
from tests.builders import SAMPLING, a_group, a_trajectory, a_turn, provenance


def _table(*groups: RolloutGroup) -> pa.Table:
    return shard_table(groups, provenance=provenance(), sampling=SAMPLING)


def _attempt(number: int, *turns: list[float]) -> Trajectory:
    """An attempt whose turns call a tool, so many seconds each; a call of 0 seconds failed."""
    calls = [
        [ToolCall(name="add", arguments="{}", result="3", failed=not s, seconds=s) for s in turn] for turn in turns
    ]
    return a_trajectory(1.0, attempt=number, turns=[a_turn(tool_calls=turn) for turn in calls])


def _claimed(shard_id: str, *group_ids: str) -> list[ClaimedGroup]:
    return [ClaimedGroup(shard_id=shard_id, group_id=group_id) for group_id in group_ids]


def test_means_are_over_the_attempts_of_the_claimed_groups_in_all_their_shards():
    unclaimed = [_attempt(0, [99.0]), _attempt(1, [99.0])]
    tables = {
        "s0": _table(a_group(0, trajectories=[_attempt(0, [2.0, 0.5], [1.5]), _attempt(1, [0.0])])),
        "s1": _table(
            a_group(1, trajectories=unclaimed), a_group(2, trajectories=[_attempt(0, []), _attempt(1, [1.0])])
        ),
        "s2": _table(a_group(3, trajectories=unclaimed)),
    }
    claimed = [*_claimed("s0", "0.task0"), *_claimed("s1", "0.task2")]
    assert turn_metrics(claimed, tables) == {
        "num_turns": 1.25,
        "tool_calls_per_attempt": 1.25,
        "tool_failures_per_attempt": 0.25,
        "tool_seconds": 5.0,
        "tool_seconds_per_call": 1.0,
    }


def test_a_forked_attempt_counts_once_with_the_turns_of_all_its_rows():
    forked = [a_turn(), a_turn(sequence_idx=1), a_turn(sequence_idx=1)]
    trajectories = [a_trajectory(1.0, attempt=0, turns=forked), a_trajectory(0.0, attempt=1)]
    table = _table(a_group(0, trajectories=trajectories))
    assert table.num_rows == 3
    assert turn_metrics(_claimed("s0", "0.task0"), {"s0": table}) == {"num_turns": 2.0}


@pytest.mark.parametrize("claimed", [[], _claimed("s0", "0.task0")])
def test_without_tools_there_are_no_tool_metrics(claimed: list[ClaimedGroup]):
    metrics = turn_metrics(claimed, {"s0": _table(a_group(0))})
    assert metrics == ({"num_turns": 1.0} if claimed else {})
