"""Rewards of a rescore stay beside the recorded ones, each file written once and read as it was written."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from storage.log.entries import Rescore, Shard
from storage.log.run_log import RunLog
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


def _rescored(log: RunLog, shard: Shard, rewards: list[float | None], wanted: RewardSet = MINE) -> list[Attempt]:
    """The shard's attempts, after these rewards were written and logged."""
    attempts = attempts_of(read_shard(log, shard))
    new = [NewReward(reward=reward, parts={"style": reward, "absent": None}) for reward in rewards]
    digest, _ = put_rewards(log, shard, wanted, attempts, new)
    log.append(
        Rescore(name=wanted.name, reward=wanted.reward, reward_sha256=wanted.reward_sha256, files={shard.id: digest})
    )
    return attempts


def test_an_attempt_is_its_last_reply_however_many_sequences_it_has(log: RunLog) -> None:
    said = [
        Message(role="user", content="3"),
        Message(role="assistant", content="first", is_completion=True),
        Message(role="tool", content="no"),
        Message(role="assistant", content="last", is_completion=True),
        Message(role="user", content="thanks"),
    ]
    forked = a_trajectory(0.25, attempt=0, messages=said, turns=[a_turn(), a_turn(sequence_idx=1)])
    silent = a_trajectory(1.0, attempt=2, messages=said[:1])
    shard = _commit(log, a_group(3, trajectories=[forked, silent]))
    assert shard.num_rows == 3
    assert attempts_of(read_shard(log, shard)) == [
        Attempt(group_id="0.task3", prompt_id="task3", attempt=0, reply="last", recorded=0.25),
        Attempt(group_id="0.task3", prompt_id="task3", attempt=2, reply=None, recorded=1.0),
    ]


def test_what_is_written_is_read_again_with_nulls_and_parts(log: RunLog) -> None:
    shard = _commit(log, a_group(0), a_group(1))
    _rescored(log, shard, [0.5, None, 0.1, 1.0])
    table = read_rewards(log, shard, "mine")
    assert table.schema.equals(SCHEMA)
    assert table["group_id"].to_pylist() == ["0.task0", "0.task0", "0.task1", "0.task1"]
    assert table["attempt"].to_pylist() == [0, 1, 0, 1]
    assert table["reward"].to_pylist() == [0.5, None, pytest.approx(0.1), 1.0]
    assert table["reward_parts"].to_pylist()[0] == [("style", 0.5), ("absent", None)]
    metadata = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    assert metadata == {
        "run_id": "run",
        "shard_id": "s0",
        "shard_sha256": shard.sha256,
        "name": "mine",
        "reward": "my.module:mine",
        "reward_sha256": "1" * 64,
    }


def test_every_row_of_an_attempt_gets_its_new_reward_and_nothing_else_changes(log: RunLog) -> None:
    forked = a_trajectory(0.25, attempt=0, turns=[a_turn(), a_turn(sequence_idx=1)])
    shard = _commit(log, a_group(0, trajectories=[forked, a_trajectory(0.5, attempt=1)]), a_group(1))
    _rescored(log, shard, [1.0, None, 3.0, 4.0])
    recorded = read_shard(log, shard)
    rewards = read_rewards(log, shard, "mine")
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):  # found by name, not by place
        changed = with_rewards(recorded, rewards.take(order))
        assert changed["reward"].to_pylist() == [1.0, 1.0, None, 3.0, 4.0]
        assert changed["reward_parts"].to_pylist()[2] == [("style", None), ("absent", None)]
        assert changed.schema.equals(recorded.schema)
        others = [name for name in recorded.column_names if not name.startswith("reward")]
        assert changed.select(others).equals(recorded.select(others))
    with pytest.raises(DamagedRewards, match="2 rows of a shard"):
        with_rewards(recorded, rewards.slice(1))


def test_the_recorded_rewards_stay(log: RunLog) -> None:
    shard = _commit(log, a_group(0, rewards=[1.0, 0.0]))
    before = log.store.get(log.shard_key("s0"))
    _rescored(log, shard, [0.0, 1.0])
    assert log.store.get(log.shard_key("s0")) == before
    assert read_shard(log, shard)["reward"].to_pylist() == [1.0, 0.0]


