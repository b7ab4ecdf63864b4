"""A shard comes back as it was written, and every rule of schema v1 is enforced on the way in and out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.records import TRAINABLE_STATUSES, Message, RolloutGroup, Routes, Task, ToolCall, Trajectory
from storage.shards.codec import open_shard, summarise
from storage.shards.schema import (
    SCHEMA,
    BadShard,
    NewerSchema,
    check,
    content_sha256,
    flat,
    flat_routes,
    routes_type,
    row_offsets,
)
from tests.builders import SAMPLING, a_group, a_trajectory, a_turn, provenance
from tests.shard_files import decode_shard, encode_shard, file_with


def _encode(groups: Sequence[RolloutGroup], **options: Any) -> bytes:
    return encode_shard(groups, provenance=provenance(), sampling=SAMPLING, **options)


def _table(groups: Sequence[RolloutGroup] | None = None) -> pa.Table:
    return decode_shard(_encode(groups or [a_group(0)]), name="s0")


def _with(column: str, rows: list[Any]) -> pa.Table:
    """The default table with one column's values replaced."""
    table = _table()
    index = table.schema.get_field_index(column)
    return table.set_column(index, SCHEMA.field(column), pa.array(rows, type=SCHEMA.field(column).type))


def test_facts_that_the_golden_shard_does_not_have_come_back():
    """Every other one is compared there, value for value."""
    call = ToolCall(name="add", arguments='{"a": 1}', result="2", failed=True, seconds=0.25)
    turns = [a_turn(tool_calls=[call], seed=2**63 - 1), a_turn(sequence_idx=1)]
    attempt = a_trajectory(turns=turns, messages=[Message(role="user", content="3")])
    table = decode_shard(_encode([a_group(0, trajectories=[attempt])], is_eval=True), name="s0")
    row, other = table.to_pylist()
    assert [call | {"timed_out": False} for call in row["turns"][0]["tool_calls"]] == [asdict(call)] and row[
        "is_eval"
    ] is True
    assert row["sampling"]["max_tokens"] == 8 and row["sampling"]["seed"] == 2**63 - 1
    assert other["sampling"]["seed"] is None, "as in shards from before it was recorded"


def test_half_a_surrogate_pair_in_one_text_becomes_a_replacement_character_and_costs_no_shard():
    bad, good = "a\ud83d", "a\ufffd"
    call = ToolCall(name=bad, arguments=bad, result="\udcff.txt")
    turn = replace(a_turn(tool_calls=[call]), finish_reason=bad)  # which no record has checked
    attempt = a_trajectory(messages=[Message(role="user", content=bad)], turns=[turn], reward_parts={bad: 1.0})
    task = Task(id=bad, prompt=bad, metadata={bad: bad})
    group = replace(a_group(0, trajectories=[attempt]), reject_reason=bad, task=task)
    assert (group.task.prompt, group.task.metadata) == (good, {good: good})
    bad_row, *others = decode_shard(_encode([group, a_group(1)]), name="s0").to_pylist()
    [turn_row] = bad_row["turns"]
    assert (bad_row["prompt_id"], bad_row["reject_reason"], bad_row["reward_parts"]) == (good, good, [(good, 1.0)])
    assert (bad_row["messages"][0]["content"], turn_row["finish_reason"]) == (good, good)
    assert turn_row["tool_calls"][0]["arguments"] == good and turn_row["tool_calls"][0]["result"] == "\ufffd.txt"
    assert summarise(group).prompt_id == good and others[0]["prompt_id"] == "task1"


def test_the_answers_behind_thoughts_stand_beside_the_messages_and_only_where_there_are_any():
    spoken = [
        Message(role="user", content="3"),
        Message(role="assistant", content="<think>a</think>b", is_completion=True, answer="b"),
    ]
    thinking = a_trajectory(1.0, messages=spoken, turns=[a_turn(), a_turn(sequence_idx=1)])
    plain = a_trajectory(0.0, attempt=1, messages=spoken[:1])
    table = decode_shard(_encode([a_group(0, trajectories=[thinking, plain])]), name="s0")
    assert table["answers"].to_pylist() == [[None, "b"], [], []]
    assert "answers" not in _table().schema.names
    with pytest.raises(BadShard, match="column answers has type"):
        decode_shard(file_with(table.drop_columns("answers").append_column("answers", pa.array([1, 2, 3]))), name="s0")


