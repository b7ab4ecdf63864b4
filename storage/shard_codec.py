"""Shard schema v1: groups of trajectories ⇄ one Arrow IPC file, checked on the way in and on the way out.

In: `RolloutGroup`s. Out: file bytes (Arrow IPC, zstd), one row per training sequence; and back, as a table.
Facts are stored, views are derived: advantages, masks over turns and batches are never in a shard.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.log_entries import GroupSummary, to_json
from storage.records import NOT_SAMPLED, TRAINABLE_STATUSES, RolloutGroup, Sampling, Trajectory, Turn

SCHEMA_VERSION = 1


class BadShard(Exception):
    """A shard that breaks the schema's rules; the message names the shard and the rule."""


_TURN = pa.struct(
    [
        ("context_len", pa.int32()),
        ("sampled_len", pa.int32()),
        ("finish_reason", pa.string()),
        ("generate_seconds", pa.float64()),
        (
            "tool_calls",
            pa.list_(
                pa.struct(
                    [
                        ("name", pa.string()),
                        ("arguments", pa.string()),
                        ("result", pa.string()),
                        ("failed", pa.bool_()),
                        ("seconds", pa.float64()),
                    ]
                )
            ),
        ),
    ]
)
_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string()), ("is_completion", pa.bool_())])
_SAMPLING = pa.struct(
    [
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("top_k", pa.int32()),
        ("min_p", pa.float64()),
        ("max_tokens", pa.int32()),
        ("seed", pa.int64()),
        ("logprobs_mode", pa.string()),
    ]
)

SCHEMA = pa.schema(
    [
        ("group_id", pa.string()),
        ("prompt_id", pa.string()),
        ("epoch", pa.int32()),
        ("attempt", pa.int32()),
        ("sample_idx", pa.int32()),  # rank among the group's usable attempts, dense from 0
        ("sequence_idx", pa.int32()),
        ("group_expected", pa.int32()),
        ("group_usable", pa.int32()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(pa.float32())),
        ("weight_versions", pa.list_(pa.int32())),
        ("head_version", pa.int32()),
        ("tail_version", pa.int32()),
        ("prompt_len", pa.int32()),
        ("reward", pa.float32()),
        ("reward_parts", pa.map_(pa.string(), pa.float32())),
        ("accepted", pa.bool_()),
        ("reject_reason", pa.string()),
        ("status", pa.string()),
        ("turns", pa.list_(_TURN)),
        ("messages", pa.list_(_MESSAGE)),
        ("sampling", _SAMPLING),
        ("is_eval", pa.bool_()),
        ("worker_id", pa.string()),
        ("queued_at", pa.float64()),
        ("started_at", pa.float64()),
        ("finished_at", pa.float64()),
        ("multimodal_features", pa.null()),  # reserved
        ("multimodal_positions", pa.null()),  # reserved
    ]
)


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What a shard says about where it comes from; written into the file's metadata."""

    run_id: str
    shard_id: str
    producer: str
    tokenizer_sha256: str
    chat_template_sha256: str
    config_sha256: str
    code_version: str


def summarise(group: RolloutGroup) -> GroupSummary:
    """The log's view of a group."""
    rows = [_sequence_turns(t) for t in group.usable]
    versions = [v for t in group.usable for turn in t.turns for v in turn.weight_versions]
    rewards = [t.reward for t in group.usable if t.reward is not None]
    failures: dict[str, int] = {}
    for trajectory in group.trajectories:
        if not trajectory.usable:
            status = trajectory.status
            if status in TRAINABLE_STATUSES:
                status = "no_reward" if trajectory.reward is None else "no_tokens"
            failures[status] = failures.get(status, 0) + 1
    return GroupSummary(
        id=group.id,
        prompt_id=group.task.id,
        position=group.position,
        epoch=group.epoch,
        expected=group.expected,
        usable=len(group.usable),
        rows=sum(len(sequences) for sequences in rows),
        accepted=group.accepted,
        reject_reason=group.reject_reason,
        failures=failures,
        head_version=min(versions, default=NOT_SAMPLED),
        tail_version=max(versions, default=NOT_SAMPLED),
        mean_reward=float(np.mean(rewards)) if rewards else None,
    )


