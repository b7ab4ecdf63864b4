"""Training samples: the rows of claimed groups, as flat arrays.

In: shard tables and a claim. Out: `Samples`, rows end to end with offsets, in claim order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.log_entries import ClaimedGroup
from storage.shard_codec import flat, row_offsets


@dataclass(frozen=True, kw_only=True)
class Samples:
    """B rows over T tokens in all."""

    input_ids_T: np.ndarray
    mask_T: np.ndarray
    """True where the token was sampled by the policy and is to be trained."""
    logprobs_T: np.ndarray
    """The engine's, at sampling time; 0 where nothing was sampled."""
    versions_T: np.ndarray
    """Policy version per token, −1 where nothing was sampled."""
    offsets: np.ndarray
    """Where each row starts, shape [B + 1]."""
    attempts_B: np.ndarray
    """Dense index of the attempt a row belongs to: a forked attempt has several rows and one reward."""
    groups_B: np.ndarray
    """Dense index of the group a row belongs to."""
    rewards_B: np.ndarray
    """Float32, NaN where not applicable."""

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1


def gather_samples(groups: Sequence[ClaimedGroup], tables: Mapping[str, pa.Table]) -> Samples:
    """The rows of `groups`, in that order; `tables` maps shard id to its table."""
    wanted = pa.table({"group_id": [g.group_id for g in groups], "rank": np.arange(len(groups))})
    parts = []
    for shard_id in dict.fromkeys(group.shard_id for group in groups):
        ids = pa.array([group.group_id for group in groups if group.shard_id == shard_id])
        table = tables[shard_id]
        parts.append(table.filter(pc.is_in(table["group_id"], value_set=ids)).select(_COLUMNS))
    table = pa.concat_tables(parts).combine_chunks()
    rank_B = pc.index_in(table["group_id"], value_set=wanted["group_id"].combine_chunks()).to_numpy()
    order = np.lexsort((table["sequence_idx"].to_numpy(), table["attempt"].to_numpy(), rank_B))
    table, groups_B = table.take(pa.array(order)), rank_B[order]
    keys = np.stack([groups_B, table["attempt"].to_numpy()], axis=1)
    _, attempts_B = np.unique(keys, axis=0, return_inverse=True)
    return Samples(
        input_ids_T=flat(table["input_ids"]).astype(np.int64),
        mask_T=flat(table["loss_mask"]),
        logprobs_T=flat(table["logprobs"]),
        versions_T=flat(table["weight_versions"]),
        offsets=row_offsets(table["input_ids"].combine_chunks()),
        attempts_B=attempts_B.reshape(-1),
        groups_B=groups_B,
        rewards_B=table["reward"].to_numpy(zero_copy_only=False).astype(np.float32),
    )


_COLUMNS = [
    "group_id",
    "attempt",
    "sequence_idx",
    "input_ids",
    "loss_mask",
    "logprobs",
    "weight_versions",
    "reward",
]
