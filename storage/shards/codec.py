"""Groups of trajectories ⇄ a table of shard schema v1, one row per training sequence.

A shard stores facts only: advantages, masks over turns and batches are derived.
docs/shard_format.md describes the format for other languages.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from settings.redaction import well_formed_data
from storage.log.entries import GroupSummary
from storage.log.history import to_json
from storage.records import NOT_SAMPLED, TRAINABLE_STATUSES, RolloutGroup, Routes, Sampling, Trajectory, Turn
from storage.shards.schema import (
    ADAPTERS,
    ANSWERS,
    CALL,
    CHECKED,
    LARGEST,
    MESSAGE,
    REQUEST,
    REQUESTS,
    ROUTES,
    SAMPLING,
    SCHEMA,
    SCHEMA_VERSION,
    TURN,
    BadShard,
    check,
    check_schema,
    content_sha256,
    routes_type,
)

COMPRESSION = "lz4"
"""Compression of the buffers in the file; measured in docs/shard_format.md. A reader accepts any."""
_FLUSH_EARLIER = "flush shards earlier: lower `shard_bytes` in the run file's [rollout]"


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a shard comes from; written into the file's metadata."""

    run_id: str
    shard_id: str
    producer: str
    tokenizer_sha256: str
    chat_template_sha256: str
    config_sha256: str
    code_version: str


def summarise(group: RolloutGroup) -> GroupSummary:
    """What the log stores of a group."""
    usable = group.usable
    versions: set[int] = set().union(*(turn.weight_versions for t in usable for turn in t.turns))
    rewards = [t.reward for t in usable if t.reward is not None]
    failures: Counter[str] = Counter()
    for trajectory in group.trajectories:
        if not trajectory.usable:
            status = trajectory.status
            if status in TRAINABLE_STATUSES and not trajectory.excluded:
                status = "no_reward" if trajectory.reward is None else "no_tokens"
            failures[status] += 1
    return GroupSummary(
        id=group.id,
        prompt_id=group.task.id,
        position=group.position,
        epoch=group.epoch,
        expected=group.expected,
        usable=len(usable),
        rows=sum(len({turn.sequence_idx for turn in t.turns if turn.sampled_ids}) for t in usable),
        accepted=group.accepted,
        reject_reason=group.reject_reason,
        failures=dict(failures),
        head_version=min(versions, default=NOT_SAMPLED),
        tail_version=max(versions, default=NOT_SAMPLED),
        mean_reward=float(np.mean(rewards)) if rewards else None,
        retried=group.will_retry,
        out_of_room=sum(trajectory.out_of_room for trajectory in group.trajectories),
    )


def shard_table(
    groups: Sequence[RolloutGroup], *, provenance: Provenance, sampling: Sampling, is_eval: bool = False
) -> pa.Table:
    """The usable attempts as checked rows, with the file's metadata. Raises `BadShard` if a row breaks a rule."""
    rows = [row for group in groups for row in _rows(group)]
    try:
        tokens = _token_columns(rows)
        with ThreadPoolExecutor(max_workers=1) as beside:
            digest = beside.submit(content_sha256, pa.table(tokens))  # hashing does not hold the interpreter
            facts = _fact_columns(rows, sampling=sampling, is_eval=is_eval, worker_id=provenance.producer)
            optional: dict[pa.Field, list[Any]] = {
                ADAPTERS: [list(_adapters(row).items()) for row in rows],
                ANSWERS: _answers(rows),
                REQUESTS: _requests(rows),
            }
            routes = None if is_eval else _routes(rows)  # evaluations are never trained
    except _Unwritable as error:
        raise BadShard(f"shard {provenance.shard_id}: {error}") from error
    columns = {**tokens, **facts}
    table = pa.Table.from_arrays([columns[field.name] for field in SCHEMA], schema=SCHEMA)
    for field, values in optional.items():
        if any(values):
            table = table.append_column(field, _array(values, field))
    if routes is not None:
        table = table.append_column(ROUTES, routes)
    check(table, name=provenance.shard_id)
    heads, tails = columns["head_version"], columns["tail_version"]
    metadata = {
        "schema_version": str(SCHEMA_VERSION),
        **{key: str(value) for key, value in to_json(provenance).items()},
        "head_version": str(pc.min(heads).as_py() if rows else NOT_SAMPLED),
        "tail_version": str(pc.max(tails).as_py() if rows else NOT_SAMPLED),
        "num_rows": str(len(rows)),
        "num_groups": str(len(groups)),
        "content_sha256": digest.result(),
    }
    return table.replace_schema_metadata(metadata)


