"""The rows of a run's shards and the rewards of every rescore, as DuckDB scans them: only the columns of a query.

In: a run's log and some of its shards. Out: `ShardRows` and `RewardRows`; a damaged file is left out and noted.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs

from storage.log.entries import Shard
from storage.log.run_log import RunLog
from storage.objects.digests import DigestMismatch, sha256_of
from storage.objects.object_store import StoreError
from storage.shards.reward_sets import SCHEMA as REWARD_COLUMNS
from storage.shards.reward_sets import DamagedRewards, read_rewards
from storage.shards.schema import SCHEMA, BadShard, check_schema
from storage.shards.shards import DamagedShard, read_shard

READ_AHEAD = 2 * max(4, os.cpu_count() or 1)
"""Shards that are read at once: on S3 a query waits for the server rather than for the processor."""
WHOLE_BYTES = 2**20
"""A shard up to this size is fetched by one request. Its columns alone would take dozens, each longer than the file."""

REWARDS_SCHEMA = pa.schema([pa.field("name", pa.string()), *REWARD_COLUMNS, pa.field("shard_id", pa.string())])
ROWS_SCHEMA = SCHEMA.append(pa.field("shard_id", pa.string()))
_FLAT_COLUMNS = [field.name for field in ROWS_SCHEMA if not pa.types.is_nested(field.type)]


class _Rows(ds.FileSystemDataset):
    """A dataset. DuckDB calls `scanner` with the columns and the filter of each query; `_batches` makes the rows."""

    def scanner(self, columns: list[str] | None = None, filter: ds.Expression | None = None) -> ds.Scanner:
        chosen = self.schema.names if columns is None else columns
        schema = pa.schema([self.schema.field(name) for name in chosen])
        return ds.Scanner.from_batches(pa.RecordBatchReader.from_batches(schema, self._batches(chosen, filter)))

    def _batches(self, columns: list[str], mask: ds.Expression | None) -> Iterator[pa.RecordBatch]:
        raise NotImplementedError


class ShardRows(_Rows):
    """The rows of some shards.

    Every file is read on its own, so that a damaged one can be left out, and is checked before its offsets are
    followed: DuckDB would read past the end of a buffer. The dataset's fragments only tell which shards a filter can
    concern; their "paths" are shard ids and are never opened.
    """

    failure: Exception | None
    """The error of the store while the last query read it."""

    @classmethod
    def of(cls, log: RunLog, shards: Sequence[Shard], *, left_out: dict[str, str], verify: bool) -> ShardRows:
        nowhere, ipc = pa.fs.LocalFileSystem(), ds.IpcFileFormat()
        fragments = [
            ipc.make_fragment(
                shard.id,
                nowhere,
                partition_expression=(ds.field("shard_id") == shard.id) & (ds.field("is_eval") == shard.is_eval),
            )
            for shard in shards
        ]
        rows = cls(fragments, ROWS_SCHEMA, ipc, nowhere)
        rows._log, rows._verify, rows._left_out, rows.failure = log, verify, left_out, None
        rows._shards = {shard.id: shard for shard in shards}
        return rows

    def _batches(self, columns: list[str], mask: ds.Expression | None) -> Iterator[pa.RecordBatch]:
        """In log order, while the next few files are read."""
        self.failure = None
        # Arrow's own filter would follow offsets before they are checked.
        needed = columns if mask is None else list(dict.fromkeys([*columns, *_FLAT_COLUMNS]))
        reading: deque[Future[pa.Table | None]] = deque()
        pool = ThreadPoolExecutor(READ_AHEAD)
        try:
            for fragment in self.get_fragments(mask):
                reading.append(pool.submit(self._read, self._shards[fragment.path], needed))
                if len(reading) == READ_AHEAD:
                    yield from _narrowed(reading.popleft().result(), columns, mask)
            while reading:
                yield from _narrowed(reading.popleft().result(), columns, mask)
        except Exception as error:
            self.failure = error
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _read(self, shard: Shard, columns: list[str]) -> pa.Table | None:
        """These columns of one shard, and possibly more; None, and a note in `left_out`, if its file is damaged."""
        if shard.id in self._left_out:
            return None
        stored = [name for name in columns if name in SCHEMA.names] or ["attempt"]  # without a column there are no rows
        try:
            if self._verify:
                table = read_shard(self._log, shard, columns=stored).select(stored)
            else:
                table = self._columns_of(shard, stored)
            return table.append_column("shard_id", pa.repeat(pa.scalar(shard.id), len(table)))
        except DamagedShard as error:
            self._left_out[shard.id] = error.reason
        except (BadShard, DigestMismatch) as error:
            self._left_out[shard.id] = str(error)
        except (pa.ArrowException, OSError):
            self._left_out[shard.id] = self._damage(shard)
        return None

    def _columns_of(self, shard: Shard, names: list[str]) -> pa.Table:
        """Columns of the file, with offsets in bounds; the digest of a file that is fetched whole is compared."""
        store, key = self._log.store, self._log.shard_key(shard.id)
        whole = store.get(key) if shard.num_bytes <= WHOLE_BYTES else None
        if whole is not None and sha256_of(whole) != shard.sha256:
            return read_shard(self._log, shard)  # raises `DamagedShard`, unless it was the connection
        with store.open_input(key) if whole is None else pa.BufferReader(whole) as source:
            schema = pa.ipc.open_file(source).schema
            check_schema(schema, name=shard.id)
            fields = [schema.get_field_index(name) for name in names]
            options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
            table = pa.ipc.open_file(source, options=options).read_all()
        table.validate(full=True)
        return table

    def _damage(self, shard: Shard) -> str:
        """The damage of a file that could not be read; raises the store's error if it is the store's."""
        try:
            read_shard(self._log, shard, columns=())
        except DamagedShard as error:
            return error.reason
        raise StoreError(f"store {self._log.store.uri}: shard {shard.id} could not be read at first; run this again")


class RewardRows(_Rows):
    """One row per attempt and name. It has no fragments: the rows are made file by file."""

    @classmethod
    def of(cls, log: RunLog, shard_ids: set[str], *, left_out: dict[str, str]) -> RewardRows:
        """The rewards of these shards; damaged files are noted in `left_out`."""
        rows = cls([], REWARDS_SCHEMA, ds.IpcFileFormat(), pa.fs.LocalFileSystem())
        rows._log, rows._shard_ids, rows._left_out = log, shard_ids, left_out
        return rows

    def _batches(self, columns: list[str], mask: ds.Expression | None) -> Iterator[pa.RecordBatch]:
        state = self._log.state
        for name, rescore in state.rescored.items():
            for shard_id in rescore.files:
                if shard_id not in self._shard_ids:
                    continue
                try:
                    table = read_rewards(self._log, state.shards[shard_id], name).select(REWARD_COLUMNS.names)
                except DamagedRewards as error:
                    self._left_out[f"rewards {name} of {shard_id}"] = str(error)
                    continue
                table = table.add_column(0, "name", pa.repeat(pa.scalar(name), len(table)))
                table = table.append_column("shard_id", pa.repeat(pa.scalar(shard_id), len(table)))
                yield from _narrowed(table, columns, mask)


def _narrowed(table: pa.Table | None, columns: list[str], mask: ds.Expression | None) -> list[pa.RecordBatch]:
    if table is None:
        return []
    batches: list[pa.RecordBatch] = (table if mask is None else table.filter(mask)).select(columns).to_batches()
    return batches