def test_a_file_is_written_once_and_the_first_one_counts(log: RunLog) -> None:
    shard = _commit(log, a_group(0))
    attempts = attempts_of(read_shard(log, shard))
    assert find_rewards(log, shard, MINE) is None
    first, _ = put_rewards(log, shard, MINE, attempts, [NewReward(reward=r, parts={}) for r in (1.0, 2.0)])
    second, table = put_rewards(log, shard, MINE, attempts, [NewReward(reward=r, parts={}) for r in (3.0, 4.0)])
    assert first == second and table["reward"].to_pylist() == [1.0, 2.0]
    found = find_rewards(log, shard, MINE)
    assert found is not None and found[0] == first


def test_a_file_left_behind_by_other_code_is_never_taken_over(log: RunLog) -> None:
    shard = _commit(log, a_group(0))
    attempts = attempts_of(read_shard(log, shard))
    put_rewards(log, shard, MINE, attempts, [NewReward(reward=1.0, parts={})] * 2)
    other = RewardSet(name="mine", reward="my.module:mine", reward_sha256="2" * 64)
    with pytest.raises(RewardNameInUse, match="--name mine-2"):
        put_rewards(log, shard, other, attempts, [NewReward(reward=0.0, parts={})] * 2)


def test_a_name_belongs_to_one_function_of_one_version(log: RunLog) -> None:
    shard = _commit(log, a_group(0))
    check_name(log.state, MINE, run="run")
    _rescored(log, shard, [1.0, 2.0])
    check_name(log.state, MINE, run="run")
    check_name(log.state, RewardSet(name="mine", reward="/moved/file.py:mine", reward_sha256="1" * 64), run="run")
    edited = RewardSet(name="mine", reward="my.module:mine", reward_sha256="2" * 64)
    with pytest.raises(RewardNameInUse, match=r"'mine' already, made by my.module:mine at sha256 1111.*--name mine-2"):
        check_name(log.state, edited, run="run")
    with pytest.raises(RewardNameInUse):
        check_name(log.state, RewardSet(name="mine", reward="my.module:other", reward_sha256="1" * 64), run="run")
    # The next free name is one that holds nothing, or the same code's rewards already.
    third = RewardSet(name="mine-2", reward="my.module:mine", reward_sha256="3" * 64)
    _rescored(log, shard, [0.0, 0.0], third)
    with pytest.raises(RewardNameInUse, match="--name mine-3"):
        check_name(log.state, edited, run="run")
    with pytest.raises(RewardNameInUse, match="--name mine-2"):
        check_name(log.state, RewardSet(name="mine", reward="my.module:mine", reward_sha256="3" * 64), run="run")


def _no_arrow(data: bytes) -> bytes:
    return b"no arrow"


def _cut(data: bytes) -> bytes:
    return data[:-20]


def _other_rewards(data: bytes) -> bytes:
    table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table.slice(1))
    return bytes(sink.getvalue())


@pytest.mark.parametrize("damage", [_no_arrow, _cut, _other_rewards, None], ids=["text", "cut", "altered", "gone"])
def test_a_damaged_file_is_an_error_that_names_it_and_the_way_out(log: RunLog, damage: object) -> None:
    shard = _commit(log, a_group(0))
    _rescored(log, shard, [1.0, 2.0])
    key = rewards_key(log, "mine", "s0")
    if callable(damage):
        log.store.put(key, damage(log.store.get(key)))
    else:
        log.store.delete([key])
    with pytest.raises(DamagedRewards, match=r"rewards/mine/s0.arrow.*under another name"):
        read_rewards(log, shard, "mine")


@pytest.mark.parametrize("damage", [_no_arrow, _cut])
def test_what_a_killed_rescore_left_is_taken_only_when_it_can_be_read(log: RunLog, damage: object) -> None:
    shard = _commit(log, a_group(0))
    attempts = attempts_of(read_shard(log, shard))
    put_rewards(log, shard, MINE, attempts, [NewReward(reward=1.0, parts={})] * 2)
    key = rewards_key(log, "mine", "s0")
    assert callable(damage)
    log.store.put(key, damage(log.store.get(key)))
    with pytest.raises(DamagedRewards, match="rewards/mine/s0.arrow"):
        find_rewards(log, shard, MINE)


def test_a_file_of_another_shard_is_refused(log: RunLog) -> None:
    first, second = _commit(log, a_group(0)), _commit(log, a_group(1), shard_id="s1")
    attempts = attempts_of(read_shard(log, first))
    put_rewards(log, first, MINE, attempts, [NewReward(reward=1.0, parts={})] * 2)
    log.store.put(rewards_key(log, "mine", "s1"), log.store.get(rewards_key(log, "mine", "s0")))
    with pytest.raises(DamagedRewards, match="of another shard than s1"):
        find_rewards(log, second, MINE)
