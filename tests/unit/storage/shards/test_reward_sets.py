"""Rewards of a rescore stay beside the recorded ones, each file written once and read as it was written."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pyarrow as pa
import pytest

from storage.log.entries import Rescore, Shard
from storage.log.run_log import RunLog
from storage.objects.tables import ipc_bytes
from storage.records import Message, RolloutGroup
from storage.shards.reward_sets import (
    SCHEMA,
    Attempt,
    DamagedRewards,
    NewReward,
    RewardNameInUse,
    RewardSet,
    attempts_of,
    check_name,
    find_rewards,
    put_rewards,
    read_rewards,
    rewards_key,
    with_rewards,
)
from storage.shards.shards import commit_shard, read_shard
from tests.builders import SAMPLING, a_group, a_log, a_trajectory, a_turn, local_store, provenance

MINE = RewardSet(name="mine", reward="my.module:mine", reward_sha256="1" * 64)


@pytest.fixture
def log(tmp_path: Path) -> RunLog:
    return a_log(local_store(tmp_path))


def _commit(log: RunLog, *groups: RolloutGroup, shard_id: str = "s0") -> Shard:
    return commit_shard(log, groups, provenance=provenance(shard_id), sampling=SAMPLING)


@pytest.fixture
def shard(log: RunLog) -> Shard:
    """One group of two attempts."""
    return _commit(log, a_group(0))


def _put(log: RunLog, shard: Shard, rewards: list[float | None], reward_set: RewardSet = MINE) -> tuple[str, pa.Table]:
    new = [NewReward(reward=reward, parts={"style": reward, "absent": None}) for reward in rewards]
    return put_rewards(log, shard, reward_set, attempts_of(read_shard(log, shard)), new)


def _rescored(log: RunLog, shard: Shard, rewards: list[float | None], reward_set: RewardSet = MINE) -> None:
    """Write these rewards, and the log entry that names them."""
    digest, _ = _put(log, shard, rewards, reward_set)
    log.append(Rescore(**asdict(reward_set), files={shard.id: digest}))


def test_an_attempt_is_its_last_reply_however_many_sequences_it_has(log: RunLog) -> None:
    said = [
        Message(role="user", content="3"),
        Message(role="assistant", content="first", is_completion=True),
        Message(role="tool", content="no"),
        Message(role="assistant", content="<think>hm</think>last", is_completion=True, answer="last"),
        Message(role="user", content="thanks"),
    ]
    forked = a_trajectory(0.25, attempt=0, messages=said, turns=[a_turn(), a_turn(sequence_idx=1)])
    silent = a_trajectory(1.0, attempt=2, messages=said[:1])
    shard = _commit(log, a_group(3, trajectories=[forked, silent]))
    assert shard.num_rows == 3
    task = {"group_id": "0.task3", "prompt_id": "task3"}
    assert attempts_of(read_shard(log, shard)) == [
        Attempt(**task, attempt=0, reply="last", reply_with_thoughts="<think>hm</think>last", recorded=0.25),
        Attempt(**task, attempt=2, reply=None, reply_with_thoughts=None, recorded=1.0),
    ]


def test_every_row_of_an_attempt_gets_its_new_reward_and_nothing_else_changes(log: RunLog) -> None:
    forked = a_trajectory(0.25, attempt=0, turns=[a_turn(), a_turn(sequence_idx=1)])
    shard = _commit(log, a_group(0, trajectories=[forked, a_trajectory(0.5, attempt=1)]), a_group(1))
    before = log.store.get(log.shard_key("s0"))
    _rescored(log, shard, [1.0, None, 3.0, 4.0])
    assert log.store.get(log.shard_key("s0")) == before, "the recorded rewards stay"
    rewards, recorded = read_rewards(log, shard, "mine"), read_shard(log, shard)
    assert rewards.schema.equals(SCHEMA)
    assert rewards["group_id"].to_pylist() == ["0.task0", "0.task0", "0.task1", "0.task1"]
    assert rewards["attempt"].to_pylist() == [0, 1, 0, 1]
    assert rewards["reward"].to_pylist() == [1.0, None, 3.0, 4.0]
    assert rewards["reward_parts"].to_pylist()[0] == [("style", 1.0), ("absent", None)]
    metadata = {key.decode(): value.decode() for key, value in rewards.schema.metadata.items()}
    assert metadata == {"run_id": "run", "shard_id": "s0", "shard_sha256": shard.sha256, **asdict(MINE)}
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):  # by name, not by place
        changed = with_rewards(recorded, rewards.take(order))
        assert changed["reward"].to_pylist() == [1.0, 1.0, None, 3.0, 4.0]
        assert changed["reward_parts"].to_pylist()[2] == [("style", None), ("absent", None)]
        assert changed.schema.equals(recorded.schema)
        others = [name for name in recorded.column_names if not name.startswith("reward")]
        assert changed.select(others).equals(recorded.select(others))
    with pytest.raises(DamagedRewards, match="2 rows of a shard"):
        with_rewards(recorded, rewards.slice(1))


def test_a_file_is_written_once_and_the_first_one_counts(log: RunLog, shard: Shard) -> None:
    """Unless it was left behind by other code: that is never taken over."""
    assert find_rewards(log, shard, MINE) is None
    first, _ = _put(log, shard, [1.0, 2.0])
    second, table = _put(log, shard, [3.0, 4.0])
    assert first == second and table["reward"].to_pylist() == [1.0, 2.0]
    assert find_rewards(log, shard, MINE) == (first, table)
    with pytest.raises(RewardNameInUse, match="--name mine-2"):
        _put(log, shard, [0.0, 0.0], replace(MINE, reward_sha256="2" * 64))


def test_a_name_belongs_to_one_function_of_one_version(log: RunLog, shard: Shard) -> None:
    check_name(log, MINE)
    _rescored(log, shard, [1.0, 2.0])
    check_name(log, MINE)
    check_name(log, replace(MINE, reward="/moved/file.py:mine"))
    edited = replace(MINE, reward_sha256="2" * 64)
    with pytest.raises(RewardNameInUse, match=r"'mine' already, made by my.module:mine at sha256 1111.*--name mine-2"):
        check_name(log, edited)
    with pytest.raises(RewardNameInUse):
        check_name(log, replace(MINE, reward="my.module:other"))
    # The next free name is one that holds nothing, or the same code's rewards already.
    third = replace(MINE, reward_sha256="3" * 64)
    _rescored(log, shard, [0.0, 0.0], replace(third, name="mine-2"))
    for reward_set, free in ((edited, "mine-3"), (third, "mine-2")):
        with pytest.raises(RewardNameInUse, match=f"--name {free}"):
            check_name(log, reward_set)


def test_a_damaged_file_is_an_error_that_names_it_and_the_way_out(log: RunLog, shard: Shard) -> None:
    """Also one that a killed rescore has left behind, which no digest in the log speaks for."""
    _rescored(log, shard, [1.0, 2.0])
    other = _commit(log, a_group(1), shard_id="s1")
    key = rewards_key(log, "mine", "s0")
    whole = log.store.get(key)
    log.store.put(rewards_key(log, "mine", "s1"), whole)
    with pytest.raises(DamagedRewards, match="of another shard than s1"):
        find_rewards(log, other, MINE)
    altered = ipc_bytes(read_rewards(log, shard, "mine").slice(1), compression=None)
    not_a_name = whole.replace(b"group_id", b"\xe5roup_id")
    other_type = ipc_bytes(pa.table({"group_id": ["g"], "attempt": ["0"], "reward": [1.0]}), compression=None)
    for data, may_be_found in (
        *((b"no arrow", False), (whole[:-20], False), (altered, True), (not_a_name, False), (other_type, False)),
    ):
        log.store.put(key, data)
        with pytest.raises(DamagedRewards, match=r"rewards/mine/s0.arrow.*under another name"):
            read_rewards(log, shard, "mine")
        if not may_be_found:
            with pytest.raises(DamagedRewards, match="rewards/mine/s0.arrow"):
                find_rewards(log, shard, MINE)
    log.store.delete([key])
    with pytest.raises(DamagedRewards, match="the file is missing"):
        read_rewards(log, shard, "mine")