@pytest.mark.parametrize(
    ("attempts", "rows", "failures"),
    [
        ([a_trajectory(1.0), a_trajectory(None, status="env_error"), a_trajectory(0.5)], [0, 2], {"env_error": 1}),
        *(
            ([a_trajectory(None, status=s), a_trajectory(0.5)], [1], {"no_reward": 1})
            for s in sorted(TRAINABLE_STATUSES)
        ),
        ([a_trajectory(0.0, turns=[a_turn([])]), a_trajectory(1.0)], [1], {"no_tokens": 1}),
        ([a_trajectory(1.0, status="timeout")], [], {"timeout": 1}),
    ],
)
def test_only_attempts_with_a_reward_and_a_sampled_token_become_rows_and_the_others_are_counted(
    attempts: list[Trajectory], rows: list[int], failures: dict[str, int]
):
    trajectories = [replace(attempt, attempt=number) for number, attempt in enumerate(attempts)]
    group, num_usable = a_group(0, trajectories=trajectories), len(rows)
    table, summary = _table([group]), summarise(group)
    assert table["attempt"].to_pylist() == rows and table["sample_idx"].to_pylist() == list(range(num_usable))
    assert table["group_usable"].to_pylist() == [num_usable] * num_usable
    assert (summary.expected, summary.usable, summary.rows) == (len(attempts), num_usable, num_usable)
    assert summary.failures == failures and table.schema.metadata[b"num_groups"] == b"1"
    rewards = [trajectories[row].reward for row in rows]
    assert summary.mean_reward == (np.mean(rewards) if rows else None)
    assert (summary.head_version, summary.tail_version) == ((0, 0) if rows else (-1, -1))


def test_a_forked_attempt_is_several_rows_and_one_usable_attempt():
    """A fork that sampled nothing is no row, and the first one that is has the messages."""
    turns = [a_turn([13, 1], context=[2, 9, 3], sequence_idx=index) for index in (1, 2)]
    group = a_group(0, trajectories=[a_trajectory(1.0, turns=[a_turn([]), *turns]), a_trajectory(0.0, attempt=1)])
    table = _table([group])
    assert [table[name].to_pylist() for name in ("attempt", "sequence_idx")] == [[0, 0, 1], [0, 1, 0]]
    assert table["input_ids"].to_pylist()[0] == [2, 9, 3, 13, 1]
    assert [len(messages) for messages in table["messages"].to_pylist()] == [2, 0, 2]
    assert (summarise(group).rows, summarise(group).usable) == (3, 2)


turns = st.builds(
    lambda context, sampled, logprobs, version: replace(
        a_turn(sampled, context=context, versions=version), logprobs=logprobs[: len(sampled)]
    ),
    st.lists(st.integers(0, 2**31 - 1), max_size=4),
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4),
    st.lists(st.floats(-100, 0, width=32), min_size=4, max_size=4),
    st.integers(0, 1000),
)
rewards = st.one_of(st.none(), st.floats(-10, 10, width=32))


@settings(max_examples=40, deadline=None)
@given(attempts=st.lists(st.lists(st.tuples(rewards, st.lists(turns, max_size=3)), max_size=3), max_size=3))
def test_any_groups_come_back_token_for_token(attempts: list[list[tuple[float | None, list[Any]]]]):
    groups = [
        a_group(
            position,
            trajectories=[
                a_trajectory(reward, attempt=attempt, turns=turns) for attempt, (reward, turns) in enumerate(inside)
            ],
        )
        for position, inside in enumerate(attempts)
    ]
    table = decode_shard(_encode(groups), name="s0")
    usable = [(group, t) for group in groups for t in group.usable]
    assert table["group_id"].to_pylist() == [group.id for group, _ in usable]
    assert table["reward"].to_pylist() == [t.reward for _, t in usable]
    sampled = [i for _, t in usable for turn in t.turns for i in turn.sampled_ids]
    mask = flat(table["loss_mask"]).astype(bool)
    assert flat(table["input_ids"])[mask].tolist() == sampled
    logprobs = [p for _, t in usable for turn in t.turns for p in turn.logprobs]
    assert np.array_equal(flat(table["logprobs"])[mask], np.array(logprobs, dtype=np.float32))
    assert len(row_offsets(table["input_ids"])) == table.num_rows + 1
    assert sum(summarise(group).rows for group in groups) == table.num_rows


