"""A run as TensorBoard's event files, in `tensorboard/RUN-ID` of the state folder.

In: rows. Out: one event per row, which holds all its metrics, so the number of events is the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from settings.places.state_folder import home
from storage.tracking.rows import Row, TrackedRun


class TensorBoardRun:
    """A folder of event files; each opening begins a new file, and TensorBoard reads them as one run."""

    def __init__(self, run: TrackedRun) -> None:
        folder = home() / "tensorboard" / f"{run.name}-{run.id}"
        files = folder.glob("events.out.tfevents.*")
        self.num_rows = sum(
            event.HasField("summary") for file in files for event in LegacyEventFileLoader(str(file)).Load()
        )
        self._writer = EventFileWriter(str(folder))

    def add(self, rows: Sequence[Row]) -> None:
        for row in rows:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in row.metrics.items()]
            self._writer.add_event(Event(wall_time=row.at, step=row.step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self, outcome: str) -> None:
        self._writer.close()
