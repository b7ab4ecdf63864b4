"""Adapters (LoRA) of a run: which policies have one, and proof that it sampled the tokens.

In: a policy folder, or a shard's table and the log's policies. Out: an error that names a row with other weights than
the log's.

An engine that serves adapters can fall back to the base model without an error. So every row stores the digest of the
adapter in the engine, which is compared before the row is trained.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from settings.errors import InvalidInput
from storage.log.entries import Policy
from storage.shards.schema import ADAPTERS, flat, row_offsets
from storage.shards.shards import DamagedShard

ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""The weights of a policy that is an adapter of the run's base model."""
ADAPTER_CONFIG = "adapter_config.json"
"""Its rank, scale and adapted layers, as peft writes them."""
SAVED_PREFIX = "base_model.model."
"""peft's name of the model around the model."""


def has_adapter(folder: Path) -> bool:
    """True if the policy in a folder is an adapter, False if it has whole weights."""
    return (folder / ADAPTER_WEIGHTS).exists()


def adapter_layers(file: Path) -> dict[str, tuple[Any, Any]]:
    """Layer → (A, B) of an adapter file, as tensors of torch; layers are named as in the model itself."""
    from safetensors.torch import load_file

    tensors = load_file(str(file))
    layers = {name.removeprefix(SAVED_PREFIX).rsplit(".lora_", 1)[0] for name in tensors}
    return {
        layer: (tensors[f"{SAVED_PREFIX}{layer}.lora_A.weight"], tensors[f"{SAVED_PREFIX}{layer}.lora_B.weight"])
        for layer in layers
    }


def merged_weights(base: Path, adapter: Path) -> Iterator[tuple[str, Any]]:
    """Name and value of every tensor in the base model's files, one at a time, as tensors of torch: in the place of an
    adapted W is W + (alpha / rank) · B A, in float32.

    Raises `InvalidInput` for an adapted layer whose weight the files do not have.
    """
    from safetensors import safe_open

    config = json.loads((adapter / ADAPTER_CONFIG).read_text())
    left = adapter_layers(adapter / ADAPTER_WEIGHTS)
    # What a model calls its decoder may differ from the name in the files; its layers are called alike.
    by_layer = {layer[layer.find("layers.") :]: layer for layer in left}
    for file in sorted(base.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - the file is no mapping
                weight, layer_name = weights.get_tensor(name), name.removesuffix(".weight")
                layer = layer_name if layer_name in left else by_layer.get(layer_name[layer_name.find("layers.") :], "")
                if name != layer_name and layer in left:
                    a, b = left.pop(layer)
                    weight = weight.float() + b.float() @ a.float() * (config["lora_alpha"] / config["r"])
                yield name, weight
    if left:
        raise InvalidInput(
            f"the base model's files have no weight of {min(left)} to merge the adapter with; set "
            "engine.vllm.enable_lora = true to keep both apart, or take the layer out of train.lora.target_modules"
        )


def check_adapters(table: pa.Table, *, shard_id: str, policies: Mapping[int, Policy]) -> None:
    """Raise `storage.shards.shards.DamagedShard` unless every token was sampled with the adapter of its version.

    For shards of a run that trains adapters. `policies` by version: policy 0 has no adapter, nor have those that share
    its files because no step has trained anything yet. `table` needs `group_id`, `attempt`, `weight_versions`,
    `head_version`, `tail_version` and, if the file has it, `adapters`.
    """
    digests = {
        version: "" if policy.path == policies[0].path else policy.weights_sha256
        for version, policy in policies.items()
    }
    served_B = table[ADAPTERS.name].to_pylist() if ADAPTERS.name in table.schema.names else [None] * len(table)
    heads, tails = table["head_version"].to_pylist(), table["tail_version"].to_pylist()
    versions_T, starts = flat(table["weight_versions"]), row_offsets(table["weight_versions"])
    for row, served in enumerate(served_B):
        adapters = dict(served or [])
        versions = {heads[row], tails[row]}
        if len(versions) > 1:
            versions = {int(v) for v in np.unique(versions_T[starts[row] : starts[row + 1]]) if v >= 0}
        for version in sorted(versions):
            if adapters.get(version, "") == digests.get(version):
                continue
            expected = "is not in the log" if version not in digests else f"has {_named(digests[version])}"
            raise DamagedShard(
                shard_id,
                f"row {row} (group {table['group_id'][row]}, attempt {table['attempt'][row]}) has tokens of policy "
                f"version {version} that the engine sampled with {_named(adapters.get(version, ''))}; that policy "
                f"{expected}",
            )


def _named(digest: str) -> str:
    return f"adapter {digest[:12]}" if digest else "no adapter"
