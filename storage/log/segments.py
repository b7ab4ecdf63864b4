"""Log entries by the hundred, and by ten thousand, so that a long run opens in a moment.

In: complete blocks of entries, with their JSON. Out: one Arrow file per block, and from it columns and entries again.

    bytes = sha256 of the rest ‖ Arrow IPC (zstd): document | kind, key, written_at, rows, groups …
                                                      │         └─ `Columns`, from which the fold is made
                                                      └─ the entry's own JSON, unpacked when it is needed

Segments are copies: the numbered entries stay the truth, and a segment that is missing or damaged only costs time.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import pyarrow as pa

from storage.log.entries import LogEntry
from storage.log.history import RecordList, decode_entry
from storage.log.run_state import Columns, LogDamaged, columns_of
from storage.objects.tables import ipc_bytes

_DIGEST = hashlib.sha256().digest_size

_LAYOUT = "2"
"""Version of the columns below. The entries of a segment with another one are read one by one."""

_FEW = 500
"""Entries whose columns become Python lists at once; with many more, the garbage collector would go through them."""

_SEGMENTS_UNPACKED = 2
_ENTRIES_UNPACKED = 200
"""Segments that are held as JSON, and entries that are held as records, after they were read."""

_SCHEMA = pa.schema(
    [
        ("document", pa.binary()),
        ("kind", pa.string()),  # from here on as in `Columns`
        ("key", pa.string()),
        ("written_at", pa.float64()),
        ("num_rows", pa.int64()),
        ("group_ids", pa.list_(pa.string())),
        ("positions", pa.list_(pa.int64())),
        ("retried", pa.list_(pa.bool_())),
        ("outcomes", pa.list_(pa.int8())),
    ]
)


def read_entry(document: bytes, *, number: int, source: str) -> LogEntry:
    """One entry from its JSON. Raises `LogDamaged`, which names `source`, if it cannot be read."""
    try:
        return decode_entry(document, number=number)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LogDamaged(f"{source} cannot be read: {error!r}; put it back from a copy of the store") from error


def encode_segment(entries: Sequence[LogEntry], documents: Sequence[bytes], *, run_id: str) -> bytes:
    """The file of one block of entries."""
    rows = [
        {"document": document, **columns_of(entry)._asdict()}
        for entry, document in zip(entries, documents, strict=True)
    ]
    return _pack(pa.Table.from_pylist(rows, schema=_SCHEMA), run_id=run_id, first=entries[0].number)


def merge_segments(segments: Sequence[Segment], *, run_id: str, first: int) -> bytes:
    """The file of a long block, from the short segments it consists of."""
    return _pack(pa.concat_tables([segment.table() for segment in segments]), run_id=run_id, first=first)


def _pack(table: pa.Table, *, run_id: str, first: int) -> bytes:
    metadata = {"run_id": run_id, "first": str(first), "layout": _LAYOUT}
    table = table.combine_chunks().replace_schema_metadata(metadata)
    data = ipc_bytes(table, compression="zstd")
    return hashlib.sha256(data).digest() + data


def held_segment(data: bytes, *, run_id: str, first: int, size: int) -> Segment:
    """The segment of these bytes; the logs of a process share it. Raises `LogDamaged`."""
    segment = Segment(data, run_id=run_id, first=first, size=size)
    return _HELD.setdefault(data[:_DIGEST], segment)  # the digest is of run and place too


class Segment:
    """One block, its documents still packed. Raises `LogDamaged` if the bytes are not those that were written."""

    def __init__(self, data: bytes, *, run_id: str, first: int, size: int) -> None:
        if hashlib.sha256(data[_DIGEST:]).digest() != data[:_DIGEST]:
            raise LogDamaged(f"segment {first} of run {run_id!r} is damaged")
        self.data, self.first = data, first
        """The file, and the number of its first entry."""
        self._buffer, self._size = pa.py_buffer(data).slice(_DIGEST), size
        expected = {b"run_id": run_id.encode(), b"first": str(first).encode(), b"layout": _LAYOUT.encode()}
        if pa.ipc.open_file(self._buffer).schema.metadata != expected:
            raise LogDamaged(f"segment {first} of run {run_id!r} is not that segment, or of another layout")
        if (num_rows := self._read(["kind"]).num_rows) != size:
            raise LogDamaged(f"segment {first} of run {run_id!r} has {num_rows} of {size} entries")

    def __len__(self) -> int:
        return self._size

    def columns(self) -> Iterator[Columns]:
        """The columns of every entry."""
        for batch in self._read(Columns._fields).to_batches(max_chunksize=_FEW):
            yield from map(Columns._make, zip(*(column.to_pylist() for column in batch.columns), strict=True))

    def table(self) -> pa.Table:
        """Everything in it."""
        return self._read(_SCHEMA.names)

    def documents(self) -> pa.BinaryArray:
        """The entries' JSON, unpacked: ten times what the segment holds."""
        return self._read(["document"])["document"].combine_chunks()

    def _read(self, names: Sequence[str]) -> pa.Table:
        options = pa.ipc.IpcReadOptions(included_fields=[_SCHEMA.names.index(name) for name in names])
        with pa.ipc.open_file(self._buffer, options=options) as file:
            return file.read_all()


_HELD: weakref.WeakValueDictionary[bytes, Segment] = weakref.WeakValueDictionary()


class Archive(RecordList[LogEntry]):
    """The entries of consecutive segments from entry 0 on, each unpacked when it is asked for."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        segments = self._segments = tuple(segments)
        starts = list(itertools.accumulate(map(len, segments), initial=0))
        # Neighbours are needed together: all groups of a shard, all steps of a span.
        documents = functools.lru_cache(maxsize=_SEGMENTS_UNPACKED)(lambda segment: segments[segment].documents())

        @functools.lru_cache(maxsize=_ENTRIES_UNPACKED)
        def entry(number: int) -> LogEntry:
            segment = bisect_right(starts, number) - 1
            document = documents(segment)[number - starts[segment]].as_py()
            return read_entry(document, number=number, source=f"entry {number} in its segment")

        super().__init__(range(starts[-1]), entry)

    def columns(self) -> Iterator[Columns]:
        """The columns of every entry, segment by segment."""
        return itertools.chain.from_iterable(segment.columns() for segment in self._segments)
