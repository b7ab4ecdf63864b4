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

GOLDEN = Path(__file__).parents[2] / "golden" / "v1.arrow"


def _todays(folder: Path) -> Path:
    """A shard as the run's log commits it today, with a tool call, a null among the reward parts, and a fork."""
    log = a_log(local_store(folder))
    call = ToolCall(name="add", arguments="{}", result="2")
    turns = [a_turn([5, 1], tool_calls=[call], versions=[3, 4]), a_turn([6], sequence_idx=1, versions=4)]
    attempts = [a_trajectory(0.5, turns=turns, reward_parts={"sum": 0.5, "style": None}), a_trajectory(0.0, attempt=1)]
    groups = [a_group(0, trajectories=attempts), a_group(1)]
    commit_shard(log, groups, provenance=provenance(), sampling=SAMPLING)
    return folder / "store" / log.shard_key("s0")


@pytest.fixture(params=["golden v1", "today's"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return GOLDEN if request.param == "golden v1" else _todays(tmp_path)


@pytest.fixture
def rows(file: Path) -> list[dict[str, Any]]:
    """The rows as pyarrow alone reads them; maps as dictionaries."""
    with pa.ipc.open_file(str(file)) as reader:
        found: list[dict[str, Any]] = reader.read_all().to_pylist(maps_as_pydicts="strict")
    assert found and (len(found) == 4 or file != GOLDEN)
    return found


def test_pyarrow_reads_a_column_of_a_dataset(file: Path, rows: list[dict[str, Any]]):
    table = pa.dataset.dataset(str(file), format="ipc").to_table(columns=["group_id", "logprobs"])
    assert table.to_pylist() == [{"group_id": row["group_id"], "logprobs": row["logprobs"]} for row in rows]


def test_polars_reads_every_column_and_scans_lazily(file: Path, rows: list[dict[str, Any]]):
    read = [{**row, "reward_parts": dict(row["reward_parts"])} for row in pl.read_ipc(file).to_dicts()]
    assert read == rows
    tokens = pl.scan_ipc(file).select(pl.col("input_ids").list.len().sum(), pl.col("reward").mean()).collect().row(0)
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    assert tokens == (sum(len(row["input_ids"]) for row in rows), pytest.approx(sum(rewards) / len(rewards)))


def test_pandas_reads_every_column(file: Path, rows: list[dict[str, Any]]):
    frame = pd.read_feather(file)
    assert list(frame.columns) == list(rows[0]) and len(frame) == len(rows)
    for column in ("input_ids", "loss_mask", "logprobs", "weight_versions"):
        assert [values.tolist() for values in frame[column]] == [row[column] for row in rows]
    assert [dict(parts) for parts in frame["reward_parts"]] == [row["reward_parts"] for row in rows]
    assert [[dict(m) for m in said] for said in frame["messages"]] == [row["messages"] for row in rows]
    assert frame["group_id"].tolist() == [row["group_id"] for row in rows]


def test_duckdb_queries_the_file_through_arrow(file: Path, rows: list[dict[str, Any]]):
    expected = [{n: v for n, v in row.items() if n not in ("turns", "sampling", "messages")} for row in rows]
    with duckdb.connect() as connection:
        connection.register("shard", pa.dataset.dataset(str(file), format="ipc"))
        facts = connection.execute("SELECT * EXCLUDE (turns, sampling, messages) FROM shard").fetchall()
        names = [column[0] for column in connection.description]
        newest = "SELECT max(v) FROM (SELECT unnest(weight_versions) AS v FROM shard WHERE accepted)"
        versions = connection.execute(newest).fetchone()
        contents = connection.execute("SELECT m.content FROM (SELECT unnest(messages) AS m FROM shard)").fetchall()
    assert [dict(zip(names, values, strict=True)) for values in facts] == expected
    assert versions == (max(v for row in rows if row["accepted"] for v in row["weight_versions"]),)
    assert [content for (content,) in contents] == [m["content"] for row in rows for m in row["messages"]]
