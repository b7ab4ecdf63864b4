"""How far apart engine and trainer are, and checks for NaN and infinity: both before the optimizer is touched.

In: per-token log-probabilities, pack by pack, as tensors that stay on their device. Out: metrics, or an exception that
names the shards or the rows. Every rank gets the same result, so all of them stop or none.

    forward, backward ─▶ FiniteCheck ─▶ NonFinite (rows)  ─▶ the run stops
                     └─▶ GapMeter ────▶ GapTooLarge (shards) ─▶ quarantine, their prompts run again
                              └─▶ clip, AdamW
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from settings.errors import UserError, counted
from settings.places.hints import command
from storage.log.promotion import GAP
from trainers.refusals import RefusedShards

if TYPE_CHECKING:
    import torch

Reduce = Callable[[np.ndarray], np.ndarray]
"""The element-wise sum over ranks of a float64 array, the same on every rank; the identity if there is one rank."""

_BINS_PER_DECADE = 40
_FIRST, _LAST = -9 * _BINS_PER_DECADE, 3 * _BINS_PER_DECADE
_EDGES = 10.0 ** (np.arange(_FIRST, _LAST + 1) / _BINS_PER_DECADE)
"""From 1e-9 to 1e3 nats. A quantile read from bins of this width is at most 6 % too large, on any number of ranks."""
_ROWS_NAMED = 8
MOST_UNLIKELY = 30.0
"""Nats. An engine that has sampled a token gave it a probability: one that is smaller than the trainer's by a factor of
e^30 = 10^13 it cannot have drawn, whatever the mean over the shard is; of an earlier policy's token by e^60."""


