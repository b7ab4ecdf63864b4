"""Writing a shard so that it is committed once, and reading one so that it is what was committed.

groups ─▶ encode ─▶ put shards/<id>.arrow ─▶ append a `Shard` entry to the run's log   (data first, the log last)
log entry ─▶ read bytes ─▶ sha256 as recorded? ─▶ table, else DamagedShard
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import pyarrow as pa

from storage.digests import sha256_of
from storage.log_entries import Shard
from storage.records import NOT_SAMPLED, RolloutGroup, Sampling
from storage.run_log import RunLog
from storage.shard_codec import BadShard, Provenance, decode_shard, encode_shard, summarise


class DamagedShard(Exception):
    """A committed shard cannot be read as committed. Quarantine it and go on."""

    def __init__(self, shard_id: str, reason: str) -> None:
        super().__init__(f"shard {shard_id}: {reason}")
        self.shard_id = shard_id
        self.reason = reason

    def __reduce__(self) -> tuple[type[DamagedShard], tuple[str, str]]:
        return DamagedShard, (self.shard_id, self.reason)


def commit_shard(
    log: RunLog,
    groups: Sequence[RolloutGroup],
    *,
    provenance: Provenance,
    sampling: Sampling,
    is_eval: bool = False,
    seconds: dict[str, float] | None = None,
) -> Shard:
    """Write the groups as one shard and commit it. Calling it again with the same shard id changes nothing.

    Raises `storage.run_log.Conflict` when another producer has committed one of the prompts meanwhile;
    the file then stays behind unreferenced.
    """
    started = time.perf_counter()
    data = encode_shard(groups, provenance=provenance, sampling=sampling, is_eval=is_eval)
    summaries = [summarise(group) for group in groups]
    log.store.put(log.shard_key(provenance.shard_id), data)
    sampled = [s for s in summaries if s.rows]
    shard = Shard(
        id=provenance.shard_id,
        sha256=sha256_of(data),
        num_rows=sum(s.rows for s in summaries),
        num_tokens=sum(len(turn.sampled_ids) for g in groups for t in g.usable for turn in t.turns),
        num_bytes=len(data),
        head_version=min((s.head_version for s in sampled), default=NOT_SAMPLED),
        tail_version=max((s.tail_version for s in sampled), default=NOT_SAMPLED),
        is_eval=is_eval,
        groups=summaries,
        producer=provenance.producer,
        seconds={**(seconds or {}), "commit": time.perf_counter() - started},
    )
    log.append(shard)
    return shard


def read_shard(log: RunLog, shard: Shard) -> pa.Table:
    """The rows of a committed shard.

    Raises `DamagedShard` when the file is missing, cut off, altered, or belongs to another run.
    """
    try:
        data = log.store.get(log.shard_key(shard.id))
    except FileNotFoundError:
        raise DamagedShard(shard.id, "the file is missing") from None
    if sha256_of(data) != shard.sha256:
        raise DamagedShard(shard.id, f"its sha256 differs from the log's ({len(data)} of {shard.num_bytes} bytes)")
    try:
        table = decode_shard(data, name=shard.id)
    except BadShard as error:
        raise DamagedShard(shard.id, str(error)) from error
    owner = table.schema.metadata[b"run_id"].decode()
    if owner != log.run_id:
        raise DamagedShard(shard.id, f"it belongs to run {owner!r}")
    return table
