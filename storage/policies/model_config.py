"""What a model's `config.json` says, and what an engine makes of it: positions, types, bytes of keys and values.

In: a model folder, or the content of its file; vLLM's arguments. Out: plain numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What a `config.json` may call the number of experts in a layer."""


def model_config(model: Path) -> dict[str, Any]:
    """The `config.json` of a model folder, of its language part if it sees images too."""
    return text_part(json.loads((model / "config.json").read_text()))


def text_part(about: dict[str, Any]) -> dict[str, Any]:
    """The language part of a `config.json`."""
    return about.get("text_config") or about


def num_positions(about: Mapping[str, Any]) -> int | None:
    """Longest sequence that a model's config allows, in tokens; None if it does not say.

    With `longrope` (Phi-3 and 4) as many as the model was first trained on: for longer ones transformers takes other
    frequencies, and so does vLLM, but for all sequences of an engine that may have longer ones.
    """
    longest: int | None = about.get("max_position_embeddings") or about.get("n_positions")
    rope = about.get("rope_parameters") or about.get("rope_scaling") or {}
    if "longrope" in (rope.get("rope_type"), rope.get("type")):
        return rope.get("original_max_position_embeddings") or about.get("original_max_position_embeddings") or longest
    return longest


def stored_dtype(about: Mapping[str, Any]) -> str:
    """The type of a model's weights; empty if its config does not say."""
    return about.get("dtype") or about.get("torch_dtype") or ""


def number_bytes(arguments: Mapping[str, Any], about: Mapping[str, Any]) -> int:
    """Bytes of a weight in an engine with these arguments of vLLM."""
    dtype = arguments.get("dtype", "auto")
    return 4 if (stored_dtype(about) if dtype == "auto" else dtype) in ("float32", "float") else 2


def token_bytes(arguments: Mapping[str, Any], about: Mapping[str, Any]) -> int:
    """Bytes of the keys and values of a token, with full attention in every layer, which is the most that a model
    keeps; 0 if its config does not say."""
    heads = about.get("num_key_value_heads") or about.get("num_attention_heads") or 0
    width = about.get("head_dim") or about.get("hidden_size", 0) // (about.get("num_attention_heads") or 1)
    each = 1 if "fp8" in str(arguments.get("kv_cache_dtype", "")) else number_bytes(arguments, about)
    return 2 * (about.get("num_hidden_layers") or 0) * heads * width * each
