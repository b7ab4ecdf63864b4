"""The entries of a log and the records in them: sequences and mappings that unpack one entry when it is asked for; and
an entry ⇄ its JSON document, a record ⇄ its plain JSON value."""

from __future__ import annotations

import itertools
import json
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, MutableSet, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, overload

import msgspec

from settings.redaction import read_json
from storage.log.entries import ENTRY_KINDS, Entry, LogEntry

K = TypeVar("K")
V = TypeVar("V")
Record = TypeVar("Record")


class RecordList(Sequence[V]):
    """Records in order; `read` gets the number of a record's entry."""

    def __init__(self, numbers: list[int] | range, read: Callable[[int], V]) -> None:
        """`read` must not lead back to the list: what is in a circle stays until the garbage collector comes by."""
        self.numbers: Any = numbers
        self._read = read

    @overload
    def __getitem__(self, index: int) -> V: ...
    @overload
    def __getitem__(self, index: slice) -> list[V]: ...
    def __getitem__(self, index: int | slice) -> V | list[V]:
        if isinstance(index, slice):
            return [self._read(number) for number in self.numbers[index]]
        return self._read(self.numbers[index])

    def __len__(self) -> int:
        return len(self.numbers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RecordList | list) and list(self) == list(other)


class RecordMap(UserDict[K, V]):
    """Records by key; `read` gets a key and its place, such as the number of the record's entry."""

    data: dict[K, Any]
    """Key → place."""

    def __init__(self, places: dict[K, Any], read: Callable[[K, Any], V]) -> None:
        self.data = places
        self._read = read

    def __getitem__(self, key: K) -> V:
        return self._read(key, self.data[key])


class Positions(MutableSet[int]):
    """A set of numbers from 0 on. Those that follow one another from 0 take no room."""

    def __init__(self) -> None:
        self._below = 0
        self._others: set[int] = set()

    def __contains__(self, number: object) -> bool:
        return number in self._others or (isinstance(number, int) and 0 <= number < self._below)

    def __iter__(self) -> Iterator[int]:
        return itertools.chain(range(self._below), sorted(self._others))

    def __len__(self) -> int:
        return self._below + len(self._others)

    @property
    def first_gap(self) -> int:
        """The smallest number from 0 on that is not in the set."""
        return self._below

    def add(self, value: int) -> None:
        if value not in self:
            self._others.add(value)
        while self._below in self._others:
            self._others.remove(self._below)
            self._below += 1

    def discard(self, value: int) -> None:
        if 0 <= value < self._below:
            self._others.update(range(value + 1, self._below))
            self._below = value
        self._others.discard(value)

    @classmethod
    def _from_iterable(cls, it: Iterable[Any]) -> set[Any]:
        return set(it)


class History(RecordList[LogEntry]):
    """Every entry of a log: the first ones are read from segments, the others are held."""

    def __init__(self, archived: Sequence[LogEntry] = ()) -> None:
        parts = _Parts(archived)
        super().__init__(range(len(archived)), parts.read)  # a list would take 36 bytes per entry
        self._parts = parts

    @property
    def num_unpacked(self) -> int:
        """Entries that are held as records."""
        return len(self._parts.held[1])

    def append(self, entry: LogEntry) -> None:
        """Add the next entry."""
        self._parts.held[1].append(entry)
        self.numbers = range(len(self.numbers) + 1)

    def pack(self, archived: Sequence[LogEntry]) -> None:
        """Read the first entries from `archived`, which holds them too. Another thread may read meanwhile."""
        before, added = self._parts.held
        self._parts.held = archived, added[len(archived) - len(before) :]


class _Parts:
    """Entries that are packed, and the records of those behind them."""

    def __init__(self, archived: Sequence[LogEntry]) -> None:
        self.held: tuple[Sequence[LogEntry], list[LogEntry]] = (archived, [])

    def read(self, number: int) -> LogEntry:
        archived, added = self.held
        return archived[number] if number < len(archived) else added[number - len(archived)]


class _Line(msgspec.Struct):
    """An entry's document, its body still JSON."""

    number: int
    kind: str
    written_at: float
    body: msgspec.Raw


_LAST_YEAR = 2.0e11
"""Unix seconds, of the year 8307: what is later cannot be shown."""
_KINDS = {record: kind for kind, record in ENTRY_KINDS.items()}
_LINE = msgspec.json.Decoder(_Line)
_BODIES: dict[str, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(record) for kind, record in ENTRY_KINDS.items()
}


def encode_entry(body: Entry, *, number: int, written_at: float) -> bytes:
    """An entry's document, with the bytes that Python's `json` writes: every version writes the same."""
    values = _without_later(body, to_json(body))
    document = {"number": number, "kind": _KINDS[type(body)], "written_at": written_at, "body": values}
    return json.dumps(document, separators=(",", ":")).encode()


def decode_entry(document: bytes, *, number: int) -> LogEntry:
    """An entry from its document. Raises `ValueError`, `KeyError` or `TypeError` if it cannot be read."""
    try:
        line = _LINE.decode(document)
        recorded, kind, written_at, body = line.number, line.kind, line.written_at, _BODIES[line.kind].decode(line.body)
    except (msgspec.DecodeError, RecursionError):  # damaged, or with NaN, infinity or half a surrogate pair
        values = read_json(document)
        recorded, kind, written_at = values["number"], values["kind"], values["written_at"]
        body = from_json(ENTRY_KINDS[kind], values["body"])
    if recorded != number:
        raise ValueError(f"it is entry {recorded!r}")
    if not (isinstance(written_at, int | float) and abs(written_at) < _LAST_YEAR):
        raise ValueError(f"written_at = {written_at!r} is no time")
    return LogEntry(number=number, kind=kind, written_at=written_at, body=body)


def to_json(record: Any) -> Any:
    """Plain JSON value of a record; dataclasses become dictionaries, in field order."""
    return msgspec.to_builtins(record, enc_hook=_plain)


def from_json(kind: type[Record], value: Any) -> Record:
    """A record from its JSON value. Unknown keys are ignored: a newer writer. Missing ones raise `ValueError`."""
    return msgspec.convert(value, kind, str_keys=True)


def _without_later(record: Any, values: dict[str, Any]) -> dict[str, Any]:
    """A record's JSON value without what is `storage.log.entries.LATER` and empty, in its own records too."""
    for each in fields(record):
        if is_dataclass(own := getattr(record, each.name)):
            _without_later(own, values[each.name])
        elif each.metadata.get("later") and not own and type(own) is not float:  # a temperature of 0 is not empty
            values.pop(each.name, None)
    return values


def _plain(value: Any) -> float:
    """A NumPy float as Python's."""
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"{value!r} has no place in JSON")
