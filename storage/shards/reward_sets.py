"""Rewards computed again: one Arrow file per shard and name. The recorded rewards in the shard do not change.

    shard ─▶ attempts (reply, recorded reward) ─ a reward function ─▶ rewards/<name>/<shard id>.arrow ─▶ `Rescore` entry
    `Rescore` entry ─▶ read bytes ─▶ sha256 as recorded? ─▶ the shard's rows with these rewards, else DamagedRewards

A file has one row per attempt and is written once. A rescore that was cut off leaves files, which the next one uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from settings.errors import InvalidInput
from storage.log.entries import Shard
from storage.log.run_log import RunLog
from storage.objects.digests import sha256_of
from storage.objects.tables import ipc_bytes

SCHEMA = pa.schema(
    [
        ("group_id", pa.string()),
        ("attempt", pa.int32()),
        ("reward", pa.float32()),
        ("reward_parts", pa.map_(pa.string(), pa.float32())),
    ]
)


class DamagedRewards(InvalidInput):
    """A file of rewards differs from its entry in the log; the message names the file and the remedy."""


class RewardNameInUse(InvalidInput):
    """The name belongs to rewards of another function; the message suggests a free name."""


@dataclass(frozen=True, kw_only=True)
class RewardSet:
    """A named set of rewards, the import path of the function that made them, and the digest of its file."""

    name: str
    reward: str
    reward_sha256: str

    def is_of(self, reward: str, reward_sha256: str) -> bool:
        """True if this function in a file with this digest made the set, wherever the file is."""
        return reward.rpartition(":")[2] == self.reward.rpartition(":")[2] and reward_sha256 == self.reward_sha256


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The input of a reward function."""

    group_id: str
    prompt_id: str
    attempt: int
    reply: str | None
    """The policy's last message, without its thoughts; None if it wrote none."""
    reply_with_thoughts: str | None
    """All of that message."""
    recorded: float | None
    """The reward in the shard."""


class NewReward(NamedTuple):
    """The new reward of an attempt, None if it is not applicable or the function failed, and its named parts."""

    reward: float | None
    parts: dict[str, float | None]


SCORED_COLUMNS = ("group_id", "prompt_id", "attempt", "sequence_idx", "messages", "answers", "reward")
"""The columns of a shard that `attempts_of` needs."""


def attempts_of(table: pa.Table) -> list[Attempt]:
    """The attempts of a shard in row order; a forked attempt once, by its first sequence."""
    first = table.filter(pc.equal(table["sequence_idx"], 0)).select(set(SCORED_COLUMNS) & set(table.column_names))
    attempts = []
    for row in first.to_pylist():
        messages = row["messages"]
        answers = row.get("answers") or [None] * len(messages)
        last = next((index for index in reversed(range(len(messages))) if messages[index]["is_completion"]), None)
        whole = None if last is None else messages[last]["content"]
        attempts.append(
            Attempt(
                group_id=row["group_id"],
                prompt_id=row["prompt_id"],
                attempt=row["attempt"],
                reply=whole if last is None or answers[last] is None else answers[last],
                reply_with_thoughts=whole,
                recorded=row["reward"],
            )
        )
    return attempts


def check_name(log: RunLog, reward_set: RewardSet) -> None:
    """Raise `RewardNameInUse` if the name holds rewards of other code."""
    rescore = log.state.rescored.get(reward_set.name)
    if rescore is not None and not reward_set.is_of(rescore.reward, rescore.reward_sha256):
        raise _name_in_use(log, reward_set, other=f"{rescore.reward} at sha256 {rescore.reward_sha256[:12]}")


def put_rewards(
    log: RunLog, shard: Shard, reward_set: RewardSet, attempts: Sequence[Attempt], rewards: Sequence[NewReward]
) -> tuple[str, pa.Table]:
    """Write new rewards unless the file exists; returns its sha256 and rows. Raises `RewardNameInUse`."""
    table = pa.table(
        {
            "group_id": [attempt.group_id for attempt in attempts],
            "attempt": [attempt.attempt for attempt in attempts],
            "reward": [new.reward for new in rewards],
            "reward_parts": [list(new.parts.items()) for new in rewards],
        },
        schema=SCHEMA.with_metadata(
            {"run_id": log.run_id, "shard_id": shard.id, "shard_sha256": shard.sha256, **asdict(reward_set)}
        ),
    )
    log.store.put_if_absent(rewards_key(log, reward_set.name, shard.id), ipc_bytes(table, compression="zstd"))
    written = find_rewards(log, shard, reward_set)
    assert written is not None, "the file exists"
    return written


