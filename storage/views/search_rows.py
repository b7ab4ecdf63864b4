"""The rows of the search index: one per attempt, made from its shard, and the vector of its text.

In: a shard's table; a function that embeds texts. Out: a table of one row per attempt; unit vectors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from settings.errors import InvalidInput

Embed = Callable[[list[str]], Sequence[Sequence[float]]]
EMBEDDING = "an embedding is a function from a list of texts to as many lists of floats, all equally long"

ROW = pa.schema(
    [
        ("id", pa.string()),  # <group id>/<attempt>
        ("text", pa.string()),  # messages, then tool calls, a line each
        ("group_id", pa.string()),
        ("prompt_id", pa.string()),
        ("reward", pa.float32()),
        ("reward_parts", pa.string()),  # JSON object
        ("status", pa.string()),
        ("head_version", pa.int32()),
        ("tail_version", pa.int32()),
        ("accepted", pa.bool_()),
        ("is_eval", pa.bool_()),
        ("finished_at", pa.float64()),  # Unix seconds
        ("shard_id", pa.string()),
    ]
)
_IN_SHARDS = ["attempt", "messages", "turns", *(name for name in ROW.names if name not in ("id", "text", "shard_id"))]
_EMBED_AT_ONCE = 256


def attempt_rows(shard: pa.Table, *, shard_id: str) -> pa.Table:
    """One row per attempt of a shard's table; its sequences are put together."""
    attempts: dict[str, dict[str, Any]] = {}
    texts: dict[str, list[str]] = {}
    for row in shard.select(_IN_SHARDS).to_pylist():
        attempt_id = f"{row['group_id']}/{row['attempt']}"
        attempt = attempts.setdefault(attempt_id, {**row, "id": attempt_id, "shard_id": shard_id})
        attempt["head_version"] = min(attempt["head_version"], row["head_version"])
        attempt["tail_version"] = max(attempt["tail_version"], row["tail_version"])
        lines = texts.setdefault(attempt_id, [])
        lines += [message["content"] for message in row["messages"]]
        for call in (call for turn in row["turns"] for call in turn["tool_calls"]):
            lines += [f"{call['name']} {call['arguments']}", call["result"]]
    for attempt_id, attempt in attempts.items():
        attempt["text"] = "\n".join(dict.fromkeys(texts[attempt_id]))  # a tool's result is often a message too
        attempt["reward_parts"] = json.dumps(dict(attempt["reward_parts"]))
    return pa.Table.from_pylist(list(attempts.values()), schema=ROW)


def unit_vectors(embed: Embed, texts: list[str], *, name: str) -> np.ndarray:
    """The texts' vectors, scaled to length 1 (a zero vector stays zero), float32: shape [texts, numbers].

    Errors name the embedding `name`. Raises `InvalidInput` unless it returns a vector of finite numbers for each text,
    all equally long.
    """
    parts = []
    for start in range(0, len(texts), _EMBED_AT_ONCE):
        chunk = texts[start : start + _EMBED_AT_ONCE]
        try:
            part = np.asarray(embed(chunk), dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"embedding {name}: {error}; {EMBEDDING}") from error
        if part.ndim != 2 or len(part) != len(chunk) or not part.shape[1]:
            raise InvalidInput(f"embedding {name} answers {len(chunk)} texts with shape {part.shape}; {EMBEDDING}")
        if not np.isfinite(part).all():
            raise InvalidInput(f"embedding {name} returns numbers that are not finite")
        parts.append(part)
    vectors = np.concatenate(parts)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)