def _tokens(**changes: Any) -> RolloutGroup:
    """A group whose first attempt has one turn of context 2 8 3 and reply 12 1, with some of its facts wrong."""
    return a_group(0, trajectories=[a_trajectory(1.0, turns=[replace(a_turn(), **changes)])])


@pytest.mark.parametrize(
    ("group", "rule"),
    [
        (_tokens(logprobs=[-0.5]), "logprobs and input_ids differ in length"),
        (_tokens(weight_versions=[0, 0, 0]), "weight_versions and input_ids differ in length"),
        (_tokens(logprobs=[-0.5, 0.1]), "a logprob is positive"),
        (_tokens(sampled_ids=[12, 2**31]), "input_ids: .*requires.* <= 2147483647"),
        (_tokens(context_ids=[2, None, 3]), "input_ids: required argument is not an integer"),
        (_tokens(logprobs=[-0.5, -1e39]), "a logprob is positive or not finite"),
        (_tokens(finish_reason=3), "finish_reason: Expected bytes, got a 'int' object"),
        (a_group(0, trajectories=[a_trajectory(), a_trajectory()]), "group 0.task0 has 1 attempts, says 2"),
    ],
)
def test_what_breaks_a_rule_is_never_written(group: RolloutGroup, rule: str):
    with pytest.raises(BadShard, match=rf"shard s0: .*{rule}"):
        _encode([group])


@pytest.mark.parametrize(
    ("table", "rule"),
    [
        (_with("loss_mask", [[False] * 3 + [True]] * 2), "loss_mask and input_ids differ in length"),
        (_with("logprobs", [[0, 0, 0, -1, 1e-6]] * 2), "a logprob is positive"),
        (_with("logprobs", [[0, 0, 0, -1, math.nan]] * 2), "not finite"),
        (_with("logprobs", [[0, 0, 0, -1, -math.inf]] * 2), "not finite"),
        (_with("logprobs", [[0, 0, -0.1, -1, -1]] * 2), "a logprob is set where nothing was sampled"),
        (_with("weight_versions", [[-1, -1, 0, 0, 0]] * 2), "a weight version is set where nothing was sampled"),
        (_with("weight_versions", [[-1, -1, -1, 0, -1]] * 2), "a sampled token has no weight version"),
        (_with("logprobs", [[0, 0, 0, None, -1]] * 2), "a token has a null"),
        (_with("weight_versions", [[-1, -1, -1, 0, 0], None]), "weight_versions has nulls"),
        (_with("group_id", ["0.task0", None]), "group_id has nulls"),
        (_with("weight_versions", [[-1, -2, -1, 0, 0]] * 2), "a weight version is set where nothing was sampled"),
        (_with("head_version", [0, 1]), "head_version is above tail_version"),
        (_with("attempt", [0, 0]), "group 0.task0 has 1 attempts, says 2"),
        (_with("group_usable", [3, 3]), "group 0.task0 has 2 attempts, says 3"),
    ],
)
def test_what_breaks_a_rule_is_never_read(table: pa.Table, rule: str):
    with pytest.raises(BadShard, match=f"shard s7: .*{rule}"):
        check(table, name="s7")


def test_offsets_that_lead_out_of_the_file_are_found_before_anything_follows_them():
    """A flipped bit that decompresses; without this, numpy would read foreign memory."""
    table = _table()
    offsets = pa.array([0, 2**28, 10], type=pa.int32()).buffers()[1]
    wild = pa.ListArray.from_buffers(
        pa.list_(pa.int32()), 2, [None, offsets], children=[pa.array([1] * 10, pa.int32())]
    )
    column = table.schema.get_field_index("input_ids")
    with pytest.raises(BadShard, match="shard s7: .*[Oo]ffset"):
        check(table.set_column(column, SCHEMA.field("input_ids"), wild), name="s7")


