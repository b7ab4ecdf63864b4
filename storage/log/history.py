"""The entries of a log, and the records in them, read when they are needed.

In: entries, those in segments still packed. Out: sequences and mappings that unpack one entry at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TypeVar, overload

from storage.log.entries import LogEntry

K = TypeVar("K")
V = TypeVar("V")


class RecordList(Sequence[V]):
    """Records in order; `read` gets the number of a record's entry."""

    def __init__(self, numbers: Sequence[int], read: Callable[[int], V]) -> None:
        self._numbers = numbers
        self._read = read

    @overload
    def __getitem__(self, index: int) -> V: ...
    @overload
    def __getitem__(self, index: slice) -> list[V]: ...
    def __getitem__(self, index: int | slice) -> V | list[V]:
        if isinstance(index, slice):
            return [self._read(number) for number in self._numbers[index]]
        return self._read(self._numbers[index])

    def __len__(self) -> int:
        return len(self._numbers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RecordList | list) and list(self) == list(other)


class RecordMap(Mapping[K, V]):
    """Records by key; `read` gets a key, and raises `KeyError` for an unknown one."""

    def __init__(self, keys: Collection[K], read: Callable[[K], V]) -> None:
        self._keys = keys
        self._read = read

    def __getitem__(self, key: K) -> V:
        return self._read(key)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[K]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


class History(RecordList[LogEntry]):
    """Every entry of a log: the first ones are read from segments, the others are held."""

    def __init__(self, num_archived: int = 0, read_archived: Callable[[int], LogEntry] | None = None) -> None:
        self._num_archived = num_archived
        self._read_archived = read_archived
        self._added: list[LogEntry] = []
        super().__init__(range(num_archived), self._entry)

    def append(self, entry: LogEntry) -> None:
        """Add the next entry."""
        self._added.append(entry)
        self._numbers = range(self._num_archived + len(self._added))

    def _entry(self, number: int) -> LogEntry:
        if self._read_archived is not None and number < self._num_archived:
            return self._read_archived(number)
        return self._added[number - self._num_archived]