def encode_shard(
    groups: Sequence[RolloutGroup], *, provenance: Provenance, sampling: Sampling, is_eval: bool = False
) -> bytes:
    """Arrow IPC bytes of the usable attempts of some groups.

    Raises `BadShard` when a row breaks a rule of the schema, before anything is written.
    """
    rows = [row for group in groups for row in _rows(group, sampling, is_eval, provenance.producer)]
    token_columns = {
        name: _ragged([row[name] for row in rows], dtype, SCHEMA.field(name).type)
        for name, dtype in _TOKEN_COLUMNS.items()
    }
    columns = [
        token_columns[f.name] if f.name in token_columns else pa.array([row[f.name] for row in rows], type=f.type)
        for f in SCHEMA
    ]
    table = pa.Table.from_arrays(columns, schema=SCHEMA)
    check(table, name=provenance.shard_id)
    metadata = {
        "schema_version": str(SCHEMA_VERSION),
        **{key: str(value) for key, value in to_json(provenance).items()},
        "head_version": str(min((row["head_version"] for row in rows), default=NOT_SAMPLED)),
        "tail_version": str(max((row["tail_version"] for row in rows), default=NOT_SAMPLED)),
        "num_rows": str(len(rows)),
        "num_groups": str(len(groups)),
        "content_sha256": content_sha256(table),
    }
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(sink, table.schema.with_metadata(metadata), options=options) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def decode_shard(data: bytes, *, name: str) -> pa.Table:
    """The table in some shard bytes, its metadata on the schema.

    Columns that a newer minor writer added are kept; a missing column or a newer major schema is an error.
    Raises `BadShard` naming the shard.
    """
    try:
        table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
    except (pa.ArrowInvalid, OSError) as error:
        raise BadShard(f"shard {name}: not an Arrow IPC file, or cut off ({error})") from error
    metadata = table.schema.metadata or {}
    version = metadata.get(b"schema_version", b"?").decode()
    if version != str(SCHEMA_VERSION):
        raise BadShard(
            f"shard {name}: schema version {version}, this Millrace reads {SCHEMA_VERSION}; upgrade to read it"
        )
    missing = [field.name for field in SCHEMA if field.name not in table.column_names]
    if missing:
        raise BadShard(f"shard {name}: columns {missing} are missing")
    check(table, name=name)
    if metadata.get(b"content_sha256", b"").decode() != content_sha256(table):
        raise BadShard(f"shard {name}: the token columns differ from content_sha256 in its metadata")
    return table


def check(table: pa.Table, *, name: str) -> None:
    """Raise `BadShard` unless every rule of schema v1 holds, in whole columns rather than row by row."""

    def rule(holds: bool, sentence: str) -> None:
        if not holds:
            raise BadShard(f"shard {name}: {sentence}")

    columns = {key: table[key].combine_chunks() for key in _TOKEN_COLUMNS}
    lengths = pc.list_value_length(columns["input_ids"])
    for key, column in columns.items():
        rule(pc.list_value_length(column).equals(lengths), f"{key} and input_ids differ in length")
    mask = flat(columns["loss_mask"])
    logprobs = flat(columns["logprobs"])
    versions = flat(columns["weight_versions"])
    rule(bool(np.isfinite(logprobs).all() and (logprobs <= 0).all()), "a logprob is positive or not finite")
    rule(not logprobs[~mask].any(), "a logprob is set where nothing was sampled")
    rule(bool((versions[~mask] == NOT_SAMPLED).all()), "a weight version is set where nothing was sampled")
    rule(bool((versions[mask] >= 0).all()), "a sampled token has no weight version")
    heads, tails = table["head_version"].to_numpy(), table["tail_version"].to_numpy()
    rule(bool((heads <= tails).all()), "head_version is above tail_version")
    attempts: dict[str, set[int]] = {}
    usable: dict[str, int] = {}
    for group_id, attempt, count in zip(
        table["group_id"].to_pylist(),
        table["attempt"].to_pylist(),
        table["group_usable"].to_pylist(),
        strict=True,
    ):
        attempts.setdefault(group_id, set()).add(attempt)
        usable[group_id] = count
    for group_id, count in usable.items():
        rule(
            len(attempts[group_id]) == count,
            f"group {group_id} has {len(attempts[group_id])} attempts, says {count}",
        )