def open_shard(
    data: bytes | pa.Buffer, *, name: str, columns: Sequence[str] | None = None, beside: Collection[str] = CHECKED
) -> pa.Table:
    """The table in the bytes of a shard. Its values are not checked: call `check` before trusting them.

    With `columns` only those are decompressed, and `beside` them the ones `check` needs. Unknown columns of a newer
    writer are kept. Raises `BadShard`, or `NewerSchema` if only a newer Millrace can read it.
    """
    try:
        schema = pa.ipc.open_file(pa.py_buffer(data)).schema
        check_schema(schema, name=name)
        names = schema.names if columns is None else [n for n in schema.names if n in {*columns, *beside}]
        options = pa.ipc.IpcReadOptions(included_fields=[schema.get_field_index(column) for column in names])
        return pa.ipc.open_file(pa.py_buffer(data), options=options).read_all()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise BadShard(f"shard {name}: not an Arrow IPC file, or cut off ({error})") from error


class _Unwritable(Exception):
    """A value that a shard cannot store; `shard_table` adds the name of the shard."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One training sequence before it is split into columns."""

    group: RolloutGroup
    num_usable: int
    trajectory: Trajectory
    sample_idx: int
    sequence_idx: int
    turns: list[Turn]


def _rows(group: RolloutGroup) -> Iterator[_Row]:
    """A row per training sequence of each usable attempt, without sequences in which nothing was sampled."""
    usable = group.usable
    for sample_idx, trajectory in enumerate(usable):
        sequences: dict[int, list[Turn]] = {}
        for turn in trajectory.turns:
            sequences.setdefault(turn.sequence_idx, []).append(turn)
        ordered = [sequences[index] for index in sorted(sequences)]
        sampled = [turns for turns in ordered if any(turn.sampled_ids for turn in turns)]
        for sequence_idx, turns in enumerate(sampled):
            yield _Row(group, len(usable), trajectory, sample_idx, sequence_idx, turns)


def _adapters(row: _Row) -> dict[int, str]:
    """Policy version → digest of the adapter that sampled the row's tokens; empty without adapters."""
    served: dict[int, str] = {}
    for turn in row.turns:
        for version, digest in turn.adapters.items():
            if served.setdefault(version, digest) != digest:
                raise _Unwritable(f"group {row.group.id} was sampled by two adapters, both of policy version {version}")
    return served


def _answers(rows: Sequence[_Row]) -> list[list[str | None]]:
    """For each message of a row the part that follows its thoughts; empty for a row without thoughts."""
    answers = [[m.answer for m in row.trajectory.messages] if row.sequence_idx == 0 else [] for row in rows]
    return [each if any(answer is not None for answer in each) else [] for each in answers]


def _requests(rows: Sequence[_Row]) -> list[list[dict[str, Any]]]:
    """For each turn of a row what the agent asked for; empty for a row without stop strings and grammars."""
    has_request = [any(turn.stop or turn.stopped_by or turn.constraint for turn in row.turns) for row in rows]
    names = [field.name for field in REQUEST]
    return [
        [{name: getattr(turn, name) for name in names} for turn in row.turns] if has_any else []
        for row, has_any in zip(rows, has_request, strict=True)
    ]


