"""Rewards computed again: one Arrow file per shard and name, beside the recorded rewards, which stay as they are.

    shard ─▶ attempts (reply, recorded reward) ─ a reward function ─▶ rewards/<name>/<shard id>.arrow ─▶ `Rescore` entry
    `Rescore` entry ─▶ read bytes ─▶ sha256 as recorded? ─▶ the shard's rows with these rewards, else DamagedRewards

One row per attempt. A file is written once; whoever finds one that no entry names, from a rescore that was cut off,
takes it as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import pyarrow as pa
import pyarrow.compute as pc

from settings.errors import InvalidInput
from storage.log.entries import Shard
from storage.log.run_log import RunLog
from storage.log.run_state import RunState
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
    """A file of rewards is not what the log says; the message names it and the way out."""


class RewardNameInUse(InvalidInput):
    """The name belongs to rewards of another function; the message suggests a free one."""


@dataclass(frozen=True, kw_only=True)
class RewardSet:
    """Whose rewards these are."""

    name: str
    """What the set is called."""
    reward: str
    """Import path of the function."""
    reward_sha256: str
    """Digest of the file the function is in."""

    def is_of(self, reward: str, reward_sha256: str) -> bool:
        """True for the same function of the same file, wherever that file lies on this machine."""
        return reward.rpartition(":")[2] == self.reward.rpartition(":")[2] and reward_sha256 == self.reward_sha256


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What a reward function needs to know of an attempt."""

    group_id: str
    prompt_id: str
    attempt: int
    reply: str | None
    """The policy's last message; null where it wrote none."""
    recorded: float | None
    """The reward it was given at the time."""


@dataclass(frozen=True, kw_only=True)
class NewReward:
    """What an attempt is worth now."""

    reward: float | None
    """Null: not applicable, or the function failed."""
    parts: dict[str, float | None]
    """Named components."""


SCORED_COLUMNS = ("group_id", "prompt_id", "attempt", "sequence_idx", "messages", "reward")
"""What of a shard `attempts_of` needs."""


def attempts_of(table: pa.Table) -> list[Attempt]:
    """The attempts of a shard, in row order; a forked attempt counts once, by its first sequence."""
    first = table.filter(pc.equal(table["sequence_idx"], 0))
    columns = [first[name].to_pylist() for name in ("group_id", "prompt_id", "attempt", "messages", "reward")]
    return [
        Attempt(
            group_id=group_id,
            prompt_id=prompt_id,
            attempt=attempt,
            reply=next((m["content"] for m in reversed(messages) if m["is_completion"]), None),
            recorded=recorded,
        )
        for group_id, prompt_id, attempt, messages, recorded in zip(*columns, strict=True)
    ]


def check_name(state: RunState, reward_set: RewardSet, *, run: str) -> None:
    """Raise `RewardNameInUse` when the name holds rewards of other code, naming the next free one."""
    rescore = state.rescored.get(reward_set.name)
    if rescore is not None and not reward_set.is_of(rescore.reward, rescore.reward_sha256):
        raise _name_in_use(state, reward_set, run=run, other=f"{rescore.reward} at sha256 {rescore.reward_sha256[:12]}")


def put_rewards(
    log: RunLog, shard: Shard, reward_set: RewardSet, attempts: Sequence[Attempt], rewards: Sequence[NewReward]
) -> tuple[str, pa.Table]:
    """Write a shard's new rewards unless they are there; returns the sha256 and the rows of the file that is.

    Raises `RewardNameInUse` when a file of other code is there.
    """
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
    data = ipc_bytes(table, compression="zstd")
    if log.store.put_if_absent(rewards_key(log, reward_set.name, shard.id), data):
        return sha256_of(data), table
    existing = find_rewards(log, shard, reward_set)
    assert existing is not None, "what could not be written is there"
    return existing


def find_rewards(log: RunLog, shard: Shard, reward_set: RewardSet) -> tuple[str, pa.Table] | None:
    """The sha256 and rows of a file that a rescore wrote before it was cut off; null where there is none.

    Raises `RewardNameInUse` when it was made by other code, `DamagedRewards` when it cannot be read.
    """
    key = rewards_key(log, reward_set.name, shard.id)
    try:
        data = log.store.get(key)
    except FileNotFoundError:
        return None
    table = _decode(data, log=log, key=key)
    metadata = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()}
    if not reward_set.is_of(metadata.get("reward", ""), metadata.get("reward_sha256", "")):
        raise _name_in_use(log.state, reward_set, run=log.run_id, other=metadata.get("reward", "another function"))
    if metadata.get("shard_sha256") != shard.sha256:
        raise _damaged(log, key, f"it is of another shard than {shard.id}")
    return sha256_of(data), table


def read_rewards(log: RunLog, shard: Shard, name: str) -> pa.Table:
    """One row per attempt of a shard, as the rewards `name` have it.

    Raises `DamagedRewards` when the file is missing or altered, `KeyError` when the log names none.
    """
    key = rewards_key(log, name, shard.id)
    try:
        data = log.store.get(key)
    except FileNotFoundError:
        raise _damaged(log, key, "the file is missing") from None
    if sha256_of(data) != log.state.rescored[name].files[shard.id]:
        raise _damaged(log, key, "its sha256 differs from the log's")
    return _decode(data, log=log, key=key)


def with_rewards(table: pa.Table, rewards: pa.Table) -> pa.Table:
    """The rows of a shard with other rewards, those of `read_rewards`; every sequence of an attempt gets its reward.

    Raises `DamagedRewards` when an attempt has none, not even null.
    """
    rank = pc.index_in(_attempt_keys(table), value_set=_attempt_keys(rewards))
    if rank.null_count:
        raise DamagedRewards(f"{rank.null_count} rows of a shard have no attempt in its new rewards; {_WAY_OUT}")
    for name in {"reward", "reward_parts"}.intersection(table.column_names):
        values = rewards[name].combine_chunks().take(rank)
        table = table.set_column(table.column_names.index(name), table.schema.field(name), values)
    return table


def rewards_key(log: RunLog, name: str, shard_id: str) -> str:
    """Store key of one file."""
    return log.key(f"rewards/{name}/{shard_id}.arrow")


_WAY_OUT = "put it back from a copy, or compute the rewards anew under another name: `millrace rescore … --name`"


def _attempt_keys(table: pa.Table) -> pa.Array:
    """One string per row that names its attempt."""
    attempts = table["attempt"].combine_chunks().cast(pa.string())
    return pc.binary_join_element_wise(table["group_id"].combine_chunks(), attempts, "\0")


def _decode(data: bytes, *, log: RunLog, key: str) -> pa.Table:
    try:
        table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
    except (pa.ArrowInvalid, OSError) as error:
        raise _damaged(log, key, f"it is no Arrow IPC file, or cut off ({error})") from error
    if missing := set(SCHEMA.names) - set(table.column_names):
        raise _damaged(log, key, f"columns {sorted(missing)} are missing")
    return table.combine_chunks()


def _damaged(log: RunLog, key: str, problem: str) -> DamagedRewards:
    return DamagedRewards(f"{log.store.uri}/{key}: {problem}; {_WAY_OUT}")


def _name_in_use(state: RunState, reward_set: RewardSet, *, run: str, other: str) -> RewardNameInUse:
    name, number = reward_set.name, 2
    while (used := state.rescored.get(f"{name}-{number}")) and not reward_set.is_of(used.reward, used.reward_sha256):
        number += 1
    return RewardNameInUse(
        f"run {run!r} has rewards {name!r} already, made by {other}; they stay as they are. "
        f"Take another name: --name {name}-{number}"
    )