def find_rewards(log: RunLog, shard: Shard, reward_set: RewardSet) -> tuple[str, pa.Table] | None:
    """The sha256 and rows of an earlier file, or None. Raises `RewardNameInUse` and `DamagedRewards`."""
    key = rewards_key(log, reward_set.name, shard.id)
    [data] = log.store.get_many([key])
    if data is None:
        return None
    table = _decode(data, log=log, key=key)
    noted = (table.schema.metadata or {}).items()
    metadata = {name.decode(errors="replace"): value.decode(errors="replace") for name, value in noted}
    if not reward_set.is_of(metadata.get("reward", ""), metadata.get("reward_sha256", "")):
        raise _name_in_use(log, reward_set, other=metadata.get("reward", "another function"))
    if metadata.get("shard_sha256") != shard.sha256:
        raise _damaged(log, key, f"it is of another shard than {shard.id}")
    return sha256_of(data), table


def read_rewards(log: RunLog, shard: Shard, name: str) -> pa.Table:
    """The rewards `name` of a shard, a row per attempt. Raises `DamagedRewards` if the file is missing or altered."""
    key = rewards_key(log, name, shard.id)
    [data] = log.store.get_many([key])
    if data is None:
        raise _damaged(log, key, "the file is missing")
    if sha256_of(data) != log.state.rescored[name].files[shard.id]:
        raise _damaged(log, key, "its sha256 differs from the log's")
    return _decode(data, log=log, key=key)


def with_rewards(table: pa.Table, rewards: pa.Table) -> pa.Table:
    """The rows of a shard with the rewards of their attempts. Raises `DamagedRewards` if an attempt has none."""
    rank = pc.index_in(_attempt_keys(table), value_set=_attempt_keys(rewards))
    if rank.null_count:
        raise DamagedRewards(f"{rank.null_count} rows of a shard have no attempt in its new rewards; {_REMEDY}")
    for name in {"reward", "reward_parts"}.intersection(table.column_names):
        values = rewards[name].combine_chunks().take(rank)
        table = table.set_column(table.column_names.index(name), table.schema.field(name), values)
    return table


def rewards_key(log: RunLog, name: str, shard_id: str) -> str:
    """Store key of the file of one shard."""
    return log.key(f"rewards/{name}/{shard_id}.arrow")


_REMEDY = "restore it from a copy, or compute the rewards again under another name: `millrace rescore … --name`"


def _attempt_keys(table: pa.Table) -> pa.Array:
    """For each row a string that identifies its attempt."""
    attempts = table["attempt"].combine_chunks().cast(pa.string())
    return pc.binary_join_element_wise(table["group_id"].combine_chunks(), attempts, "\0")


def _decode(data: bytes, *, log: RunLog, key: str) -> pa.Table:
    try:
        table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
        names = table.column_names
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _damaged(log, key, f"it is not an Arrow IPC file, or cut off ({error})") from error
    kinds = {name: table.schema.field(name).type for name in names if names.count(name) == 1}
    if wrong := [field.name for field in SCHEMA if kinds.get(field.name) != field.type]:
        raise _damaged(log, key, f"columns {wrong} are missing, doubled or of another type")
    return table.combine_chunks()


def _damaged(log: RunLog, key: str, problem: str) -> DamagedRewards:
    return DamagedRewards(f"{log.store.uri}/{key}: {problem}; {_REMEDY}")


def _name_in_use(log: RunLog, reward_set: RewardSet, *, other: str) -> RewardNameInUse:
    name, number, sets = reward_set.name, 2, log.state.rescored
    while (used := sets.get(f"{name}-{number}")) and not reward_set.is_of(used.reward, used.reward_sha256):
        number += 1
    return RewardNameInUse(
        f"run {log.run_id!r} has rewards {name!r} already, made by {other}; they stay as they are. "
        f"Use another name: --name {name}-{number}"
    )
