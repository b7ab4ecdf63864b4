"""Log entries a hundred at a time, and then ten thousand, so that a long run opens in a moment.

In: complete blocks of entries, with their JSON as it was written. Out: one Arrow file per block,
`log/segments/<number of its first entry>.<entries>.arrow`, and from all of them the fold.

    bytes = sha256 of the rest ‖ Arrow IPC (zstd): document | kind, key, written_at, rows, groups …
                                                      │         └─ columns the fold is made from, whole columns at once
                                                      └─ the entry's own JSON, unpacked when somebody looks at it

Segments are derived: the numbered entries stay the truth, and a segment that is missing or damaged only costs time.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Container, Iterator, MutableMapping, MutableSequence, Sequence
from typing import Any, TypeVar, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.log.entries import (
    Alias,
    Evaluation,
    Join,
    Lease,
    LogEntry,
    Pause,
    Policy,
    Quarantine,
    Registration,
    Release,
    Rescore,
    Resume,
    Retire,
    Session,
    Shard,
    Step,
    decode_entry,
)
from storage.log.run_state import OUTCOMES, LogDamaged, RunState, claimed_groups, merged
from storage.objects.tables import ipc_bytes

K = TypeVar("K")
V = TypeVar("V")

_DIGEST = hashlib.sha256().digest_size

_LAYOUT = "2"
"""Of the columns below. A segment of another layout is passed over, and its entries are read one by one."""

_SCHEMA = pa.schema(
    [
        ("document", pa.binary()),
        ("kind", pa.string()),
        ("key", pa.string()),  # what the fold looks the entry up by, per kind
        ("written_at", pa.float64()),
        ("num_rows", pa.int64()),  # of a training shard, else 0
        ("group_ids", pa.list_(pa.string())),  # of a training shard, or of a step's claim
        ("positions", pa.list_(pa.int64())),  # of a training shard's groups, or of a lease
        ("retried", pa.list_(pa.bool_())),  # of a training shard's groups
        ("outcomes", pa.list_(pa.int8())),  # of a claim's groups, as an index into OUTCOMES
    ]
)


def read_entry(document: bytes, *, number: int, source: str) -> LogEntry:
    """One entry from its JSON. Raises `LogDamaged` naming `source` where it cannot be read."""
    try:
        return decode_entry(document, number=number)
    except (ValueError, KeyError, TypeError) as error:
        raise LogDamaged(f"{source} cannot be read: {error!r}; put it back from a copy of the store") from error


def encode_segment(entries: Sequence[LogEntry], documents: Sequence[bytes], *, run_id: str) -> bytes:
    """The file of one block of entries."""
    rows = [
        {"document": document, "kind": entry.kind, "written_at": entry.written_at, **_index(entry)}
        for entry, document in zip(entries, documents, strict=True)
    ]
    return _pack(pa.Table.from_pylist(rows, schema=_SCHEMA), run_id=run_id, first=entries[0].number)


def merge_segments(segments: Sequence[Segment], *, run_id: str, first: int) -> bytes:
    """The file of a longer block, from those of the shorter ones it consists of."""
    return _pack(pa.concat_tables([segment.table() for segment in segments]), run_id=run_id, first=first)


def _pack(table: pa.Table, *, run_id: str, first: int) -> bytes:
    metadata = {"run_id": run_id, "first": str(first), "layout": _LAYOUT}
    table = table.combine_chunks().replace_schema_metadata(metadata)
    data = ipc_bytes(table, compression="zstd")
    return hashlib.sha256(data).digest() + data


def _index(entry: LogEntry) -> dict[str, Any]:
    match entry.body:
        case Shard(is_eval=False) as shard:
            return {
                "key": shard.id,
                "num_rows": shard.num_rows,
                "group_ids": [group.id for group in shard.groups],
                "positions": [group.position for group in shard.groups],
                "retried": [group.retried for group in shard.groups],
            }
        case Lease() as lease:
            return {"key": lease.holder, "positions": lease.positions}
        case Join(holder=key) | Release(holder=key):
            return {"key": key}
        case Step() as step:
            claimed = claimed_groups(step)
            return {
                "key": str(step.policy.version),
                "group_ids": [group.group_id for _, group in claimed],
                "outcomes": [OUTCOMES.index(outcome) for outcome, _ in claimed],
            }
        case Session(id=key) | Shard(id=key) | Alias(name=key) | Rescore(name=key):
            return {"key": key}
        case Evaluation(shard_id=key) | Quarantine(shard_id=key):
            return {"key": key}
        case Policy(version=version) | Registration(version=version):
            return {"key": str(version)}
        case Retire() | Pause() | Resume():
            return {"key": ""}


class Segment:
    """One block, its documents still packed. Raises `LogDamaged` for bytes that are not what was written."""

    def __init__(self, data: bytes, *, run_id: str, first: int, size: int) -> None:
        if hashlib.sha256(data[_DIGEST:]).digest() != data[:_DIGEST]:
            raise LogDamaged(f"segment {first} of run {run_id!r} is damaged")
        self._buffer = pa.py_buffer(data).slice(_DIGEST)
        expected = {b"run_id": run_id.encode(), b"first": str(first).encode(), b"layout": _LAYOUT.encode()}
        if pa.ipc.open_file(self._buffer).schema.metadata != expected:
            raise LogDamaged(f"segment {first} of run {run_id!r} is not that segment, or of another layout")
        columns = list(range(1, len(_SCHEMA)))
        with pa.ipc.open_file(self._buffer, options=pa.ipc.IpcReadOptions(included_fields=columns)) as file:
            self.index: pa.Table = file.read_all()
        if self.index.num_rows != size:
            raise LogDamaged(f"segment {first} of run {run_id!r} has {self.index.num_rows} of {size} entries")

    def table(self) -> pa.Table:
        """Everything in it."""
        with pa.ipc.open_file(self._buffer) as file:
            return file.read_all()

    @functools.cached_property
    def documents(self) -> pa.BinaryArray:
        """The entries' JSON."""
        with pa.ipc.open_file(self._buffer, options=pa.ipc.IpcReadOptions(included_fields=[0])) as file:
            return file.read_all()["document"].combine_chunks()


