"""The rewards of every rescore as rows, read when a query asks for them.

In: a run's log. Out: `RewardRows`, a dataset DuckDB can scan; a damaged file is left out and noted.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs

from storage.log.run_log import RunLog
from storage.shards.reward_sets import SCHEMA, DamagedRewards, read_rewards

REWARDS_SCHEMA = pa.schema([pa.field("name", pa.string()), *SCHEMA, pa.field("shard_id", pa.string())])


class RewardRows(ds.FileSystemDataset):
    """One row per attempt and name. It has no fragments: `scanner` makes the rows, file by file."""

    @classmethod
    def of(cls, log: RunLog, shard_ids: set[str], *, left_out: dict[str, str]) -> RewardRows:
        """The rewards of these shards; what cannot be read goes into `left_out`, by shard id."""
        rows = cls([], REWARDS_SCHEMA, ds.IpcFileFormat(), pa.fs.LocalFileSystem())
        rows._log, rows._shard_ids, rows._left_out = log, shard_ids, left_out
        return rows

    def scanner(self, columns: list[str] | None = None, filter: ds.Expression | None = None) -> ds.Scanner:
        chosen = self.schema.names if columns is None else columns
        schema = pa.schema([self.schema.field(name) for name in chosen])
        return ds.Scanner.from_batches(pa.RecordBatchReader.from_batches(schema, self._batches(chosen, filter)))

    def _batches(self, columns: list[str], mask: ds.Expression | None) -> Iterator[pa.RecordBatch]:
        state = self._log.state
        for name, rescore in state.rescored.items():
            for shard_id in rescore.files:
                if shard_id not in self._shard_ids:
                    continue
                try:
                    table = read_rewards(self._log, state.shards[shard_id], name).select(SCHEMA.names)
                except DamagedRewards as error:
                    self._left_out[f"rewards {name} of {shard_id}"] = str(error)
                    continue
                table = table.add_column(0, "name", pa.repeat(pa.scalar(name), len(table)))
                table = table.append_column("shard_id", pa.repeat(pa.scalar(shard_id), len(table)))
                yield from (table if mask is None else table.filter(mask)).select(columns).to_batches()
