"""Shards are plain Arrow files: polars, pandas, DuckDB and pyarrow open them without us, and see the same values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pytest

from storage.records import ToolCall
from storage.shards.shards import commit_shard
from tests.builders import SAMPLING, a_group, a_log, a_trajectory, a_turn, local_store, provenance


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A shard with a tool call, a null among the reward parts, and a fork."""
    log = a_log(local_store(tmp_path))
    call = ToolCall(name="add", arguments="{}", result="2")
    turns = [a_turn([5, 1], tool_calls=[call], versions=[3, 4]), a_turn([6], sequence_idx=1, versions=4)]
    attempts = [a_trajectory(0.5, turns=turns, reward_parts={"sum": 0.5, "style": None}), a_trajectory(0.0, attempt=1)]
    groups = [a_group(0, trajectories=attempts), a_group(1)]
    commit_shard(log, groups, provenance=provenance(), sampling=SAMPLING)
    return tmp_path / "store" / log.shard_key("s0")


def test_other_tools_read_the_values_that_pyarrow_reads(file: Path):
    with pa.ipc.open_file(str(file)) as reader:
        rows: list[dict[str, Any]] = reader.read_all().to_pylist(maps_as_pydicts="strict")
    assert len(rows) == 5
    dataset = pa.dataset.dataset(str(file), format="ipc")
    column = dataset.to_table(columns=["group_id", "logprobs"]).to_pylist()
    assert column == [{"group_id": row["group_id"], "logprobs": row["logprobs"]} for row in rows]

    assert [{**row, "reward_parts": dict(row["reward_parts"])} for row in pl.read_ipc(file).to_dicts()] == rows
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    tokens = pl.scan_ipc(file).select(pl.col("input_ids").list.len().sum(), pl.col("reward").mean()).collect().row(0)
    assert tokens == (sum(len(row["input_ids"]) for row in rows), pytest.approx(sum(rewards) / len(rewards)))

    frame = pd.read_feather(file)
    assert list(frame.columns) == list(rows[0]) and len(frame) == len(rows)
    for name in ("input_ids", "loss_mask", "logprobs", "weight_versions"):
        assert [values.tolist() for values in frame[name]] == [row[name] for row in rows]
    assert [dict(parts) for parts in frame["reward_parts"]] == [row["reward_parts"] for row in rows]
    assert [[dict(m) for m in messages] for messages in frame["messages"]] == [row["messages"] for row in rows]

    with duckdb.connect() as connection:
        connection.register("shard", dataset)
        facts = connection.execute("SELECT * EXCLUDE (turns, sampling, messages) FROM shard").fetchall()
        names = [column[0] for column in connection.description]
        contents = connection.execute("SELECT m.content FROM (SELECT unnest(messages) AS m FROM shard)").fetchall()
    assert [dict(zip(names, values, strict=True)) for values in facts] == [
        {name: value for name, value in row.items() if name in names} for row in rows
    ]
    assert len(names) == len(rows[0]) - 3
    assert [content for (content,) in contents] == [m["content"] for row in rows for m in row["messages"]]
