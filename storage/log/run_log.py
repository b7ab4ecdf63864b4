"""A run's log: the only place that says what is true about the run.

In: records. Out: numbered JSON entries `log/<20 digits>.json`, and `RunState`, the fold of all of them.

    append(record) ── refresh the fold ── is it already there? ──yes──▶ done (a retried call is a no-op)
                                       └─ does it still fit?   ──no───▶ Conflict
                                       └─ put_if_absent(next number) ──lost──▶ refresh, try again

A hundred entries, and ten thousand, are also written as one segment (`segments`), from which a long run is opened. A
process holds all but the newest entries as segments too: a twentieth of the memory of records, and it may run for
weeks.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterator

from storage.log.conflicts import check_fits, holds
from storage.log.entries import Entry
from storage.log.history import History, decode_entry, encode_entry
from storage.log.run_state import Conflict, LogDamaged, RunState
from storage.log.segments import Archive, Segment, encode_segment, held_segment, merge_segments, read_entry
from storage.objects.object_store import ObjectStore, StoreError

logger = logging.getLogger("millrace.log")

_MOST_AT_ONCE = 256
_LOOK_AHEAD = 16
"""Entries that are read at once when a log is opened: one that is missing before another is a gap."""


class RunLog:
    """A run's log in a store; every process opens its own. Threads may share one: a call waits for the one before."""

    segment_sizes = (100, 10_000)
    """Entries in a short and in a long segment; part of the format, the same for every process."""

    def __init__(self, store: ObjectStore, run_id: str) -> None:
        self.store = store
        self.run_id = run_id
        self.prefix = f"runs/{run_id}"
        self.state = RunState()
        self._one_at_a_time = threading.RLock()  # a cancelled call leaves its thread behind, which may still fold
        self._is_open = False
        self._segments: list[Segment] = []  # the first entries, packed
        self._can_pack = True
        self._unwritten: list[Segment] = []  # those of them that the store may lack
        self._num_written = self._num_merged = 0  # entries known to be in segments of the store, and in long ones
        self._documents: list[bytes] = []  # JSON of the entries behind the segments

    @property
    def entries(self) -> History:
        """Every entry folded so far, in order."""
        return self.state.history

    def key(self, relative: str) -> str:
        """Store key of something inside this run."""
        return f"{self.prefix}/{relative}"

    @property
    def last_written_at(self) -> float:
        """When the newest entry was written, by the store's clock: that of the machine which wrote it may be off."""
        return self.store.modified_at(self._entry_key(self.state.entries - 1))

    def refresh(self) -> RunState:
        """Fold in what was committed since the last call. Reads entries by number, and never lists a folder.

        Raises `LogDamaged` for an entry that cannot be read, contradicts the ones before, or is missing.
        """
        with self._one_at_a_time:
            return self._refresh()

    def _refresh(self) -> RunState:
        ahead = 1
        if not self._is_open:
            self._open_segments()
            self._is_open, ahead = True, _LOOK_AHEAD
        while True:
            first = self.state.entries
            documents = self.store.get_many([self._entry_key(first + offset) for offset in range(ahead)])
            for document in documents:
                if document is None:
                    break
                self._fold(document)
            self._pack()
            if all(documents):
                ahead = min(2 * ahead, _MOST_AT_ONCE)
                continue
            missing = self._entry_key(self.state.entries)
            if not any(documents[self.state.entries - first :]):
                break
            if not self.store.exists(missing):
                raise LogDamaged(
                    f"{self.store.uri}/{missing} is missing, and later entries are there; "
                    "put it back from a copy of the store, or start a new run"
                )
        self.state.check()
        return self.state

    def append(self, body: Entry) -> RunState:
        """Commit a record unless the log has it; returns the state with it. Raises `Conflict` if it no longer fits."""
        with self._one_at_a_time:
            while True:
                state = self.refresh()
                if holds(state, body):
                    return state
                data = encode_entry(body, number=state.entries, written_at=time.time())
                decode_entry(data, number=state.entries)  # an entry that cannot be read back is not written
                check_fits(state, body)
                if self.store.put_if_absent(self._entry_key(state.entries), data):
                    self.refresh()
                    self._write_segments()
                    return self.state

    def shard_key(self, shard_id: str) -> str:
        return self.key(f"shards/{shard_id}.arrow")

    def _fold(self, document: bytes) -> None:
        number = self.state.entries
        entry = read_entry(document, number=number, source=f"{self.store.uri}/{self._entry_key(number)}")
        try:
            check_fits(self.state, entry.body)
            self.state.apply(entry)
        except Exception as error:  # an entry that no version writes may contradict the log in any way
            problem = str(error) if isinstance(error, Conflict) else repr(error)
            raise LogDamaged(
                f"log entry {number}: {problem} (in {self.store.uri}/{self._entry_key(number)})"
            ) from error
        self._documents.append(document)

    def _entry_key(self, number: int) -> str:
        return self.key(f"log/{number:020d}.json")

    def _segment_key(self, number: int, size: int) -> str:
        return self.key(f"log/segments/{number:020d}.{size}.arrow")

    def _open_segments(self) -> None:
        """Start from the segments, as far as they follow one another."""
        segments: list[Segment] = []
        archived, merged, reached = 0, 0, -1
        while reached < archived:
            reached = archived
            for size in reversed(self.segment_sizes):
                for segment in self._read_segments(archived, size):
                    segments.append(segment)
                    if merged == archived and size == self.segment_sizes[-1]:
                        merged += size
                    archived += size
        if segments:
            archive = Archive(segments)
            self.state = RunState(history=History(archive))
            for columns in archive.columns():  # they were checked when they were written
                self.state.add(columns)
            self._segments, self._num_written, self._num_merged = segments, archived, merged

    def _pack(self) -> None:
        """Hold complete blocks of entries as the segments that they are, or will be, in the store."""
        size, packed = self.segment_sizes[0], self.state.entries - len(self._documents)
        while len(self._documents) >= size and self._can_pack:
            try:
                data = encode_segment(self.entries[packed : packed + size], self._documents[:size], run_id=self.run_id)
            except ValueError:  # half a surrogate pair, which is no text for Arrow: the entries stay as they are
                self._can_pack = False
                break
            segment = held_segment(data, run_id=self.run_id, first=packed, size=size)
            self._segments.append(segment)
            self._unwritten.append(segment)
            self.entries.pack(Archive(self._segments))
            packed += size
            del self._documents[:size]

    def _read_segments(self, first: int, size: int) -> Iterator[Segment]:
        """Segments of one size, one after another, from entry `first` on."""
        batch = 4 if first % size == 0 else 0
        while batch:
            keys = [self._segment_key(first + size * offset, size) for offset in range(batch)]
            for key, data in zip(keys, self.store.get_many(keys), strict=True):
                if data is None:
                    return
                try:
                    yield held_segment(data, run_id=self.run_id, first=first, size=size)
                except LogDamaged as error:
                    logger.warning("%s/%s: %s; reading entries instead", self.store.uri, key, error)
                    return
                first += size
            batch = min(2 * batch, _MOST_AT_ONCE)

    def _write_segments(self) -> None:
        """Write the segments of complete blocks, also damaged ones. Every process writes the same bytes."""
        short, long = self.segment_sizes
        try:
            while self._unwritten:
                segment = self._unwritten[0]
                self.store.put(self._segment_key(segment.first, short), segment.data)
                self._num_written = segment.first + short
                del self._unwritten[0]
            while self._num_merged + long <= self._num_written:
                parts = list(itertools.islice(self._read_segments(self._num_merged, short), long // short))
                if len(parts) == long // short:
                    data = merge_segments(parts, run_id=self.run_id, first=self._num_merged)
                    self.store.put(self._segment_key(self._num_merged, long), data)
                self._num_merged += long
        except (OSError, StoreError) as error:
            logger.warning("a log segment could not be written; opening this run will take longer: %s", error)
