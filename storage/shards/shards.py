"""Writing a shard so that it is committed once, and reading one so that it is what was committed.

groups ─▶ encode ─▶ put shards/<id>.arrow ─▶ append a `Shard` entry to the run's log   (data first, the log last)
log entry ─▶ map or fetch the file ─▶ sha256 as recorded? ─▶ rules kept? ─▶ table, else DamagedShard
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from settings.errors import UserError
from storage.log.entries import Shard
from storage.log.run_log import RunLog
from storage.objects.digests import DigestMismatch, sha256_of
from storage.objects.tables import ipc_bytes
from storage.records import NOT_SAMPLED, RolloutGroup, Sampling
from storage.shards.codec import COMPRESSION, Provenance, open_shard, shard_table, summarise
from storage.shards.failed_attempts import put_failures
from storage.shards.schema import BadShard, NewerSchema, check, flat


class DamagedShard(UserError):
    """A committed shard cannot be read as committed. Quarantine it and go on: its prompts run again."""

    def __init__(self, shard_id: str, reason: str, file: str = "") -> None:
        super().__init__(f"shard {shard_id}: {reason}" + (f" ({file})" if file else ""))
        self.shard_id = shard_id
        self.reason = reason
        self.file = file

    def __reduce__(self) -> tuple[type[DamagedShard], tuple[str, str, str]]:
        return DamagedShard, (self.shard_id, self.reason, self.file)


def commit_shard(
    log: RunLog,
    groups: Sequence[RolloutGroup],
    *,
    provenance: Provenance,
    sampling: Sampling,
    is_eval: bool = False,
    seconds: dict[str, float] | None = None,
) -> Shard:
    """Write the groups as one shard and commit it; returns what the log holds.

    Calling it again with the same shard id changes nothing, whatever the groups are.
    Raises `storage.log.run_log.Conflict` when another producer has committed one of the prompts meanwhile;
    the file then stays behind unreferenced.
    """
    recorded = log.refresh().shards.get(provenance.shard_id)
    if recorded is not None:
        return recorded
    started = time.perf_counter()
    table = shard_table(groups, provenance=provenance, sampling=sampling, is_eval=is_eval)
    with ThreadPoolExecutor(max_workers=2) as beside:  # compressing, hashing and the disk leave the interpreter free
        summarising = beside.submit(lambda: [summarise(group) for group in groups])
        data = ipc_bytes(table, compression=COMPRESSION)
        digesting = beside.submit(sha256_of, data)
        log.store.put(log.shard_key(provenance.shard_id), data)
        put_failures(log, provenance.shard_id, groups)
    summaries = summarising.result()
    sampled = [s for s in summaries if s.rows]
    shard = Shard(
        id=provenance.shard_id,
        sha256=digesting.result(),
        num_rows=table.num_rows,
        num_tokens=int(flat(table["loss_mask"]).sum()),
        num_bytes=len(data),
        head_version=min((s.head_version for s in sampled), default=NOT_SAMPLED),
        tail_version=max((s.tail_version for s in sampled), default=NOT_SAMPLED),
        is_eval=is_eval,
        groups=summaries,
        producer=provenance.producer,
        seconds={**(seconds or {}), "commit": time.perf_counter() - started},
    )
    return log.append(shard).shards[shard.id]


def read_shard(log: RunLog, shard: Shard, *, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of a committed shard; a local file is memory-mapped.

    With `columns` the others are left compressed and out of the table, but for the few that the rules are about.
    Raises `DamagedShard` when the file is missing, cut off, altered, of another run or tokenised differently, breaks
    a rule, or was removed by retention; `NewerSchema` when a newer Millrace wrote it.
    """
    table = _committed(log, shard, columns=columns)
    tokenizer = _tokenizer_of(table)
    try:
        first = _first_readable(log, len(log.state.retired_shards), len(log.state.quarantined))
    except LookupError:
        return table
    expected = tokenizer if first == shard.id else _first_tokenizer(log, first)
    if tokenizer and expected and tokenizer != expected:
        raise DamagedShard(
            shard.id,
            f"its tokenizer {tokenizer[:12]} is not {expected[:12]}, that of the run's first shard {first}; "
            f"start producer {shard.producer!r} with the run's own base model",
            _file(log, shard),
        )
    return table


def _committed(log: RunLog, shard: Shard, *, columns: Sequence[str] | None = None) -> pa.Table:
    """The table in a shard's file, as the log knows it.

    The content digest inside the file is not looked at: the bytes are the ones whose digest the writer put into the
    log after it had checked and digested the values in them. It is for files that no log vouches for.
    """
    file = _file(log, shard)
    damaged = functools.partial(DamagedShard, shard.id, file=file)
    if shard.id in log.state.retired_shards:
        raise damaged("retention removed it; what it held can no longer be trained on")
    try:
        data = log.store.get_buffer(log.shard_key(shard.id))
    except FileNotFoundError:
        raise damaged("the file is missing") from None
    except DigestMismatch as error:
        raise damaged(str(error)) from error
    with ThreadPoolExecutor(max_workers=1) as beside:  # neither hashing nor decompressing holds the interpreter
        opening = beside.submit(open_shard, data, name=shard.id, columns=columns)
        digest = sha256_of(data)
    if digest != shard.sha256:
        raise damaged(f"its sha256 differs from the log's ({len(data)} of {shard.num_bytes} bytes)")
    try:
        table = opening.result()
        check(table, name=shard.id)
    except NewerSchema as error:
        raise NewerSchema(f"{error} ({file})") from None
    except BadShard as error:
        raise damaged(str(error).removeprefix(f"shard {shard.id}: ")) from error
    owner = table.schema.metadata.get(b"run_id", b"").decode()
    if owner != log.run_id:
        raise damaged(f"it belongs to run {owner!r}")
    return table


def _file(log: RunLog, shard: Shard) -> str:
    return f"{log.store.uri}/{log.shard_key(shard.id)}"


def _tokenizer_of(table: pa.Table) -> str:
    """Digest of the vocabulary the rows were made with; empty where the producer did not say."""
    return str(table.schema.metadata.get(b"tokenizer_sha256", b"").decode())


@functools.lru_cache(maxsize=8)
def _first_readable(log: RunLog, num_retired: int, num_quarantined: int) -> str:
    """Id of the run's first shard that is still there, looked for again when one more is not.

    Raises `LookupError`, which is not kept, where there is none: the next shard will be the first.
    """
    state = log.state
    for shard_id in state.shards:
        if shard_id not in state.quarantined and shard_id not in state.retired_shards:
            return shard_id
    raise LookupError(f"run {log.run_id} has no shard that can be read")


@functools.lru_cache(maxsize=8)
def _first_tokenizer(log: RunLog, shard_id: str) -> str:
    """What every shard of the run is compared with, read once per log; empty where that file is no more."""
    try:
        return _tokenizer_of(_committed(log, log.state.shards[shard_id], columns=()))
    except (DamagedShard, NewerSchema):
        return ""
