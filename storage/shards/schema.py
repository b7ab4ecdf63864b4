"""Shard schema v1: its columns, its rules, and the digest of the tokens.

In: an Arrow table. Out: `BadShard` if it breaks the schema; columns as flat arrays.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.records import NOT_SAMPLED

SCHEMA_VERSION = 1
LARGEST = 2**31 - 1
"""Most tokens, and most bytes of text in one column, that the 32-bit offsets of a shard can address."""


class BadShard(Exception):
    """A shard breaks the schema; the message names the shard and the rule."""


class NewerSchema(BadShard, ValueError):
    """A shard of a later major version. It is intact, but this Millrace is too old to read it."""


TEXT, INT, FLOAT = pa.string(), pa.int32(), pa.float64()
CALL = pa.struct({"name": TEXT, "arguments": TEXT, "result": TEXT, "failed": pa.bool_(), "seconds": FLOAT})
_GENERATED = {"context_len": INT, "sampled_len": INT, "finish_reason": TEXT, "generate_seconds": FLOAT}
TURN = pa.struct({**_GENERATED, "tool_calls": pa.list_(CALL)})
MESSAGE = pa.struct({"role": TEXT, "content": TEXT, "is_completion": pa.bool_()})
_LIMITS = {"temperature": FLOAT, "top_p": FLOAT, "top_k": INT, "min_p": FLOAT, "max_tokens": INT}
SAMPLING = pa.struct({**_LIMITS, "seed": pa.int64(), "logprobs_mode": TEXT})

SCHEMA = pa.schema(
    [
        ("group_id", TEXT),
        ("prompt_id", TEXT),
        ("epoch", INT),
        ("attempt", INT),
        ("sample_idx", INT),  # rank among the group's usable attempts, dense from 0
        ("sequence_idx", INT),
        ("group_expected", INT),
        ("group_usable", INT),
        ("input_ids", pa.list_(INT)),
        ("loss_mask", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(pa.float32())),
        ("weight_versions", pa.list_(INT)),
        ("head_version", INT),
        ("tail_version", INT),
        ("prompt_len", INT),
        ("reward", pa.float32()),
        ("reward_parts", pa.map_(TEXT, pa.float32())),
        ("accepted", pa.bool_()),
        ("reject_reason", TEXT),
        ("status", TEXT),
        ("turns", pa.list_(TURN)),
        ("messages", pa.list_(MESSAGE)),
        ("sampling", SAMPLING),
        ("is_eval", pa.bool_()),
        ("worker_id", TEXT),
        ("queued_at", FLOAT),
        ("started_at", FLOAT),
        ("finished_at", FLOAT),
        ("multimodal_features", pa.null()),  # reserved
        ("multimodal_positions", pa.null()),  # reserved
    ]
)

ADAPTERS = pa.field("adapters", pa.map_(pa.int32(), pa.string()))
"""An additional column if adapters (LoRA) sampled: policy version → digest of the adapter in the engine."""
ANSWERS = pa.field("answers", pa.list_(pa.string()))
"""An additional column if a policy thought: for each of `messages` what rewards get, or null if that is all of it."""
REQUEST = pa.struct({"stop": pa.list_(TEXT), "stopped_by": TEXT, "constraint": TEXT})
REQUESTS = pa.field("requests", pa.list_(REQUEST))
"""An additional column if an agent asked for stop strings or a grammar: what it asked for, for each of `turns`."""
OPTIONAL = (ADAPTERS, ANSWERS, REQUESTS)
ROUTES = "routes"
"""An additional column if experts were captured; its type, `routes_type`, has the model's sizes."""


def routes_type(*, layers: int, choices: int, id_bytes: int) -> pa.DataType:
    """The type of `ROUTES`: for each of `input_ids` the experts by layer and choice, or null."""
    return pa.list_(pa.list_(pa.list_({1: pa.uint8(), 2: pa.uint16()}[id_bytes], choices), layers))