_WIDE = _table().drop_columns(["epoch"]).append_column("epoch", pa.array([0, 0]))
_NO_REWARD = _table().drop_columns(["reward"])


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        *((_encode([a_group(0)])[:length], "not an Arrow IPC file, or cut off") for length in (0, 7, 1000, -8, -1)),
        (b"PAR1" + bytes(1000) + b"PAR1", "not an Arrow IPC file, or cut off"),
        *((file_with(_table(), schema_version=v), "schema version .*reads 1$") for v in ("0", "", "1.5")),
        (file_with(_NO_REWARD, schema_version="3"), "schema version 3, this Millrace reads 1; .*upgrade"),
        (file_with(_NO_REWARD), r"columns \['reward'\] are missing"),
        (file_with(_WIDE), r"column epoch has type int64, .* int32"),
        (file_with(_with("input_ids", [[2, 8, 3, 12, 2]] * 2)), "the token columns differ from content_sha256"),
        (file_with(_table(), content_sha256=""), "the token columns differ from content_sha256"),
    ],
)
def test_what_is_no_shard_of_this_version_is_refused_by_name(data: bytes, sentence: str):
    with pytest.raises(BadShard, match=f"shard s7: {sentence}") as caught:
        decode_shard(data, name="s7")
    # A newer version is an error of the user's, which the command line prints without a traceback.
    assert isinstance(caught.value, NewerSchema) == isinstance(caught.value, ValueError) == ("upgrade" in sentence)


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_every_compression_and_any_number_of_batches_is_read(compression: str | None):
    table = _table([a_group(0), a_group(1)])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table, max_chunksize=1)
    read = decode_shard(bytes(sink.getvalue()), name="s0")
    assert read["input_ids"].num_chunks == 4 and read.to_pylist() == table.to_pylist()
    assert content_sha256(read) == content_sha256(table)


def test_only_the_columns_asked_for_are_opened_and_those_the_rules_need():
    table = open_shard(_encode([a_group(0)]), name="s0", columns=["reward", "sequence_idx"])
    assert {"reward", "sequence_idx", "input_ids", "group_usable"} <= set(table.column_names)
    assert not {"messages", "turns", "sampling"} & set(table.column_names)
    check(table, name="s0")


def test_a_row_of_five_million_tokens_comes_back():
    length = 5_000_000
    attempt = a_trajectory(turns=[a_turn([7] * (length - 3), versions=2)])
    table = decode_shard(_encode([a_group(0, trajectories=[attempt])]), name="s0")
    assert row_offsets(table["input_ids"]).tolist() == [0, length]
    assert flat(table["input_ids"])[3:].tolist() == [7] * (length - 3)
    assert int(flat(table["loss_mask"]).sum()) == length - 3


def test_more_tokens_than_a_shard_addresses_are_refused_with_the_way_out():
    half = replace(a_turn(), context_ids=range(2**30))  # as long as that, without the memory
    group = a_group(0, trajectories=[a_trajectory(turns=[half, half])])
    with pytest.raises(BadShard, match="shard s0: 2147483652 tokens .*lower `shard_bytes`"):
        _encode([group])


def _routes(num_tokens: int, *, id_bytes: int = 1, start: int = 0) -> Routes:
    numbers = np.arange(start, start + num_tokens * 3 * 2) % 200
    return Routes(ids=numbers.astype(f"<u{id_bytes}").tobytes(), layers=3, choices=2, id_bytes=id_bytes)


