"""Write a shard and commit it once; read a shard exactly as it was committed.

groups ─▶ encode ─▶ put shards/<id>.arrow ─▶ append a `Shard` entry to the run's log   (data first, the log last)
log entry ─▶ map or fetch the file ─▶ sha256 as recorded? ─▶ rules kept? ─▶ table, else DamagedShard
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from settings.errors import UserError
from settings.places.state_folder import home
from storage.log.entries import Shard
from storage.log.run_log import RunLog
from storage.objects.digests import DigestMismatch, sha256_of
from storage.objects.object_store import LocalStore, StoreError
from storage.objects.tables import ipc_bytes
from storage.records import NOT_SAMPLED, RolloutGroup, Sampling
from storage.shards.codec import COMPRESSION, Provenance, open_shard, shard_table, summarise
from storage.shards.failed_attempts import put_failures
from storage.shards.schema import CHECKED, BadShard, NewerSchema, check, flat

MOST_COPIED = 10 * 2**30
"""Bytes of shards from stores elsewhere that queries may keep in the cache."""


class DamagedShard(UserError):
    """A shard cannot be read as it was committed. Quarantine it and continue: its prompts run again."""

    def __init__(self, shard_id: str, reason: str, file: str = "") -> None:
        super().__init__(shard_id, reason, file)  # what pickle calls it with in another process
        self.shard_id = shard_id
        self.reason = reason
        self.file = file

    def __str__(self) -> str:
        return f"shard {self.shard_id}: {self.reason}" + (f" ({self.file})" if self.file else "")


def commit_shard(
    log: RunLog,
    groups: Sequence[RolloutGroup],
    *,
    provenance: Provenance,
    sampling: Sampling,
    is_eval: bool = False,
    seconds: dict[str, float] | None = None,
) -> Shard:
    """Write the groups as one shard and commit it; returns the log's entry.

    A second call with the same shard id changes nothing, whatever the groups are. Raises `Conflict` if another producer
    has committed one of the prompts; the file then has no log entry.
    """
    recorded = log.refresh().shards.get(provenance.shard_id)
    if recorded is not None:
        return recorded
    started = time.perf_counter()
    table = shard_table(groups, provenance=provenance, sampling=sampling, is_eval=is_eval)
    with ThreadPoolExecutor(max_workers=2) as beside:  # compressing, hashing and writing do not hold the interpreter
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
        owes={group.id: group.owes for group in groups if group.owes},
    )
    return log.append(shard).shards[shard.id]


def read_shard(log: RunLog, shard: Shard, *, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of a committed shard; a local file is memory-mapped.

    With `columns` only these are decompressed, and the few that the rules need. Raises `NewerSchema` if a newer
    Millrace wrote it, `DamagedShard` if it is anything but what this run committed, or gone.
    """
    table, state = _committed(log, shard, columns=columns), log.state
    tokenizer = _tokenizer_of(table)
    try:
        first, expected = _first_tokenizer(log, len(state.retired_shards), len(state.quarantined))
    except StopIteration:  # there is nothing to compare it with
        return table
    if tokenizer and expected and tokenizer != expected:
        raise DamagedShard(
            shard.id,
            f"its tokenizer {tokenizer[:12]} is not {expected[:12]}, that of the run's first shard {first}; "
            f"start producer {shard.producer!r} with the run's own base model",
            _file(log, shard),
        )
    return table