def _routes(rows: Sequence[_Row]) -> pa.Array | None:
    """For each token of a row its experts, null for the last; empty for a row that was not captured whole. None if no
    turn has any."""
    parts: list[list[Routes]] = [[turn.routes for turn in row.turns if turn.routes is not None] for row in rows]
    kinds = {(each.layers, each.choices, each.id_bytes) for part in parts for each in part}
    if not kinds:
        return None
    if len(kinds) > 1:
        raise _Unwritable(f"routes of several models: layers, choices and bytes of a number are {sorted(kinds)}")
    layers, choices, id_bytes = kinds.pop()
    kind = routes_type(layers=layers, choices=choices, id_bytes=id_bytes)
    lengths = [sum(len(turn.context_ids) + len(turn.sampled_ids) for turn in row.turns) for row in rows]
    ids, counts, is_last = [], [], []
    for part, length in zip(parts, lengths, strict=True):
        if is_whole := sum(each.num_tokens for each in part) == length - 1:
            ids += [*(each.ids for each in part), bytes(layers * choices * id_bytes)]
            is_last += [False] * (length - 1) + [True]
        counts.append(length * is_whole)
    numbers = np.frombuffer(b"".join(ids), f"<u{id_bytes}")
    by_choice = pa.FixedSizeListArray.from_arrays(pa.array(numbers), type=kind.value_type.value_type)
    by_layer = pa.FixedSizeListArray.from_arrays(by_choice, type=kind.value_type, mask=pa.array(is_last, pa.bool_()))
    return _lists(counts, by_layer, kind)


def _token_columns(rows: Sequence[_Row]) -> dict[str, pa.Array]:
    """The columns with a value per token, and those derived from them. Every row has a sampled token."""
    turns = [turn for row in rows for turn in row.turns]
    context = np.array([len(turn.context_ids) for turn in turns], dtype=np.int64)
    sampled = np.array([len(turn.sampled_ids) for turn in turns], dtype=np.int64)
    for key in ("logprobs", "weight_versions"):
        if sampled.tolist() != [len(getattr(turn, key)) for turn in turns]:
            raise _Unwritable(f"{key} and input_ids differ in length")
    num_turns = np.array([len(row.turns) for row in rows], dtype=np.int64)
    first_turn = np.cumsum(num_turns) - num_turns
    lengths = np.add.reduceat(context + sampled, first_turn) if rows else num_turns
    total = int(lengths.sum())
    if total > LARGEST:
        raise _Unwritable(f"{total} tokens are more than one shard holds ({LARGEST}); {_FLUSH_EARLIER}")
    ids, logprobs = np.empty(total, np.int32), np.zeros(total, np.float32)
    versions = np.full(total, NOT_SAMPLED, np.int32)
    ends = np.cumsum(context + sampled)
    _place("input_ids", ids, [turn.context_ids for turn in turns], ends - sampled - context)
    _place("input_ids", ids, [turn.sampled_ids for turn in turns], ends - sampled)
    _place("logprobs", logprobs, [turn.logprobs for turn in turns], ends - sampled)
    _place("weight_versions", versions, [turn.weight_versions for turn in turns], ends - sampled)
    spans = np.stack([context, sampled], axis=1).ravel()
    values = {
        "input_ids": pa.array(ids),
        "loss_mask": pa.array(np.repeat(np.tile([False, True], len(turns)), spans)),
        "logprobs": pa.array(logprobs),
        "weight_versions": pa.array(versions),
    }
    starts = np.cumsum(lengths) - lengths
    # Unsigned, −1 is the largest number, so the minimum is the oldest version that sampled.
    heads = np.minimum.reduceat(versions.view(np.uint32), starts).view(np.int32) if rows else versions
    tails = np.maximum.reduceat(versions, starts) if rows else versions
    return {
        **{key: _lists(lengths, column, SCHEMA.field(key).type) for key, column in values.items()},
        "head_version": pa.array(heads),
        "tail_version": pa.array(tails),
        "prompt_len": pa.array(context[first_turn], pa.int32()),
    }


def _place(name: str, into: np.ndarray, lists: Sequence[Sequence[float]], starts: np.ndarray) -> None:
    """Copy each list of numbers to its start; `struct` is the fastest way in Python."""
    code, size = into.dtype.char, into.itemsize
    try:
        for numbers, start in zip(lists, starts.tolist(), strict=True):
            struct.pack_into(f"{len(numbers)}{code}", into.data, start * size, *numbers)
    except struct.error as error:
        raise _Unwritable(f"{name}: {error}") from error