class Archive:
    """Consecutive segments from entry 0 on."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments
        self._starts = np.cumsum([0, *(segment.index.num_rows for segment in segments)])
        self._index = pa.concat_tables([segment.index for segment in segments]).combine_chunks()
        # Neighbours are asked for together: all groups of a shard, all steps of a span.
        self.entry = functools.lru_cache(maxsize=1000)(self._entry)

    def __len__(self) -> int:
        return int(self._index.num_rows)

    def _entry(self, number: int) -> LogEntry:
        segment = int(np.searchsorted(self._starts, number, side="right")) - 1
        document = self._segments[segment].documents[number - int(self._starts[segment])].as_py()
        return read_entry(document, number=number, source=f"entry {number} in its segment")

    def fold(self) -> RunState:
        """The state after the last archived entry; equal to applying the entries one by one."""
        kinds = np.array(self._index["kind"].to_pylist())
        keys = np.array(self._index["key"].to_pylist(), dtype=object)
        times = _numbers(self._index["written_at"])

        def rows(*wanted: str) -> np.ndarray:
            return np.flatnonzero(np.isin(kinds, wanted))

        def newest(*wanted: str) -> dict[str, int]:
            return dict(zip(keys[found := rows(*wanted)].tolist(), found.tolist(), strict=True))

        def bodies(kind: str) -> list[Any]:
            return [self.entry(row).body for row in rows(kind).tolist()]

        shards = newest("shard")
        steps, sessions, evaluations = rows("step"), rows("session"), rows("eval")
        versions = {int(key): row for key, row in newest("policy", "step").items()}
        shard_rows, group_ids = self._flat("group_ids", rows("shard"))
        positions = self._flat("positions", rows("shard"))[1].tolist()
        retried = self._flat("retried", rows("shard"))[1]
        claim_rows, claimed = self._flat("group_ids", steps)
        outcomes = self._flat("outcomes", steps)[1].tolist()
        step_of = np.searchsorted(steps, claim_rows) + 1
        first_of = np.searchsorted(shard_rows, shard_rows)  # where the shard's groups begin, per group
        state = RunState(
            entries=len(self),
            started_at=float(times[0]),
            last_at=float(times[-1]),
            sessions=bodies("session"),
            shards=LazyMap(shards, lambda row: self.entry(row).body),
            num_trajectories=pc.sum(self._index["num_rows"]).as_py() or 0,
            groups=LazyMap(
                dict(zip(group_ids, range(len(group_ids)), strict=True)),
                lambda at: self.entry(int(shard_rows[at])).body.groups[at - int(first_of[at])],  # type: ignore[union-attr]
            ),
            shard_of=dict(zip(group_ids, keys[shard_rows].tolist(), strict=True)),
            outcomes=dict(zip(claimed, [OUTCOMES[outcome] for outcome in outcomes], strict=True)),
            step_of=dict(zip(claimed, step_of.tolist(), strict=True)),
            positions={position for position, again in zip(positions, retried, strict=True) if not again},
            retries=Counter(position for position, again in zip(positions, retried, strict=True) if again),
            num_leases=len(rows("lease")),
            steps=LazyList(steps.tolist(), lambda row: self.entry(row).body),
            policies=LazyMap(versions, lambda row: _policy(self.entry(row))),
            newest_version=max(versions, default=-1),
            evaluations=LazyList(evaluations.tolist(), lambda row: self.entry(row).body),
            evaluation_shards=set(keys[evaluations].tolist()),
            aliases=dict(LazyMap[str, Alias](newest("alias"), lambda row: self.entry(row).body)),
            registrations=LazyMap(
                {int(key): row for key, row in newest("registration").items()}, lambda row: self.entry(row).body
            ),
            quarantined={body.shard_id: body.reason for body in bodies("quarantine")},
        )
        state.pending = dict.fromkeys(group_id for group_id in group_ids if group_id not in state.outcomes)
        if len(sessions):
            state.session_started_at = float(times[sessions[-1]])
            state.earlier_seconds = float((times[sessions[1:] - 1] - times[sessions[:-1]]).sum())
        for body in bodies("rescore"):
            state.rescored[body.name] = merged(state.rescored.get(body.name), body)
        for body in bodies("retire"):
            state.retire(body)
        for row in rows("pause", "resume")[-1:].tolist():
            body = self.entry(row).body
            state.paused = body.reason if isinstance(body, Pause) else ""
        if state.quarantined:
            self._drop_lost(state, group_ids, positions, retried)
        joined: dict[str, int] = {}
        for row in rows("join", "release", "session").tolist():
            match self.entry(row).body:
                case Join() as join:
                    state.producers[join.holder], joined[join.holder] = join, row
                case Release(holder=holder):
                    state.producers.pop(holder, None)
                case _:
                    state.producers = {holder: join for holder, join in state.producers.items() if join.outside}
        since = min([int(sessions[-1]) if len(sessions) else 0, *(joined[holder] for holder in state.producers)])
        state.leased = self._leased(since, {holder for holder, join in state.producers.items() if join.outside})
        return state

    def _leased(self, since: int, outside: Container[str]) -> dict[int, str]:
        """Leases that are open after the last entry; those from before entry `since` are over, and those from before
        a session but for the producers `outside`."""
        leased: dict[int, str] = {}
        tail = self._index.slice(since).select(["kind", "key", "num_rows", "positions", "retried"])
        kinds = ["session", "join", "lease", "release", "shard"]
        tail = tail.filter(pc.is_in(tail["kind"], value_set=pa.array(kinds)))
        for row in tail.to_pylist():
            if row["kind"] == "lease":
                leased.update(dict.fromkeys(row["positions"], row["key"]))
            elif row["kind"] in ("join", "release"):
                leased = {position: holder for position, holder in leased.items() if holder != row["key"]}
            elif row["kind"] == "session":
                leased = {position: holder for position, holder in leased.items() if holder in outside}
            else:
                for position, again in zip(row["positions"] or [], row["retried"] or [], strict=True):
                    if not again:
                        leased.pop(position, None)
        return leased

    def _flat(self, column: str, rows: np.ndarray) -> tuple[np.ndarray, Any]:
        """The values of a list column in some rows, end to end, and the row each is from."""
        indices = pa.Array.from_buffers(pa.int64(), len(rows), [None, pa.py_buffer(np.ascontiguousarray(rows))])
        lists = self._index[column].combine_chunks().take(indices)
        lengths = [length or 0 for length in lists.value_lengths().to_pylist()]
        values = lists.flatten()
        is_number = pa.types.is_integer(values.type)
        return np.repeat(rows, lengths), _numbers(values) if is_number else values.to_pylist()

    @staticmethod
    def _drop_lost(state: RunState, group_ids: list[str], positions: list[int], retried: Sequence[bool]) -> None:
        """Groups of quarantined shards that no step had taken are gone, and their prompts ran again."""
        groups = list(zip(group_ids, positions, retried, strict=True))
        lost = [
            (group_id, position, again)
            for group_id, position, again in groups
            if group_id in state.pending and state.shard_of[group_id] in state.quarantined
        ]
        for group_id, _, _ in lost:
            del state.pending[group_id], state.groups[group_id], state.shard_of[group_id]
        state.retries.update(position for _, position, again in lost if not again)
        # Looked up again rather than removed: a lost position may have been committed again.
        state.positions = {position for group_id, position, again in groups if group_id in state.groups and not again}


def _numbers(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """A column of numbers without nulls. Arrow's own way into numpy imports pandas first, which takes longer than all
    of the fold."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return np.from_dlpack(array)