def read_columns(log: RunLog, shard: Shard, columns: Sequence[str]) -> pa.Table:
    """These columns of a committed shard, for a query: the digest says that it kept the rules when it was committed.

    The digest is of the whole file. So of a store elsewhere a copy stays on this machine, and is verified as the file
    is: the next query fetches nothing. Raises as `read_shard`.
    """
    read = functools.partial(_committed, log, shard, columns=columns, rules=False)
    if isinstance(log.store, LocalStore):
        return read().select(columns)
    copies, name, fetched = _copies(), f"{shard.sha256}.arrow", []
    with contextlib.suppress(FileNotFoundError, DamagedShard):  # it is fetched, again if it is damaged
        return read(fetch=lambda: copies.get_buffer(name)).select(columns)

    def fetch() -> pa.Buffer:
        fetched.append(log.store.get_buffer(log.shard_key(shard.id)))
        return fetched[0]

    table = read(fetch=fetch).select(columns)
    with contextlib.suppress(StoreError, OSError):  # a full disk costs the copy alone
        copies.put(name, fetched[0])
    return table


def forget_old_copies() -> None:
    """Remove the oldest of the copies that queries keep, beyond `MOST_COPIED`."""
    copies = _copies()
    files = sorted(copies.walk(""), key=lambda file: -file.modified_at)
    upto = itertools.accumulate(file.num_bytes for file in files)
    copies.delete([file.key for file, num_bytes in zip(files, upto, strict=True) if num_bytes > MOST_COPIED])


def _copies() -> LocalStore:
    return LocalStore(home() / "cache" / "shards")


def _committed(
    log: RunLog,
    shard: Shard,
    *,
    columns: Sequence[str] | None = None,
    rules: bool = True,
    fetch: Callable[[], pa.Buffer] | None = None,
) -> pa.Table:
    """The table of a file that has the digest in the log; its content digest is for files without a log.

    Without `rules` it is only made sure that no offset leads out of a buffer. `fetch` gets the bytes, by default from
    the store.
    """
    file = _file(log, shard)
    damaged = functools.partial(DamagedShard, shard.id, file=file)
    if shard.id in log.state.retired_shards:
        raise damaged("retention removed it; what it held can no longer be trained on")
    try:
        data = fetch() if fetch else log.store.get_buffer(log.shard_key(shard.id))
    except FileNotFoundError:
        raise damaged("the file is missing") from None
    except DigestMismatch as error:
        raise damaged(str(error)) from error
    with ThreadPoolExecutor(max_workers=1) as beside:  # neither hashing nor decompressing holds the interpreter
        checked = CHECKED if rules else ()
        opening = beside.submit(open_shard, data, name=shard.id, columns=columns, beside=checked)
        digest = sha256_of(data)
    if digest != shard.sha256:
        raise damaged(f"its sha256 differs from the log's ({len(data)} of {shard.num_bytes} bytes)")
    try:
        table = opening.result()
        if rules:
            check(table, name=shard.id)
        else:
            table.validate(full=True)
    except NewerSchema as error:
        raise NewerSchema(f"{error} ({file})") from None
    except (BadShard, pa.ArrowException) as error:
        raise damaged(str(error).removeprefix(f"shard {shard.id}: ")) from error
    owner = table.schema.metadata.get(b"run_id", b"").decode()
    if owner != log.run_id:
        raise damaged(f"it belongs to run {owner!r}")
    return table


def _file(log: RunLog, shard: Shard) -> str:
    return f"{log.store.uri}/{log.shard_key(shard.id)}"


def _tokenizer_of(table: pa.Table) -> str:
    """Digest of the vocabulary of the rows; empty if the producer did not record it."""
    return str(table.schema.metadata.get(b"tokenizer_sha256", b"").decode())


@functools.lru_cache(maxsize=8)
def _first_tokenizer(log: RunLog, num_retired: int, num_quarantined: int) -> tuple[str, str]:
    """The run's first shard that is still there, and its tokenizer digest, which every shard must have.

    It is looked up again when another shard is retired or quarantined. The digest is empty if the file cannot be read.
    Raises `StopIteration` if there is no shard; that is not cached, because the next shard will be the first.
    """
    state = log.state
    first = next(s for s in state.shards if s not in state.quarantined and s not in state.retired_shards)
    try:
        return first, _tokenizer_of(_committed(log, state.shards[first], columns=()))
    except (DamagedShard, NewerSchema):
        return first, ""
