"""SQL over a run: what the views say, what is left out of them, and what a query reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiobotocore.client
import pyarrow as pa
import pytest

from storage.log.entries import Evaluation, Quarantine, Rescore, Retire, Shard
from storage.log.run_log import RunLog
from storage.objects.digests import sha256_of
from storage.objects.object_store import LocalStore, ObjectStore, StoreError
from storage.objects.opening import open_store
from storage.records import Message, RolloutGroup, ToolCall
from storage.shards.reward_sets import NewReward, RewardSet, attempts_of, put_rewards, rewards_key
from storage.shards.shards import read_shard
from storage.views import query_rows
from storage.views.queries import VIEWS, Queries, open_queries
from tests.builders import (
    SAMPLING,
    MemoryStore,
    a_group,
    a_log,
    a_shard,
    a_step,
    a_trajectory,
    a_turn,
    commit,
    local_store,
    provenance,
)
from tests.faulty_s3 import ALWAYS, Fault, FaultyS3
from tests.shard_files import encode_shard, file_with


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return local_store(tmp_path)


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.server)])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "folder":
        return local_store(tmp_path)
    return open_store(f"s3://{request.getfixturevalue('bucket')}/prefix")


def _conversation() -> RolloutGroup:
    """A group of one attempt that called a tool, got the result, and then edited its history."""
    messages = [
        Message(role="system", content="use the tool"),
        Message(role="user", content="3+4"),
        Message(role="assistant", content="call", is_completion=True),
        Message(role="tool", content="7"),
        Message(role="assistant", content="it is 7", is_completion=True),
    ]
    call = ToolCall(name="add", arguments='{"a": 3}', result="7", failed=False, seconds=0.25)
    turns = [
        a_turn([5, 1], context=[2, 8, 3], versions=[1, 2], tool_calls=[call]),
        a_turn([6, 1], context=[9], versions=2),
        a_turn([7], context=[2, 4], versions=3, sequence_idx=1, finish_reason="length"),
    ]
    attempt = a_trajectory(0.25, turns=turns, messages=messages, reward_parts={"exact": 0.0, "style": 0.25})
    return a_group(4, trajectories=[attempt])


def _a_run(store: ObjectStore) -> RunLog:
    """Five groups of which one is trained, stale, filtered, failed and pending each, and a held-out one."""
    log = a_log(store)
    commit(log, "s0", a_group(0, rewards=[1.0, 0.0]), a_group(1), a_group(2, accepted=False))
    commit(log, "s1", a_group(3, rewards=[None, 0.5]), _conversation())
    commit(log, "e0", a_group(-1, group_id="eval0.test", rewards=[1.0]), is_eval=True)
    log.append(Evaluation(version=0, split="test", score=0.5, num_tasks=2, num_failed=1, shard_id="e0", seconds=1.5))
    outcomes = {"trained": ["0.task0"], "stale": ["0.task1"], "filtered": ["0.task2"], "failed": ["0.task3"]}
    log.append(a_step(log.state, **outcomes))
    return log


@pytest.fixture(scope="module")
def queries(tmp_path_factory: pytest.TempPathFactory) -> Queries:
    """Of a run that no test changes."""
    return open_queries(_a_run(local_store(tmp_path_factory.mktemp("queries"))))


def _rescore(log: RunLog, name: str, rewards: Sequence[float | None]) -> None:
    """New rewards for the first attempts of shard `s0`."""
    shard, made_by = log.state.shards["s0"], {"reward": f"my:{name}", "reward_sha256": "1" * 64}
    attempts = attempts_of(read_shard(log, shard))[: len(rewards)]
    new = [NewReward(reward=reward, parts={"style": reward}) for reward in rewards]
    digest, _ = put_rewards(log, shard, RewardSet(name=name, **made_by), attempts, new)
    log.append(Rescore(name=name, files={"s0": digest}, **made_by))


def _rows(queries: Queries, sql: str) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in queries.select(sql).to_pylist()]


def test_every_trajectory_is_told_with_what_became_of_it(any_store: ObjectStore):
    queries = open_queries(_a_run(any_store))
    sql = """
        SELECT list(id ORDER BY attempt), list(reward ORDER BY attempt), outcome, step, policy_version, shard_id,
            is_eval
        FROM trajectories WHERE sequence_idx = 0 GROUP BY ALL ORDER BY any_value(shard_number), any_value(position)
    """
    assert _rows(queries, sql) == [
        (["0.task0/0", "0.task0/1"], [1.0, 0.0], "trained", 1, 1, "s0", False),
        (["0.task1/0", "0.task1/1"], [1.0, 0.0], "stale", 1, None, "s0", False),
        (["0.task2/0", "0.task2/1"], [1.0, 0.0], "filtered", 1, None, "s0", False),
        (["0.task3/1"], [0.5], "failed", 1, None, "s1", False),
        (["0.task4/0"], [0.25], "pending", None, None, "s1", False),
        (["eval0.test/0"], [1.0], "eval", None, None, "e0", True),
    ]
    assert queries.left_out == {}


def test_a_conversation_is_told_with_its_turns_and_tokens(queries: Queries):
    (first, forked) = queries.select(
        "SELECT * FROM trajectories WHERE group_id = '0.task4' ORDER BY sequence_idx"
    ).to_pylist()
    assert (first["prompt"], first["reply"]) == ("3+4", "it is 7")
    assert [m["role"] for m in first["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert (first["num_tokens"], first["num_sampled"], first["num_turns"], first["num_tool_calls"]) == (8, 4, 2, 1)
    assert first["mean_logprob"] == pytest.approx(-0.5)
    assert dict(first["reward_parts"]) == {"exact": 0.0, "style": 0.25}
    assert (first["head_version"], first["tail_version"]) == (1, 2)
    assert (forked["prompt"], forked["reply"], forked["num_sampled"], forked["tail_version"]) == (None, None, 1, 3)
    turns = """
        SELECT sequence_idx, turn_idx, context_len, sampled_len, finish_reason, num_tool_calls, tool_calls[1].name,
            tool_calls[1].result
        FROM turns WHERE trajectory_id = '0.task4/0' ORDER BY ALL
    """
    assert _rows(queries, turns) == [
        (0, 0, 3, 2, "stop", 1, "add", "7"),
        (0, 1, 1, 2, "stop", 0, None, None),
        (1, 0, 2, 1, "length", 0, None, None),
    ]
    tokens = """
        SELECT token_id, sampled, logprob, weight_version FROM tokens
        WHERE trajectory_id = '0.task4/0' AND sequence_idx = 0 ORDER BY position
    """
    prompt = [(token, False, 0.0, -1) for token in (2, 8, 3)]
    replies = [(5, True, -0.5, 1), (1, True, -0.5, 2), (9, False, 0.0, -1), (6, True, -0.5, 2), (1, True, -0.5, 2)]
    assert _rows(queries, tokens) == prompt + replies


def test_groups_steps_and_evaluations_are_those_of_the_log(queries: Queries):
    (group,) = queries.select("SELECT * FROM groups WHERE id = '0.task3'").to_pylist()
    assert dict(group.pop("failures")) == {"env_error": 1}
    assert group.items() >= {
        "position": 3, "expected": 2, "usable": 1, "mean_reward": 0.5, "outcome": "failed", "step": 1, "shard_id": "s1",
    }.items()  # fmt: skip
    (step,) = queries.select("SELECT * FROM steps").to_pylist()
    counts = {outcome: 1 for outcome in ("trained", "stale", "filtered", "failed")}
    assert step.items() >= {"step": 1, "base_version": 0, "policy_version": 1, "loss": 0.5, **counts}.items()
    assert step["weights_sha256"] == f"{1:064x}" and step["session_id"] == "first" and step["written_at"].year > 2000
    assert _rows(queries, "SELECT version, score, num_failed, shard_id FROM evaluations") == [(0, 0.5, 1, "e0")]


def test_rewards_of_a_rescore_stand_beside_the_recorded_ones(any_store: ObjectStore):
    log = _a_run(any_store)
    _rescore(log, "strict", [0.0, None])
    _rescore(log, "kind", [1.0, 0.5])
    compared = """
        SELECT t.id, t.reward AS old, w.name, w.reward AS new
        FROM trajectories t JOIN rewards w ON w.trajectory_id = t.id ORDER BY ALL
    """
    first, second = ("0.task0/0", 1.0), ("0.task0/1", 0.0)
    strict = [(*first, "strict", 0.0), (*second, "strict", None)]
    assert _rows(open_queries(log), compared) == sorted([(*first, "kind", 1.0), (*second, "kind", 0.5), *strict])
    any_store.put(rewards_key(log, "kind", "s0"), b"cut off")
    queries = open_queries(log)
    assert _rows(queries, compared) == strict
    assert "sha256 differs" in queries.left_out["rewards kind of s0"]
    log.append(Quarantine(shard_id="s0", reason="lost"))
    assert _rows(open_queries(log), "SELECT * FROM rewards") == []


def test_every_view_has_columns_and_rows_or_no_rows_in_a_run_without_shards():
    empty, log = open_queries(a_log()), _a_run(MemoryStore())
    _rescore(log, "strict", [0.0])
    queries = open_queries(log)
    for view in VIEWS:
        table = queries.select(f"SELECT * FROM {view}")
        assert list(queries.columns(view)) == table.schema.names and len(table) > 0
        assert len(empty.select(f"SELECT * FROM {view}")) == 0


def test_orphans_quarantined_and_retired_shards_are_not_read(any_store: ObjectStore):
    log = _a_run(any_store)
    orphan = encode_shard([a_group(9)], provenance=provenance("orphan"), sampling=SAMPLING)
    any_store.put(log.shard_key("orphan"), orphan)
    log.append(Retire(shard_ids=["s0"], policy_versions=[], state_paths=[], reason="old"))
    any_store.delete([log.shard_key("s0")])
    log.append(Quarantine(shard_id="s1", reason="cut off"))
    queries = open_queries(log)
    assert _rows(queries, "SELECT DISTINCT shard_id FROM trajectories") == [("e0",)]
    assert queries.left_out == {"s0": "retired: retention has removed the file", "s1": "quarantined: cut off"}
    # What was used stays in the log's own view; a pending group of a quarantined shard runs again under another id.
    groups = [("0.task0",), ("0.task1",), ("0.task2",), ("0.task3",), ("eval0.test",)]
    assert _rows(queries, "SELECT id FROM groups ORDER BY ALL") == groups


def test_a_damaged_file_is_left_out_with_its_reason_and_stops_no_query(any_store: ObjectStore):
    """Also one that is whole, and not what was committed."""
    log = _a_run(any_store)
    data = any_store.get(log.shard_key("s1"))
    other = encode_shard([a_group(8)], provenance=provenance("other"), sampling=SAMPLING)
    damaged = {"cut": data[: len(data) // 2], "garbage": b"\0" * len(data), "empty": b"", "other": other}
    for position, shard_id in enumerate([*damaged, "missing"], start=10):
        commit(log, shard_id, a_group(position))
        any_store.put(log.shard_key(shard_id), damaged.get(shard_id, b""))
    any_store.delete([log.shard_key("missing")])
    queries = open_queries(log)
    assert _rows(queries, "SELECT DISTINCT shard_id FROM trajectories ORDER BY 1") == [("e0",), ("s0",), ("s1",)]
    assert _rows(queries, "SELECT count(*), sum(reward) FROM trajectories WHERE outcome = 'trained'") == [(2, 1.0)]
    assert {*queries.left_out} == {*damaged, "missing"} and "missing" in queries.left_out.pop("missing")
    assert all("sha256" in reason for reason in queries.left_out.values())


def test_one_flipped_bit_of_a_shard_of_megabytes_is_found_by_any_query(store: LocalStore):
    """Also if it is in a column that the query does not name, and in a value that keeps every rule."""
    log = _a_run(store)
    long = a_turn(range(400_000))
    commit(log, "long", a_group(9, trajectories=[a_trajectory(attempt=0, turns=[long]), a_trajectory(attempt=1)]))
    shard = log.state.shards["long"]
    count = "SELECT count(*) FROM trajectories WHERE shard_id = 'long'"
    assert shard.num_bytes > 2**20 and _rows(open_queries(log), count) == [(2,)]
    path = store.root / log.shard_key("long")
    data = bytearray(path.read_bytes())
    for place in (8, len(data) // 2, len(data) - 100):
        data[place] ^= 1
        path.write_bytes(data)
        queries = open_queries(log)
        assert _rows(queries, count) == [(0,)] and "sha256" in queries.left_out["long"], place
        data[place] ^= 1


def test_a_shard_from_elsewhere_is_fetched_by_the_first_query_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """All of it, as its digest is of all of it; the copy is verified each time, and fetched again if it has changed."""
    fetched: list[str] = []

    class Elsewhere(MemoryStore):
        def get_buffer(self, key: str) -> pa.Buffer:
            fetched.append(key)
            return super().get_buffer(key)

    log = _a_run(Elsewhere())
    copy = tmp_path / "cache" / "shards" / f"{log.state.shards['s0'].sha256}.arrow"
    count = "SELECT count(*), sum(reward) FROM trajectories WHERE shard_id = 's0'"
    for change, num_fetched in ((b"", 1), (b"", 0), (b"x", 1), (b"", 0)):
        if change:
            copy.write_bytes(copy.read_bytes()[:-1] + change)
        fetched.clear()
        queries = open_queries(log)
        assert _rows(queries, count) == _rows(queries, count) == [(6, 3.0)] and not queries.left_out
        assert fetched == [log.shard_key("s0")] * num_fetched
    monkeypatch.setattr("storage.shards.shards.MOST_COPIED", 10)
    open_queries(log)
    assert not copy.exists()


@pytest.mark.server
def test_a_shard_whose_checksum_on_the_server_differs_is_left_out(
    bucket: str, server: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    with FaultyS3(server).running() as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.variables["AWS_ENDPOINT_URL"])
        log = _a_run(open_store(f"s3://{bucket}/prefix"))
        proxy.fail(Fault.DAMAGE, method="GET", part="/shards/s1", times=ALWAYS)
        queries = open_queries(log)
        assert set(_rows(queries, "SELECT DISTINCT shard_id FROM shard_rows")) == {("s0",), ("e0",)}
    assert "is not what was written there" in queries.left_out["s1"]


def test_a_new_column_is_passed_over_and_a_newer_major_version_left_out_with_the_way_out(store: ObjectStore):
    log = _a_run(store)
    commit(log, "no rows", a_group(9, rewards=[None, None]))
    table = pa.ipc.open_file(log.store.get(log.shard_key("s0"))).read_all()
    files = {"column": file_with(table.append_column("mood", pa.array(["good"] * len(table))))}
    files["major"] = file_with(table, schema_version="2")
    for shard_id, data in files.items():
        log.store.put(log.shard_key(shard_id), data)
        log.append(replace(a_shard(shard_id, []), sha256=sha256_of(data), num_rows=len(table), num_bytes=len(data)))
    queries = open_queries(log)
    counts = "SELECT shard_id, count(*) FROM trajectories WHERE reward = 1 GROUP BY ALL ORDER BY ALL"
    assert _rows(queries, counts) == [("column", 3), ("e0", 1), ("s0", 3)]
    assert list(queries.left_out) == ["major"] and "upgrade" in queries.left_out["major"]


def test_a_query_reads_the_columns_it_names_and_the_shards_it_may_find_something_in(
    queries: Queries, monkeypatch: pytest.MonkeyPatch
):
    read: list[tuple[str, tuple[str, ...]]] = []
    original = query_rows.ShardRows._read

    def watched(self: Any, shard: Shard, columns: list[str]) -> Any:
        read.append((shard.id, tuple(columns)))
        return original(self, shard, columns)

    monkeypatch.setattr(query_rows.ShardRows, "_read", watched)
    queries.select("SELECT avg(len(logprobs)) FROM shard_rows")
    assert sorted(read) == [(name, ("logprobs",)) for name in ("e0", "s0", "s1")]
    read.clear()
    assert _rows(queries, "SELECT sum(reward) FROM trajectories WHERE shard_id = 's1' AND status = 'ok'")[0][0] > 0
    assert {name for name, _ in read} == {"s1"}
    assert not {"input_ids", "messages", "logprobs"}.intersection(*(columns for _, columns in read))
    read.clear()
    queries.select("SELECT count(*) FROM trajectories WHERE is_eval = true")
    assert {name for name, _ in read} == {"e0"}


@pytest.mark.server
def test_over_s3_a_query_asks_once_for_each_shard(bucket: str, monkeypatch: pytest.MonkeyPatch):
    log = _a_run(open_store(f"s3://{bucket}/prefix"))
    asked: list[str] = []
    call = aiobotocore.client.AioBaseClient._make_api_call

    def counted(self: Any, operation: str, parameters: dict[str, Any]) -> Any:
        asked.append(operation)
        return call(self, operation, parameters)

    queries = open_queries(log)
    monkeypatch.setattr(aiobotocore.client.AioBaseClient, "_make_api_call", counted)
    assert len(_rows(queries, "SELECT id, reward, prompt, reply FROM trajectories")) == 10
    assert asked == ["GetObject"] * 3


def test_chosen_shards_alone_are_looked_at(store: ObjectStore):
    log = _a_run(store)
    store.delete([log.shard_key("s0")])
    queries = open_queries(log, shard_ids=["s1"])
    assert _rows(queries, "SELECT DISTINCT id, outcome, step FROM trajectories ORDER BY ALL") == [
        ("0.task3/1", "failed", 1),
        ("0.task4/0", "pending", None),
    ]
    assert queries.left_out == {} and _rows(queries, "SELECT count(*) FROM groups") == [(2,)]
    assert _rows(open_queries(log, shard_ids=[]), "SELECT count(*) FROM trajectories") == [(0,)]


def test_wrong_sql_is_one_line_with_the_nearest_name_and_none_reaches_more_than_the_views(
    queries: Queries, tmp_path: Path
):
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    hidden = pa.table({"a": [1]})  # noqa: F841 - what a replacement scan would find
    for sql, sentence in {
        "SELECT rewrd FROM trajectories": 'Referenced column "rewrd" not found.*"reward"',
        "SELECT * FROM trajectorys": 'Did you mean "trajectories"',
        "SELEC 1": 'syntax error at or near "SELEC"',
        "SELECT 'ok' + [1]": "type",
        "": "empty",
        "SELECT * FROM trajectories WHERE reward = ?": ".",
        f"SELECT * FROM read_csv('{secret}')": "disabled",
        f"SELECT * FROM '{secret}'": "disabled|does not exist",
        f"COPY (SELECT 1) TO '{tmp_path / 'out.csv'}'": "disabled",
        f"ATTACH '{tmp_path / 'out.db'}'": "disabled",
        "SET enable_external_access = true": "locked",
        "INSTALL httpfs": "disabled",
        "SELECT * FROM hidden": "hidden does not exist",
    }.items():
        with pytest.raises(ValueError, match=sentence) as error:
            queries.select(sql)
        first, *hint = str(error.value).splitlines()
        assert not hint or hint[0].endswith("lists the views and their columns"), "the sentence is one line"
    assert [path.name for path in tmp_path.iterdir()] == ["secret.csv"]
    assert _rows(queries, "SELECT count(*) FROM trajectories") == [(10,)], "and the views are still there"


def test_a_store_that_cannot_be_reached_is_an_error_and_no_empty_result(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
):
    log = _a_run(store)
    queries = open_queries(log)
    store.delete([log.shard_key("s0")])

    def unreachable(self: LocalStore, key: str) -> bytes:
        raise StoreError("store is away; look for it")

    monkeypatch.setattr(LocalStore, "get_buffer", unreachable)
    with pytest.raises(StoreError, match="store is away"):
        queries.select("SELECT count(*) FROM trajectories")


def test_a_result_comes_batch_by_batch(queries: Queries):
    sql = "SELECT t.id FROM trajectories t, range(100000)"
    assert queries.stream(sql, lambda reader: reader.read_next_batch().num_rows) < 1_000_000
    assert queries.stream("SELECT count(*) FROM trajectories", lambda reader: reader.read_all())[0][0].as_py() == 10