def _fact_columns(rows: Sequence[_Row], *, sampling: Sampling, is_eval: bool, worker_id: str) -> dict[str, pa.Array]:
    """The columns with one value per row."""
    facts: dict[str, list[Any]] = {
        "group_id": [row.group.id for row in rows],
        "prompt_id": [row.group.task.id for row in rows],
        "epoch": [row.group.epoch for row in rows],
        "attempt": [row.trajectory.attempt for row in rows],
        "sample_idx": [row.sample_idx for row in rows],
        "sequence_idx": [row.sequence_idx for row in rows],
        "group_expected": [row.group.expected for row in rows],
        "group_usable": [row.num_usable for row in rows],
        "reward": [row.trajectory.reward for row in rows],
        "reward_parts": [list(row.trajectory.reward_parts.items()) for row in rows],
        "accepted": [row.group.accepted for row in rows],
        "reject_reason": [row.group.reject_reason for row in rows],
        "status": [row.trajectory.status for row in rows],
        "queued_at": [row.group.queued_at for row in rows],
        "started_at": [row.trajectory.started_at for row in rows],
        "finished_at": [row.trajectory.finished_at for row in rows],
    }
    constants = {"is_eval": is_eval, "worker_id": worker_id}
    seeds = [sampling.seed if (own := row.turns[0].seed) is None else own for row in rows]
    turns = [turn for row in rows for turn in row.turns]
    calls = [call for turn in turns for call in turn.tool_calls]
    turn_column = _structs(
        turns,
        TURN,
        context_len=_array([len(turn.context_ids) for turn in turns], TURN.field("context_len")),
        sampled_len=_array([len(turn.sampled_ids) for turn in turns], TURN.field("sampled_len")),
        tool_calls=_lists([len(turn.tool_calls) for turn in turns], _structs(calls, CALL), pa.list_(CALL)),
    )
    # Written once per trajectory, in the row of its first sequence.
    messages = [row.trajectory.messages if row.sequence_idx == 0 else [] for row in rows]
    message_column = _structs([message for row in messages for message in row], MESSAGE)
    return {
        **{key: _array(values, SCHEMA.field(key)) for key, values in facts.items()},
        **{key: pa.repeat(pa.scalar(v, SCHEMA.field(key).type), len(rows)) for key, v in constants.items()},
        "sampling": _structs([sampling] * len(rows), SAMPLING, seed=_array(seeds, SAMPLING.field("seed"))),
        "turns": _lists([len(row.turns) for row in rows], turn_column, pa.list_(TURN)),
        "messages": _lists([len(row) for row in messages], message_column, pa.list_(MESSAGE)),
        "multimodal_features": pa.nulls(len(rows)),
        "multimodal_positions": pa.nulls(len(rows)),
    }


def _array(values: Sequence[Any], field: pa.Field) -> pa.Array:
    try:
        array = pa.array(values, type=field.type)
    except UnicodeEncodeError:  # one bad text must not cost the whole shard
        return _array(well_formed_data(list(values)), field)
    except pa.ArrowException as error:
        raise _Unwritable(f"{field.name}: {error}") from error
    if isinstance(array, pa.ChunkedArray):  # its text exceeds the 32-bit offsets of one array
        raise _Unwritable(f"{field.name}: more than {LARGEST} bytes of text; {_FLUSH_EARLIER}")
    return array


def _structs(records: Sequence[Any], kind: pa.StructType, **given: pa.Array) -> pa.Array:
    """Records as a struct array; `given` are the fields that are not attributes of the records."""
    fields = [given[f.name] if f.name in given else _array([getattr(r, f.name) for r in records], f) for f in kind]
    return pa.StructArray.from_arrays(fields, fields=list(kind))


def _lists(lengths: Sequence[int] | np.ndarray, values: pa.Array, kind: pa.DataType) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), values, type=kind)
