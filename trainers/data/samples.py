"""Training samples: the rows of claimed groups, as flat arrays.

In: shard tables and a claim. Out: `Samples`, rows end to end with offsets, in claim order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from settings.errors import InvalidInput
from storage.log.entries import ClaimedGroup
from storage.shards.schema import REQUESTS, ROUTES, flat, flat_routes, row_offsets

ARITHMETIC = 3
"""The newest way to add up the same numbers. A recorded step is computed as it was, and a run goes on as it began.

    1   all steps from before this was recorded
    2   bfloat16 on CPUs: attention's backward pass in float32 for short sequences; the proximal policy's
        log-probabilities only of groups that can move the policy, so in other packs
    3   attention without flash's kernel for GPUs: what a sequence shares with those before it asks once; a pack holds
        more of a group that shares much
"""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """B rows over T tokens in all."""

    input_ids_T: np.ndarray  # int32, as stored: widening them here would double what a batch needs
    mask_T: np.ndarray  # true where the token was sampled by the policy and is to be trained
    logprobs_T: np.ndarray  # the engine's, at sampling time; 0 where nothing was sampled
    versions_T: np.ndarray  # policy version per token, −1 where nothing was sampled
    offsets: np.ndarray  # where each row starts, shape [B + 1]
    attempts_B: np.ndarray  # dense index of a row's attempt: a forked attempt has several rows and one reward
    groups_B: np.ndarray  # dense index of the group a row belongs to
    rewards_B: np.ndarray  # float32, NaN where not applicable
    reward_parts_B: dict[str, np.ndarray] = field(default_factory=dict)  # by name, each as `rewards_B`
    group_ids: list[str] = field(default_factory=list)  # what `groups_B` counts
    attempt_numbers_B: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # in its group, for people
    shards_B: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # which of `shard_ids` a row is from
    shard_ids: list[str] = field(default_factory=list)  # what `shards_B` counts
    constrained_B: np.ndarray | None = None  # true where a grammar restricted some tokens, and so their logprobs
    routes_T: np.ndarray | None = None  # the engine's experts by layer and choice, shape [T, L, C]; if it captured any
    routed_T: np.ndarray | None = None  # true where they are known: not at a row's last token
    turn_metrics: dict[str, float] = field(default_factory=dict)  # of turns and tools, for people
    arithmetic: int = ARITHMETIC  # in which order and types its numbers are added up
    by_attempt: bool = True  # what a sequence of `train.aggregation` is: an attempt, or in older steps a row

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    def part(self, start: int, stop: int) -> Samples:
        """The groups from `start` to before `stop`, as they are gathered alone; shards keep their numbers."""
        first, end = np.searchsorted(self.groups_B, [start, stop])
        tokens = slice(self.offsets[first], self.offsets[end])
        changed: dict[str, Any] = {
            "offsets": self.offsets[first : end + 1] - self.offsets[first],
            "attempts_B": self.attempts_B[first:end] - self.attempts_B[first],
            "groups_B": self.groups_B[first:end] - start,
            "reward_parts_B": {name: part_B[first:end] for name, part_B in self.reward_parts_B.items()},
            "group_ids": self.group_ids[start:stop],
        }
        for name, values in vars(self).items():
            if name not in changed and isinstance(values, np.ndarray) and len(values):
                changed[name] = values[tokens if name.endswith("_T") else slice(first, end)]
        return dataclasses.replace(self, **changed)

    def names(self, rows: np.ndarray) -> list[str]:
        """Rows as errors name them: as `millrace traj show` takes each, and where it is."""
        if not self.group_ids:
            return [f"row {row}" for row in rows]
        places = zip(self.groups_B[rows], self.attempt_numbers_B[rows], self.shards_B[rows], strict=True)
        return [f"{self.group_ids[g]}/{attempt} (shard {self.shard_ids[shard]})" for g, attempt, shard in places]


COLUMNS = ("group_id", "attempt", "sequence_idx", "input_ids", "loss_mask", "logprobs", "weight_versions", "reward")
"""What of a shard is trained on."""


def gather_samples(groups: Sequence[ClaimedGroup], tables: Mapping[str, pa.Table]) -> Samples:
    """The rows of `groups`, in that order, by attempt and sequence; `tables` maps shard id to its table. With a column
    `reward_parts` there are reward parts, with `routes` routes.

    Values are copied once, in runs of neighbouring rows; a single run stays where it is, and is read-only.
    Raises `KeyError` for a shard that is not in `tables`, `ValueError` for a group without a row in its shard.
    """
    ranks: dict[str, list[int]] = {}
    for rank, group in enumerate(groups):
        ranks.setdefault(group.shard_id, []).append(rank)
    matches = [_rows_of([groups[rank].group_id for rank in ranks[shard]], tables[shard], shard) for shard in ranks]
    rows_S = [rows for rows, _ in matches]
    shard_B = np.repeat(np.arange(len(rows_S)), [len(rows) for rows in rows_S])
    row_B = np.concatenate(rows_S)
    rank_B = np.concatenate([np.array(ranks[s])[which_B] for s, (_, which_B) in zip(ranks, matches, strict=True)])

    def facts(name: str) -> np.ndarray:
        columns = [tables[shard][name].to_numpy(zero_copy_only=False) for shard in ranks]
        return np.concatenate([column[rows] for column, rows in zip(columns, rows_S, strict=True)])

    attempt_B = facts("attempt")
    order = np.lexsort((facts("sequence_idx"), attempt_B, rank_B))
    shard_B, row_B, rank_B, attempt_B = shard_B[order], row_B[order], rank_B[order], attempt_B[order]
    starts = np.flatnonzero(np.diff(shard_B, prepend=-1).astype(bool) | (np.diff(row_B, prepend=-2) != 1))
    stops = np.append(starts[1:], len(order))
    offsets = [row_offsets(tables[shard]["input_ids"]) for shard in ranks]
    runs = [
        (shard, slice(offsets[shard][row_B[start]], offsets[shard][row_B[stop - 1] + 1]))
        for shard, start, stop in zip(shard_B[starts].tolist(), starts.tolist(), stops.tolist(), strict=True)
    ]

    def tokens(name: str) -> np.ndarray:
        columns = [flat(tables[shard][name]) for shard in ranks]
        parts = [columns[shard][run] for shard, run in runs]
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def routes() -> tuple[np.ndarray | None, np.ndarray | None]:
        routes = {shard: flat_routes(tables[shard]) for shard in ranks if ROUTES in tables[shard].column_names}
        kinds = {(ids.shape[1:], ids.dtype) for ids, _ in routes.values()}
        if len(kinds) > 1:
            raise InvalidInput(f"shards {', '.join(routes)} have routes of models with other layers or experts")
        if not kinds:
            return None, None
        [(shape, dtype)] = kinds
        by_shard = [
            routes.get(name) or (np.zeros((ends[-1], *shape), dtype), np.zeros(ends[-1], bool))
            for name, ends in zip(ranks, offsets, strict=True)
        ]
        ids, is_known = zip(*[(by_shard[shard][0][run], by_shard[shard][1][run]) for shard, run in runs], strict=True)
        return np.concatenate(ids), np.concatenate(is_known)

    lengths = np.concatenate([np.diff(ends)[rows] for ends, rows in zip(offsets, rows_S, strict=True)])[order]
    routes_T, routed_T = routes()
    is_new_attempt = np.diff(rank_B, prepend=-1).astype(bool) | np.diff(attempt_B, prepend=-1).astype(bool)
    return Samples(
        input_ids_T=tokens("input_ids"),
        mask_T=tokens("loss_mask"),
        logprobs_T=tokens("logprobs"),
        versions_T=tokens("weight_versions"),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        attempts_B=np.cumsum(is_new_attempt) - 1,
        groups_B=rank_B,
        rewards_B=facts("reward")[order],
        reward_parts_B=_parts([tables[shard] for shard in ranks], rows_S, order),
        group_ids=[group.group_id for group in groups],
        attempt_numbers_B=attempt_B,
        shards_B=shard_B,
        shard_ids=list(ranks),
        constrained_B=np.concatenate(
            [_constrained(tables[shard])[rows] for shard, rows in zip(ranks, rows_S, strict=True)]
        )[order],
        routes_T=routes_T,
        routed_T=routed_T,
    )


def _constrained(table: pa.Table) -> np.ndarray:
    """Whether a grammar restricted a turn of each row."""
    if REQUESTS.name not in table.column_names:
        return np.zeros(len(table), bool)
    return np.array([any(asked["constraint"] for asked in row) for row in table[REQUESTS.name].to_pylist()], bool)


def _parts(tables: Sequence[pa.Table], rows: Sequence[np.ndarray], order: np.ndarray) -> dict[str, np.ndarray]:
    """The named rewards of the rows; NaN for None."""
    if "reward_parts" not in tables[0].column_names:
        return {}
    columns = [table["reward_parts"].take(pa.array(places)) for table, places in zip(tables, rows, strict=True)]
    parts = [dict(named or []) for column in columns for named in column.to_pylist()]
    names = sorted({name for named in parts for name in named})
    return {name: np.array([parts[row].get(name) for row in order], np.float32) for name in names}


def _rows_of(group_ids: Sequence[str], table: pa.Table, shard: str) -> tuple[np.ndarray, np.ndarray]:
    """Which rows belong to the groups, and to which of them each one does."""
    which = pc.index_in(table["group_id"], value_set=pa.array(group_ids, pa.string())).fill_null(-1).to_numpy()
    rows = np.flatnonzero(which >= 0)
    missing = np.setdiff1d(np.arange(len(group_ids)), which)
    if len(missing):
        raise InvalidInput(f"shard {shard} has no row of group {group_ids[missing[0]]}, which was claimed from it")
    return rows, which[rows]