def flat(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """All values of a list column as one numpy array, rows end to end."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    return column.flatten().to_numpy(zero_copy_only=False)


def row_offsets(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Where each row starts in `flat(column)`, with the total at the end: shape [rows + 1]."""
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def content_sha256(table: pa.Table) -> str:
    """Digest of the token columns' values and row lengths, independent of compression and chunking."""
    digest = hashlib.sha256(row_offsets(table["input_ids"]).tobytes())
    for name, dtype in _TOKEN_COLUMNS.items():
        digest.update(np.ascontiguousarray(flat(table[name]), dtype=dtype).tobytes())
    return digest.hexdigest()


_TOKEN_COLUMNS: dict[str, type] = {
    "input_ids": np.int32,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "weight_versions": np.int32,
}


def _ragged(rows: Sequence[Sequence[Any]], dtype: type, list_type: pa.DataType) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)]).astype(np.int32)
    parts: list[np.ndarray] = [np.asarray(row, dtype=dtype) for row in rows]
    values = np.concatenate(parts) if parts else np.empty(0, dtype=dtype)
    return pa.ListArray.from_arrays(offsets, pa.array(values, type=list_type.value_type), type=list_type)


def _sequence_turns(trajectory: Trajectory) -> list[list[Turn]]:
    """The attempt's turns by training sequence; a sequence in which nothing was sampled trains nothing."""
    sequences: dict[int, list[Turn]] = {}
    for turn in trajectory.turns:
        sequences.setdefault(turn.sequence_idx, []).append(turn)
    ordered = [sequences[index] for index in sorted(sequences)]
    return [turns for turns in ordered if any(turn.sampled_ids for turn in turns)]


def _rows(group: RolloutGroup, sampling: Sampling, is_eval: bool, worker_id: str) -> Iterable[dict[str, Any]]:
    for sample_idx, trajectory in enumerate(group.usable):
        for sequence_idx, turns in enumerate(_sequence_turns(trajectory)):
            sampled_versions = [version for turn in turns for version in turn.weight_versions]
            yield {
                "group_id": group.id,
                "prompt_id": group.task.id,
                "epoch": group.epoch,
                "attempt": trajectory.attempt,
                "sample_idx": sample_idx,
                "sequence_idx": sequence_idx,
                "group_expected": group.expected,
                "group_usable": len(group.usable),
                **_token_row(turns),
                "head_version": min(sampled_versions),
                "tail_version": max(sampled_versions),
                "prompt_len": len(turns[0].context_ids),
                "reward": trajectory.reward,
                "reward_parts": list(trajectory.reward_parts.items()),
                "accepted": group.accepted,
                "reject_reason": group.reject_reason,
                "status": trajectory.status,
                "turns": [
                    {
                        "context_len": len(turn.context_ids),
                        "sampled_len": len(turn.sampled_ids),
                        "finish_reason": turn.finish_reason,
                        "generate_seconds": turn.generate_seconds,
                        "tool_calls": [to_json(call) for call in turn.tool_calls],
                    }
                    for turn in turns
                ],
                # Written once per trajectory: a forked sequence refers to the first one's.
                "messages": [to_json(m) for m in trajectory.messages] if sequence_idx == 0 else [],
                "sampling": to_json(sampling),
                "is_eval": is_eval,
                "worker_id": worker_id,
                "queued_at": group.queued_at,
                "started_at": trajectory.started_at,
                "finished_at": trajectory.finished_at,
                "multimodal_features": None,
                "multimodal_positions": None,
            }


def _token_row(turns: Sequence[Turn]) -> dict[str, list[Any]]:
    input_ids: list[int] = []
    loss_mask: list[bool] = []
    logprobs: list[float] = []
    weight_versions: list[int] = []
    for turn in turns:
        num_context, num_sampled = len(turn.context_ids), len(turn.sampled_ids)
        input_ids += [*turn.context_ids, *turn.sampled_ids]
        loss_mask += [False] * num_context + [True] * num_sampled
        logprobs += [0.0] * num_context + [*turn.logprobs]
        weight_versions += [NOT_SAMPLED] * num_context + [*turn.weight_versions]
    return {
        "input_ids": input_ids,
        "loss_mask": loss_mask,
        "logprobs": logprobs,
        "weight_versions": weight_versions,
    }