def _routed_group(id_bytes: int = 1) -> RolloutGroup:
    """Attempts of a conversation of two turns, which are routed; of one turn, which is not; and of a fork."""
    first, later = a_turn(routes=_routes(4, id_bytes=id_bytes)), a_turn(routes=_routes(5, id_bytes=id_bytes, start=24))
    fork = a_turn([9], context=[8], sequence_idx=1, routes=_routes(1, id_bytes=id_bytes))
    attempts = [[first, later], [a_turn()], [first, fork], [later, a_turn()]]
    return a_group(0, trajectories=[a_trajectory(attempt=n, turns=turns) for n, turns in enumerate(attempts)])


@pytest.mark.parametrize("id_bytes", [1, 2])
def test_routes_come_back_for_all_tokens_but_the_last_of_rows_that_have_them_whole(id_bytes: int):
    table = decode_shard(_encode([_routed_group(id_bytes)]), name="s0")
    numbers = (np.arange(54) % 200).reshape(9, 3, 2).tolist()
    expected = [[*numbers, None], [], [*numbers[:4], None], [numbers[0], None], []]
    assert table["routes"].to_pylist() == expected
    assert table["routes"].type == routes_type(layers=3, choices=2, id_bytes=id_bytes)
    for part in (table, table.slice(2, 2), pa.concat_tables([table.slice(2), table.slice(0, 2)])):
        ids_TLC, is_known_T = flat_routes(part)
        rows = zip(part["routes"].to_pylist(), part["input_ids"].to_pylist(), strict=True)
        by_token = [each for routes, ids in rows for each in routes or [None] * len(ids)]
        assert is_known_T.tolist() == [each is not None for each in by_token]
        known = [each for each in by_token if each is not None]
        assert ids_TLC[is_known_T].tolist() == known and ids_TLC.dtype == f"<u{id_bytes}"


def test_a_shard_with_routes_is_without_them_the_one_it_was_and_evaluations_have_none():
    with_routes = _routed_group()
    attempts = [
        replace(attempt, turns=[replace(turn, routes=None) for turn in attempt.turns])
        for attempt in with_routes.trajectories
    ]
    without = replace(with_routes, trajectories=attempts)
    tables = [decode_shard(_encode([group]), name="s0") for group in (with_routes, without)]
    assert tables[0].drop_columns("routes").equals(tables[1], check_metadata=True), "also its digest"
    assert _encode([with_routes], is_eval=True) == _encode([without], is_eval=True)
    few = open_shard(_encode([with_routes]), name="s0", columns=["input_ids"])
    assert "routes" not in few.column_names, "who does not ask for it does not read it"


_ONE_LAYER = routes_type(layers=1, choices=2, id_bytes=1)


@pytest.mark.parametrize(
    ("kind", "values", "sentence"),
    [
        (pa.list_(pa.int32()), [[1] * 9, []], "column routes has type list<item: int32>, and is to have numbers"),
        (pa.list_(pa.list_(pa.uint8(), 6)), [[], []], "and is to have numbers by layer and choice"),
        (pa.list_(pa.list_(pa.list_(pa.int8(), 2), 3)), [[], []], "and is to have numbers by layer and choice"),
        (routes_type(layers=3, choices=2, id_bytes=1), [[None], []], "routes and input_ids differ in length"),
        (routes_type(layers=3, choices=2, id_bytes=1), [None, []], "routes has nulls"),
        (_ONE_LAYER, [[[None], *[[[1, 2]]] * 4], []], "a number in routes is null"),
        (_ONE_LAYER, [[[[1, None]], *[[[1, 2]]] * 4], []], "a number in routes is null"),
    ],
)
def test_routes_of_another_type_or_number_are_refused(kind: pa.DataType, values: list[Any], sentence: str):
    table = _table([a_group(0, trajectories=[a_trajectory(), a_trajectory(attempt=1)])])
    table = table.append_column("routes", pa.array(values, type=kind))
    with pytest.raises(BadShard, match=sentence):
        decode_shard(file_with(table), name="s0")


def test_routes_of_two_models_are_no_shard():
    other = replace(_routes(4), layers=2, choices=3)
    attempts = [a_trajectory(turns=[a_turn(routes=_routes(4))]), a_trajectory(attempt=1, turns=[a_turn(routes=other)])]
    with pytest.raises(BadShard, match="routes of several models"):
        _encode([a_group(0, trajectories=attempts)])
