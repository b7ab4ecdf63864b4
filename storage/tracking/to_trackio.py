"""A run in Trackio's database on this machine, in `trackio` of the state folder; `trackio sync` publishes it.

In: rows. Out: a row of the database each. `trackio.log` would stamp them with the present time, from a queue that dies
with the process; the storage below it takes the time of the entry, and returns once the row is on disk.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence

from trackio.sqlite_storage import SQLiteStorage

from storage.tracking.rows import PROJECT, Row, TrackedRun


class TrackioRun:
    """A run of the project `$TRACKIO_PROJECT`, or `millrace`."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        self._project = os.environ.get("TRACKIO_PROJECT") or PROJECT
        self.num_rows = SQLiteStorage.get_log_count(self._project, run_id=run.id)

    def add(self, rows: Sequence[Row]) -> None:
        SQLiteStorage.bulk_log(
            self._project,
            self._run.name,
            [dict(row.metrics) for row in rows],
            steps=[row.step for row in rows],
            timestamps=[datetime.datetime.fromtimestamp(row.at, datetime.UTC).isoformat() for row in rows],
            config=dict(self._run.config),
            log_ids=[f"{self._run.id}-{row.number}" for row in rows],
            run_id=self._run.id,
        )

    def close(self, outcome: str) -> None:
        pass