def _policy(entry: LogEntry) -> Policy:
    body = entry.body.policy if isinstance(entry.body, Step) else entry.body
    assert isinstance(body, Policy)
    return body


class LazyMap(MutableMapping[K, V]):
    """A dictionary whose archived values are read when they are asked for."""

    def __init__(self, archived: dict[K, int], read: Callable[[int], Any]) -> None:
        self._archived = archived
        self._read = read
        self._added: dict[K, V] = {}

    def __getitem__(self, key: K) -> V:
        if key in self._added:
            return self._added[key]
        value: V = self._read(self._archived[key])
        return value

    def __setitem__(self, key: K, value: V) -> None:
        self._archived.pop(key, None)
        self._added[key] = value

    def __delitem__(self, key: K) -> None:
        del (self._added if key in self._added else self._archived)[key]

    def __contains__(self, key: object) -> bool:
        return key in self._added or key in self._archived

    def __iter__(self) -> Iterator[K]:
        yield from self._archived
        yield from self._added

    def __len__(self) -> int:
        return len(self._archived) + len(self._added)


class LazyList(MutableSequence[V]):
    """A list whose archived values are read when they are asked for; it only grows."""

    def __init__(self, archived: Sequence[int], read: Callable[[int], Any]) -> None:
        self._archived = archived
        self._read = read
        self._added: list[V] = []

    @overload
    def __getitem__(self, index: int) -> V: ...
    @overload
    def __getitem__(self, index: slice) -> list[V]: ...
    def __getitem__(self, index: int | slice) -> V | list[V]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        if position >= len(self._archived):
            return self._added[position - len(self._archived)]
        value: V = self._read(self._archived[position])
        return value

    def __len__(self) -> int:
        return len(self._archived) + len(self._added)

    def append(self, value: V) -> None:
        self._added.append(value)

    def insert(self, index: int, value: V) -> None:
        raise TypeError("what is in a log stays where it is")

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("what is in a log stays as it is")

    def __delitem__(self, index: Any) -> None:
        raise TypeError("what is in a log stays")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LazyList | list) and list(self) == list(other)