def check_schema(schema: pa.Schema, *, name: str) -> None:
    """Raise `BadShard` unless all columns of this version are there with their types; `NewerSchema` for a later one."""
    version = (schema.metadata or {}).get(b"schema_version", b"?").decode()
    if version != str(SCHEMA_VERSION):
        sentence = f"shard {name}: schema version {version}, this Millrace reads {SCHEMA_VERSION}"
        if version.isdecimal() and int(version) > SCHEMA_VERSION:
            raise NewerSchema(f"{sentence}; a newer Millrace wrote it: upgrade this one to read it")
        raise BadShard(sentence)
    missing = [field.name for field in SCHEMA if field.name not in schema.names]
    if missing:
        raise BadShard(f"shard {name}: columns {missing} are missing")
    for field in [*SCHEMA, *(field for field in OPTIONAL if field.name in schema.names)]:
        if (actual := schema.field(field.name).type) != field.type:
            raise BadShard(f"shard {name}: column {field.name} has type {actual}, schema version 1 has {field.type}")
    if ROUTES in schema.names:
        actual = schema.field(ROUTES).type
        try:
            by_layer = actual.value_type
            sizes = {"layers": by_layer.list_size, "choices": by_layer.value_type.list_size}
            is_right = actual == routes_type(**sizes, id_bytes=by_layer.value_type.value_type.bit_width // 8)
        except (AttributeError, KeyError, ValueError):
            is_right = False
        if not is_right:
            raise BadShard(
                f"shard {name}: column {ROUTES} has type {actual}, and is to have numbers by layer and choice"
            )


def check(table: pa.Table, *, name: str) -> None:
    """Raise `BadShard` unless every rule of schema v1 holds. Works on whole columns, not row by row."""

    def rule(holds: Any, sentence: str) -> None:
        if not holds:
            raise BadShard(f"shard {name}: {sentence}")

    try:
        table.validate(full=True)  # offsets are within bounds: the code below trusts them
    except pa.ArrowException as error:
        raise BadShard(f"shard {name}: {error}") from error
    for key in CHECKED:
        rule(not table[key].null_count, f"{key} has nulls")
    lengths = pc.list_value_length(table["input_ids"])
    rule((pc.sum(lengths).as_py() or 0) <= LARGEST, f"it has more than {LARGEST} tokens")
    for key in _TOKEN_COLUMNS:
        rule(pc.list_value_length(table[key]).equals(lengths), f"{key} and input_ids differ in length")
    if ROUTES in table.column_names:
        of_tokens = pc.list_value_length(table[ROUTES])
        rule(not of_tokens.null_count, f"{ROUTES} has nulls")
        is_none_or_all = pc.or_(pc.equal(of_tokens, 0), pc.equal(of_tokens, lengths))
        rule(pc.all(is_none_or_all).as_py() is not False, f"{ROUTES} and input_ids differ in length")
        by_choice = _whole(table[ROUTES]).flatten().flatten()  # of tokens that have some
        rule(not by_choice.null_count and not by_choice.flatten().null_count, f"a number in {ROUTES} is null")
    columns = {key: _whole(table[key]) for key in _TOKEN_COLUMNS}
    rule(not any(column.flatten().null_count for column in columns.values()), "a token has a null")
    mask, logprobs, versions = (flat(columns[key]) for key in ("loss_mask", "logprobs", "weight_versions"))
    # Whole columns are compared: a boolean index would take ten times as long.
    rule((logprobs <= 0).all() and logprobs.min(initial=0) > -np.inf, "a logprob is positive or not finite")
    rule(not ((logprobs != 0) > mask).any(), "a logprob is set where nothing was sampled")
    rule(not ((versions != NOT_SAMPLED) > mask).any(), "a weight version is set where nothing was sampled")
    rule(((versions >= 0) >= mask).all(), "a sampled token has no weight version")
    heads, tails = table["head_version"].to_numpy(), table["tail_version"].to_numpy()
    rule((heads <= tails).all(), "head_version is above tail_version")
    ids = _whole(table["group_id"]).dictionary_encode()
    group_B = ids.indices.to_numpy()
    attempt_B, usable_B = table["attempt"].to_numpy(), table["group_usable"].to_numpy()
    _, first_row = np.unique(group_B.astype(np.int64) * 2**32 + attempt_B, return_index=True)
    attempts = np.bincount(group_B[first_row], minlength=len(ids.dictionary))
    wrong = np.flatnonzero(attempts[group_B] != usable_B)
    if len(wrong):
        row = wrong[0]
        group_id = ids.dictionary[group_B[row]]
        rule(False, f"group {group_id} has {attempts[group_B[row]]} attempts, says {usable_B[row]}")


def flat(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """All values of a list column as one numpy array, rows end to end."""
    values = _whole(column).flatten()
    if pa.types.is_boolean(values.type):
        bits = np.frombuffer(values.buffers()[1] or b"", dtype=np.uint8)
        unpacked = np.unpackbits(bits, bitorder="little", count=values.offset + len(values))
        return unpacked[values.offset :].view(np.bool_)
    return values.to_numpy(zero_copy_only=False)


def flat_routes(table: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """The experts of all tokens of a table with `ROUTES`, rows end to end, [T, layers, choices]; and for which tokens
    they are known, bool [T]."""
    column = _whole(table[ROUTES])
    by_layer = column.flatten()
    by_choice = by_layer.values
    layers, choices = by_layer.type.list_size, by_choice.type.list_size
    ids_NC = by_choice.values.fill_null(0).to_numpy().reshape(-1, choices)[by_choice.offset :][: len(by_choice)]
    ids_NLC = ids_NC.reshape(-1, layers, choices)[by_layer.offset :][: len(by_layer)]
    is_known_N = by_layer.is_valid().to_numpy(zero_copy_only=False)
    lengths = np.diff(row_offsets(table["input_ids"]))
    is_in_T = np.repeat(pc.list_value_length(column).to_numpy(zero_copy_only=False) > 0, lengths)
    if is_in_T.all():
        return ids_NLC, is_known_N
    ids_TLC, is_known_T = np.zeros((len(is_in_T), layers, choices), ids_NLC.dtype), np.zeros(len(is_in_T), bool)
    ids_TLC[is_in_T], is_known_T[is_in_T] = ids_NLC, is_known_N
    return ids_TLC, is_known_T


def row_offsets(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Where each row starts in `flat(column)`, with the total at the end: shape [rows + 1]."""
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def content_sha256(table: pa.Table) -> str:
    """Digest of the token columns and the row lengths, independent of compression and chunking."""
    digest = hashlib.sha256(np.ascontiguousarray(row_offsets(table["input_ids"]), dtype="<i8").data)
    for name, dtype in _TOKEN_COLUMNS.items():
        digest.update(np.ascontiguousarray(flat(table[name]), dtype=dtype).data)
    return digest.hexdigest()


_TOKEN_COLUMNS = {"input_ids": "<i4", "loss_mask": "?", "logprobs": "<f4", "weight_versions": "<i4"}
CHECKED = (*_TOKEN_COLUMNS, "head_version", "tail_version", "group_id", "attempt", "group_usable")
"""Columns that `check` reads, which have no nulls."""


def _whole(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return column
