"""Metrics of turns and tool calls of the attempts that a step trains on.

In: the claimed groups and the tables of their shards. Out: metrics by name; docs/metrics.md explains each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from storage.log.entries import ClaimedGroup

COLUMNS = ("group_id", "attempt", "turns")
"""The columns of a shard that the metrics need."""


def turn_metrics(groups: Sequence[ClaimedGroup], tables: Mapping[str, pa.Table]) -> dict[str, float]:
    """Means over the attempts of `groups`, a forked one counted once; `tables` maps shard id to its table."""
    rows = []
    for shard_id in dict.fromkeys(group.shard_id for group in groups):
        ids = pa.array([group.group_id for group in groups if group.shard_id == shard_id], pa.string())
        table = tables[shard_id].select(COLUMNS)
        rows.append(table.filter(pc.is_in(table["group_id"], value_set=ids)))
    if not rows:
        return {}
    table = pa.concat_tables(rows)
    num_attempts = table.select(["group_id", "attempt"]).group_by(["group_id", "attempt"]).aggregate([]).num_rows
    turns = pc.list_flatten(table["turns"])
    metrics = {"num_turns": len(turns) / num_attempts}
    calls = pc.list_flatten(pc.struct_field(turns, "tool_calls"))
    if not len(calls):
        return metrics
    seconds = pc.sum(pc.struct_field(calls, "seconds")).as_py()
    return {
        **metrics,
        "tool_calls_per_attempt": len(calls) / num_attempts,
        "tool_failures_per_attempt": pc.sum(pc.struct_field(calls, "failed")).as_py() / num_attempts,
        "tool_seconds": seconds,
        "tool_seconds_per_call": seconds / len(calls),
    }
