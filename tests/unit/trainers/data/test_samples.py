"""Samples are the claimed rows, in claim order, with one reward per attempt."""

import dataclasses
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.log.entries import ClaimedGroup
from storage.records import RolloutGroup, Routes, Sampling, Turn
from storage.shards.codec import shard_table
from storage.shards.shards import read_shard
from tests.builders import provenance
from tests.unit.trainers.builders import Row, commit, group_of, new_run, row_of
from trainers.data.samples import COLUMNS, Samples, gather_samples


def _row(attempt: int, *, token: int = 5, reply_length: int = 2, reward: float = 1.0) -> Row:
    reply, prompt = [token + 1] * reply_length, [token, token]
    return row_of(reply, prompt=prompt, version=3, reward=reward, attempt=attempt)


def _forked(group: RolloutGroup) -> RolloutGroup:
    """The same group, each attempt with a second training sequence: [9] → [10]."""
    fork = Turn(
        context_ids=[9], sampled_ids=[10], logprobs=[-0.1], weight_versions=[4], finish_reason="stop", sequence_idx=1
    )
    attempts = [dataclasses.replace(t, turns=[*t.turns, fork]) for t in group.trajectories]
    return dataclasses.replace(group, trajectories=attempts)


def _routed(group: RolloutGroup, draw: random.Random) -> RolloutGroup:
    """The same group with an expert of nine in each of two layers; some attempts have none."""

    def routed(turn: Turn) -> Turn:
        number = len(turn.context_ids) + len(turn.sampled_ids) - 1
        ids = bytes(draw.randrange(9) for _ in range(2 * number))
        return dataclasses.replace(turn, routes=Routes(ids=ids, layers=2, choices=1, id_bytes=1))

    attempts = [
        dataclasses.replace(t, turns=[routed(turn) for turn in t.turns]) if draw.random() < 0.8 else t
        for t in group.trajectories
    ]
    return dataclasses.replace(group, trajectories=attempts)


def _tables(root: Path, model: Path, shards: dict[str, list[RolloutGroup]]) -> dict[str, pa.Table]:
    log = new_run(root, model)
    return {name: read_shard(log, commit(log, name, groups)) for name, groups in shards.items()}


def _row_ids(samples: Samples) -> list[list[int]]:
    return [
        samples.input_ids_T[start:stop].tolist()
        for start, stop in zip(samples.offsets, samples.offsets[1:], strict=False)
    ]


def test_a_null_reward_becomes_nan(tmp_path: Path, tiny_folder: Path) -> None:
    group = group_of([_row(0), _row(1, reward=0.25)], position=0)
    table = _tables(tmp_path, tiny_folder, {"a": [group]})["a"]
    column = table.column_names.index("reward")
    table = table.set_column(column, "reward", pa.array([None, 0.25], type=pa.float32()))
    samples = gather_samples([ClaimedGroup(shard_id="a", group_id=group.id)], {"a": table})
    assert np.isnan(samples.rewards_B[0]) and samples.rewards_B[1] == 0.25


def test_rows_with_a_turn_under_a_grammar_are_known(tmp_path: Path, tiny_folder: Path) -> None:
    free, forked = group_of([_row(0), _row(1)], position=0), _forked(group_of([_row(0), _row(1)], position=1))
    first = forked.trajectories[0]
    turns = [dataclasses.replace(turn, constraint="{}") if turn.sequence_idx else turn for turn in first.turns]
    forked = dataclasses.replace(
        forked, trajectories=[dataclasses.replace(first, turns=turns), *forked.trajectories[1:]]
    )
    tables = _tables(tmp_path, tiny_folder, {"a": [free], "b": [forked]})
    assert "requests" not in tables["a"].column_names
    claimed = [ClaimedGroup(shard_id=s, group_id=g.id) for s, g in (("b", forked), ("a", free))]
    samples = gather_samples(claimed, tables)
    assert samples.constrained_B is not None
    assert samples.constrained_B.tolist() == [False, True, False, False, False, False]