class GapTooLarge(RefusedShards):
    """Engine and trainer give the same tokens too different probabilities under one policy. Nothing was trained."""

    def __init__(self, gaps: dict[str, float], max_gap: float, unlikely: Mapping[str, int] | None = None) -> None:
        """`gaps` is the mean |difference| in nats per token of each refused shard; `unlikely` counts the tokens of some
        of them that their engine cannot have sampled with what it says."""
        self.gaps, self.max_gap, self.unlikely = gaps, max_gap, dict(unlikely or {})
        super().__init__({shard_id: self._reason(shard_id) for shard_id in gaps})

    def _reason(self, shard_id: str) -> str:
        gap = f"{GAP} {self.gaps[shard_id]:.3g} nats per token, above train.max_gap = {self.max_gap:g}"
        if count := self.unlikely.get(shard_id):
            gap = (
                f"{GAP} more than {MOST_UNLIKELY:g} nats at {counted(count, 'token')}, {self.gaps[shard_id]:.3g} on "
                "average, and no engine samples a token that it finds so unlikely"
            )
        return (
            f"{gap}: the engine that sampled it held other weights than its policy version says, or computes the model "
            "differently, or a step since then has moved the policy that far"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return GapTooLarge, (self.gaps, self.max_gap, self.unlikely)


class NonFinite(UserError):
    """A loss, log-probability, advantage or gradient is NaN or infinite. The optimizer has not seen it."""

    may_pass = False

    def __init__(self, what: str, rows: Sequence[str], num_updates: int = 0) -> None:
        """`num_updates` optimizer updates of this step came before; 0: the weights are still the step's base policy."""
        named = ", ".join(rows[:_ROWS_NAMED]) + (f" and {len(rows) - _ROWS_NAMED} more" if rows[_ROWS_NAMED:] else "")
        before = f" for it, nor are the {num_updates} updates before it in this step committed" if num_updates else ""
        super().__init__(
            f"{what} is NaN or infinite at {named or 'no row in particular'}; the optimizer was not touched{before}. "
            f"Look at these attempts with `{command('traj', 'show', 'RUN', 'ID')}`; if their tokens and rewards are "
            'sane, lower learning_rate or set train.dtype = "float32", and start the run again'
        )
        self.what = what
        self.rows = list(rows)
        self.num_updates = num_updates

    def __reduce__(self) -> tuple[Any, ...]:
        return NonFinite, (self.what, self.rows, self.num_updates)


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Δ = log π_trainer − log π_engine of the same token under the same policy, over the tokens counted."""

    num_tokens: int  # tokens compared under the very policy that sampled them; others differ for a good reason
    mean: float  # of |Δ| over these tokens, in nats
    p99: float  # 99 % of |Δ| are no larger; the upper edge of its bin
    k3: float  # mean of ρ − 1 − ln ρ with ρ = exp Δ, an estimate of KL(engine ‖ trainer) that is never negative
    mean_S: np.ndarray  # of each shard: the mean of |Δ| times the weights of `gap_weights`, NaN without a token
    tokens_S: np.ndarray  # how many tokens of each shard were looked at
    unlikely_S: np.ndarray  # how many tokens of each shard the engine finds too unlikely to have sampled them

    def metrics(self) -> dict[str, float]:
        """Empty if there was nothing to compare."""
        if not self.num_tokens:
            return {}
        gap = {"engine_gap": self.mean, "engine_gap_p99": self.p99, "engine_gap_k3": self.k3}
        return {**gap, "engine_gap_tokens": float(self.num_tokens)}

    def check(self, shard_ids: Sequence[str], *, max_gap: float) -> None:
        """Raise `GapTooLarge` naming the shards whose mean is above `max_gap`, or with a single token that cannot be;
        `NonFinite` for NaN and infinity: the engine's numbers are finite (`trainers.refusals`), so the trainer's own
        weights are ruined. With an infinite `max_gap` nothing is too large."""
        looked_S = self.tokens_S > 0
        if len(ruined := np.flatnonzero(looked_S & ~np.isfinite(self.mean_S))):
            raise NonFinite("a log-probability by the trainer", [f"shard {shard_ids[shard]}" for shard in ruined])
        is_unlikely_S = (self.unlikely_S > 0) & np.isfinite(max_gap)
        wrong = np.flatnonzero(is_unlikely_S | (looked_S & (self.mean_S > max_gap)))
        if len(wrong):
            gaps = {shard_ids[shard]: float(np.nan_to_num(self.mean_S[shard])) for shard in wrong}
            unlikely = {shard_ids[shard]: int(self.unlikely_S[shard]) for shard in wrong if is_unlikely_S[shard]}
            raise GapTooLarge(gaps, max_gap, unlikely)


def gap_weights(
    versions_T: np.ndarray, mask_T: np.ndarray, shards_T: np.ndarray, *, base_version: int, kept_version: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """What of a token's |Δ| counts against `max_gap`; two float32 [T], 0 where nothing was sampled: under the policy
    being trained, and under the earlier one whose weights are kept.

    All of it, where that policy has sampled the token; the earlier one is asked about shards without a token of the
    policy being trained. Shards with neither count 1 / (1 + n) under it, where the policy of n versions before has
    sampled: what n steps change is no gap, but an engine with other weights shows.
    """
    fresh_T = mask_T & (versions_T == base_version)
    has_fresh_S = np.bincount(shards_T, weights=fresh_T) > 0
    kept_T = mask_T & (versions_T == kept_version) & ~has_fresh_S[shards_T]
    has_kept_S = np.bincount(shards_T, weights=kept_T) > 0
    behind_T = np.maximum(0, base_version - versions_T)
    own_T = np.where((has_fresh_S | has_kept_S)[shards_T], fresh_T, mask_T / (1 + behind_T))
    return own_T.astype(np.float32), kept_T.astype(np.float32)


class GapMeter:
    """Compares the trainer's log-probabilities, before any update of the step, with the engine's, pack by pack. Tensors
    stay on the device until the end, when they are fetched all at once."""

    def __init__(self) -> None:
        self._packs: list[list[torch.Tensor]] = []

    def add(
        self, logprobs_T: torch.Tensor, sampled_T: torch.Tensor, weights_T: torch.Tensor, shards_T: torch.Tensor
    ) -> None:
        """One pack: log-probabilities of trainer and engine, the weights of `gap_weights`, and each token's shard."""
        self._packs.append([values.detach() for values in (logprobs_T, sampled_T, weights_T, shards_T)])

    def join(self, other: GapMeter) -> None:
        """Take in what another has compared."""
        self._packs += other._packs

    def result(self, sum_over_ranks: Reduce, *, num_shards: int) -> Gap:
        """Over all packs and ranks, in one collective. k3: http://joschu.net/blog/kl-approx.html"""
        columns = ([values.cpu().numpy() for values in column] for column in zip(*self._packs, strict=True))
        logprobs_T, sampled_T, weights_T, shards_T = map(np.concatenate, columns) if self._packs else [np.zeros(0)] * 4
        looked_T = weights_T > 0
        delta_T = logprobs_T.astype(np.float64) - sampled_T  # never above 0 where nothing was sampled
        unlikely_T = delta_T * np.maximum(weights_T, 0.5) > MOST_UNLIKELY
        delta_N = delta_T[looked_T]
        weights_N, shards_N = weights_T[looked_T], shards_T[looked_T].astype(np.int64)
        size_N, fresh_N = np.abs(delta_N), weights_N == 1
        with np.errstate(over="ignore"):
            k3_N = np.expm1(delta_N[fresh_N]) - delta_N[fresh_N]
        parts = [
            np.bincount(_bins(size_N[fresh_N]), minlength=len(_EDGES) + 1).astype(np.float64),
            np.bincount(shards_N, minlength=num_shards).astype(np.float64),
            np.bincount(shards_N, weights=size_N * weights_N, minlength=num_shards),
            np.bincount(shards_T[unlikely_T].astype(np.int64), minlength=num_shards).astype(np.float64),
            np.array([fresh_N.sum(), size_N[fresh_N].sum(), k3_N.sum()]),
        ]
        ends = np.cumsum([len(part) for part in parts])[:-1]
        summed = np.split(sum_over_ranks(np.concatenate(parts)), ends)
        histogram, tokens_S, size_S, unlikely_S, (num_fresh, size, k3) = summed
        num_tokens, reached = int(num_fresh), np.cumsum(histogram)
        # The upper edge of the bin in which the values, counted from the smallest, reach 99 % of all.
        p99 = np.append(_EDGES, np.inf)[np.searchsorted(reached, 0.99 * reached[-1])] if reached[-1] else 0.0
        return Gap(
            num_tokens=num_tokens,
            mean=float(size / max(1, num_tokens)),
            p99=float(p99),
            k3=float(k3 / max(1, num_tokens)),
            mean_S=np.divide(size_S, tokens_S, out=np.full(num_shards, np.nan), where=tokens_S > 0),
            tokens_S=tokens_S,
            unlikely_S=unlikely_S,
        )


def rows_to_probe(
    shards_B: np.ndarray, counted_B: np.ndarray, measured_B: np.ndarray, *, per_shard: int = 1
) -> np.ndarray:
    """The first rows of each shard that has no measured one. `counted_B` is true for rows with a token that counts,
    `measured_B` for those that are measured anyway."""
    seen = np.unique(shards_B[measured_B & counted_B])
    waiting = np.flatnonzero(counted_B & ~np.isin(shards_B, seen))
    order = np.argsort(shards_B[waiting], kind="stable")
    shards = shards_B[waiting][order]
    place = np.arange(len(shards)) - np.searchsorted(shards, shards)  # of each among its shard's rows
    return np.sort(waiting[order[place < per_shard]])


class FiniteCheck:
    """NaN and infinity checks by row. Costs no wait for the device until it is asked."""

    def __init__(self) -> None:
        self._packs: list[tuple[np.ndarray, torch.Tensor, torch.Tensor]] = []

    def add(
        self, tokens: np.ndarray, *, loss: torch.Tensor, mask_T: torch.Tensor | None = None, **values_T: torch.Tensor
    ) -> None:
        """One pack: where its tokens stand in the samples, its share of the loss, and values of shape [T], of which
        those count where `mask_T` is not 0."""
        finite_T = functools.reduce(operator.and_, (values.detach().isfinite() for values in values_T.values()))
        if mask_T is not None:
            finite_T = finite_T | (mask_T == 0)
        self._packs.append((tokens, finite_T, loss.detach().isfinite() & finite_T.all()))

    def bad_rows(self, offsets: np.ndarray, *, sum_over_ranks: Reduce) -> np.ndarray:
        """Numbers of the rows with such a token, on any rank; `offsets` says where each row starts, shape [B + 1]. If
        only a pack's loss is NaN or infinite, every row of the pack is named."""
        bad_B = np.zeros(len(offsets) - 1)
        for tokens, finite_T, is_fine in self._packs:
            if not is_fine:
                bad_T = ~finite_T.cpu().numpy()
                rows = np.searchsorted(offsets, tokens[bad_T] if bad_T.any() else tokens, side="right") - 1
                bad_B[rows] = 1
        return np.flatnonzero(sum_over_ranks(bad_B))


def _bins(size_N: np.ndarray) -> np.ndarray:
    """The bin each size is in: the first whose upper edge is not below it; the open last one for NaN and infinity. By
    logarithm, which is ten times as fast as looking through the edges."""
    with np.errstate(divide="ignore"):
        number_N = np.ceil(np.log10(size_N, dtype=np.float32) * _BINS_PER_DECADE) - _FIRST
    return np.nan_to_num(number_N, nan=np.inf).clip(0, len(_EDGES)).astype(np.int64)
