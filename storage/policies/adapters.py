"""Adapters (LoRA) of a run: which policies have one, and that tokens were sampled with it.

In: a policy folder, or a shard's table and the log's policies. Out: nothing, or the sentence that says which row was
sampled by other weights than the log names.

An engine that serves adapters can fall back to the base model without an error. So the digest of the adapter that the
engine holds stands beside every row, and is compared before the row is trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from storage.log.entries import Policy
from storage.shards.schema import ADAPTERS, flat, row_offsets
from storage.shards.shards import DamagedShard

ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""In the folder of a policy that is an adapter of the run's base model."""
ADAPTER_CONFIG = "adapter_config.json"
"""Beside it: rank, scale and adapted layers, as peft writes them."""


def has_adapter(folder: Path) -> bool:
    """True for the folder of a policy that is an adapter, false for one with whole weights."""
    return (folder / ADAPTER_WEIGHTS).exists()


def check_adapters(table: pa.Table, *, shard_id: str, policies: Mapping[int, Policy]) -> None:
    """Raise `storage.shards.shards.DamagedShard` unless every token's version was served with that version's adapter.

    For shards of a run that trains adapters. `policies` by version: the one at 0, and those that share its files
    because no step has trained anything yet, have no adapter. `table` needs `group_id`, `attempt`, `weight_versions`,
    `head_version`, `tail_version` and, where the file has it, `adapters`.
    """
    digests = {
        version: "" if policy.path == policies[0].path else policy.weights_sha256
        for version, policy in policies.items()
    }
    has_column = ADAPTERS.name in table.schema.names
    served_B = table[ADAPTERS.name].to_pylist() if has_column else [[]] * table.num_rows
    heads, tails = table["head_version"].to_pylist(), table["tail_version"].to_pylist()
    versions_T, starts = flat(table["weight_versions"]), row_offsets(table["weight_versions"])
    for row, served in enumerate(served_B):
        found = dict(served or [])
        versions = {heads[row], tails[row]}
        if len(versions) > 1:
            versions = {int(v) for v in np.unique(versions_T[starts[row] : starts[row + 1]]) if v >= 0}
        for version in sorted(versions):
            if found.get(version, "") == digests.get(version):
                continue
            expected = "is not in the log" if version not in digests else f"has {_named(digests[version])}"
            raise DamagedShard(
                shard_id,
                f"row {row} (group {table['group_id'][row]}, attempt {table['attempt'][row]}) has tokens of policy "
                f"version {version} that the engine sampled with {_named(found.get(version, ''))}; that policy "
                f"{expected}",
            )


def _named(digest: str) -> str:
    return f"adapter {digest[:12]}" if digest else "no adapter"
