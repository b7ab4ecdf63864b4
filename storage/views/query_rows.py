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
from storage.shards.reward_sets import SCHEMA as REWARD_COLUMNS
from storage.shards.reward_sets import DamagedRewards, read_rewards
from storage.shards.schema import SCHEMA, BadShard
from storage.shards.shards import DamagedShard, forget_old_copies, read_columns

READ_AHEAD = 2 * max(4, os.cpu_count() or 1)
"""Shards that are read at once: on S3 a query waits for the server rather than for the processor."""

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

    Every file is read on its own and whole, by `read_columns`, so that a damaged one is found and left out before its
    offsets are followed: DuckDB would read past the end of a buffer. The dataset's fragments only tell which shards a
    filter can concern; their "paths" are shard ids and are never opened.
    """

    failure: Exception | None
    """The error of the store while the last query read it."""

    @classmethod
    def of(cls, log: RunLog, shards: Sequence[Shard], *, left_out: dict[str, str]) -> ShardRows:
        forget_old_copies()
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
        rows._log, rows._left_out, rows.failure = log, left_out, None
        rows._shards = {shard.id: shard for shard in shards}
        return rows

    def _batches(self, columns: list[str], mask: ds.Expression | None) -> Iterator[pa.RecordBatch]:
        """Yield batches of rows in log order, while the next few files are read."""
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
            table = read_columns(self._log, shard, stored)
        except (DamagedShard, BadShard) as error:
            self._left_out[shard.id] = error.reason if isinstance(error, DamagedShard) else str(error)
            return None
        return table.append_column("shard_id", pa.repeat(pa.scalar(shard.id), len(table)))


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