def test_a_group_without_rows_is_an_error_that_names_it(tmp_path: Path, tiny_folder: Path) -> None:
    group = group_of([_row(0)], position=0)
    tables = _tables(tmp_path, tiny_folder, {"a": [group]})
    claimed = [ClaimedGroup(shard_id="a", group_id=group.id), ClaimedGroup(shard_id="a", group_id="0.other")]
    with pytest.raises(ValueError, match=r"shard a has no row of group 0\.other"):
        gather_samples(claimed, tables)


def test_the_columns_that_are_trained_on_are_enough(tmp_path: Path, tiny_folder: Path) -> None:
    groups = [group_of([_row(0), _row(1)], position=p) for p in range(3)]
    table = _tables(tmp_path, tiny_folder, {"a": groups})["a"]
    claimed = [ClaimedGroup(shard_id="a", group_id=groups[p].id) for p in (2, 0)]
    few, all_columns = gather_samples(claimed, {"a": table.select(COLUMNS)}), gather_samples(claimed, {"a": table})
    for field in dataclasses.fields(Samples):
        assert np.array_equal(getattr(few, field.name), getattr(all_columns, field.name)), field.name


rows_of_groups = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=5)


@settings(max_examples=25, deadline=None)
@given(lengths=rows_of_groups, seed=st.integers(0, 1000), batches=st.integers(1, 3))
def test_any_claim_gathers_what_row_by_row_would(lengths: list[list[int]], seed: int, batches: int) -> None:
    """Against plain Python: attempts in any order, groups in any order, tables in several batches."""
    draw = random.Random(seed)
    groups = []
    for position, replies in enumerate(lengths):
        rows = [
            _row(attempt, token=10 * position + attempt, reply_length=n, reward=n / 4)
            for attempt, n in enumerate(replies)
        ]
        group = group_of(draw.sample(rows, len(rows)), position=position)
        group = _forked(group) if draw.random() < 0.3 else group
        groups.append(_routed(group, draw) if draw.random() < 0.5 else group)
    shard_of = [draw.choice("ab") for _ in groups]
    tables = {}
    for shard_id in set(shard_of):
        inside = [group for group, where in zip(groups, shard_of, strict=True) if where == shard_id]
        whole = shard_table(inside, provenance=provenance(), sampling=Sampling())
        size = -(-whole.num_rows // batches)
        tables[shard_id] = pa.Table.from_batches(whole.to_batches(max_chunksize=size))
    claimed = [
        ClaimedGroup(shard_id=shard_of[p], group_id=groups[p].id)
        for p in draw.sample(range(len(groups)), draw.randint(1, len(groups)))
    ]
    samples = gather_samples(claimed, tables)

    expected = []
    for rank, claim in enumerate(claimed):
        found = [row for row in tables[claim.shard_id].to_pylist() if row["group_id"] == claim.group_id]
        found.sort(key=lambda row: (row["attempt"], row["sequence_idx"]))
        expected += [(rank, row) for row in found]
    assert _row_ids(samples) == [row["input_ids"] for _, row in expected]
    assert samples.mask_T.tolist() == [bit for _, row in expected for bit in row["loss_mask"]]
    assert samples.logprobs_T.tolist() == [p for _, row in expected for p in row["logprobs"]]
    assert samples.versions_T.tolist() == [v for _, row in expected for v in row["weight_versions"]]
    assert samples.groups_B.tolist() == [rank for rank, _ in expected]
    assert samples.rewards_B.tolist() == [row["reward"] for _, row in expected]
    attempts = list(dict.fromkeys((rank, row["attempt"]) for rank, row in expected))
    assert samples.attempts_B.tolist() == [attempts.index((rank, row["attempt"])) for rank, row in expected]
    if all("routes" not in tables[claim.shard_id].column_names for claim in claimed):
        assert samples.routes_T is None and samples.routed_T is None
        return
    routes = [each for _, row in expected for each in row.get("routes") or [None] * len(row["input_ids"])]
    assert samples.routes_T is not None and samples.routed_T is not None
    assert samples.routed_T.tolist() == [each is not None for each in routes]
    assert samples.routes_T[samples.routed_T].tolist() == [each for each in routes if each is not None]
