"""What one step trains on: one number per token of its samples for everything the loss needs, and its mini-batches.

In: samples, their credit, what was looked up before the first update, which tokens are in time. Out: a `StepBatch`, and
the rows of its mini-batches, which are whole groups; and of the updates that were taken, the step's metrics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from settings.train import TrainSettings
from trainers.data.samples import Samples
from trainers.data.staleness import lag_of_tokens, tokens_to_train
from trainers.health import FiniteCheck, GapMeter, gap_weights
from trainers.model.experts import ROUTER_TERMS, load_metrics
from trainers.objective.aggregation import Aggregation, aggregation_weights, top_entropy_mask
from trainers.objective.credit import Credit, Looked, metrics_of_rewards
from trainers.objective.objective import OFF_POLICY, mean_metrics, moved_by_advantages_alone


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """Arrays with one number per token of `samples`."""

    samples: Samples
    sampled_T: np.ndarray  # true where the policy sampled, in the rows that are trained at all: what denominators count
    trained_T: np.ndarray  # true where the token is trained: not stale, and with a known reward
    moving_B: np.ndarray  # true for rows of a group whose gradient may be other than 0
    values: Mapping[str, np.ndarray]  # what the loss needs beside them, by name
    base_version: int  # the policy version being trained

    def weights_T(
        self, rows: np.ndarray, aggregation: Aggregation, *, max_tokens: int, is_part: bool = False
    ) -> np.ndarray:
        """What each token of a mini-batch's rows counts, others 0; counted before anything stale is masked. Of a part
        of one, whose size is not known yet, without its division by `denominator`."""
        counts_R, num_tokens, num_sequences = self._counts(rows)
        weights_B = np.zeros(self.samples.num_rows)
        weights_B[rows] = aggregation_weights(
            counts_R,
            aggregation=aggregation,
            num_tokens=1 if is_part else num_tokens,
            num_sequences=1 if is_part else num_sequences,
            max_tokens=max_tokens,
        )
        return np.repeat(weights_B, np.diff(self.samples.offsets)).astype(self.samples.logprobs_T.dtype)

    def denominator(self, rows: np.ndarray, aggregation: Aggregation) -> int:
        """What the weights of these rows are divided by: their sampled tokens, or their sequences."""
        _, num_tokens, num_sequences = self._counts(rows)
        return num_tokens if aggregation == "token_mean" else num_sequences

    def _counts(self, rows: np.ndarray) -> tuple[np.ndarray, int, int]:
        """Sampled tokens of each row's sequence, and how many tokens and sequences the rows have."""
        counts_B = np.add.reduceat(self.sampled_T, self.samples.offsets[:-1], dtype=np.int64)
        _, sequences = np.unique(
            self.samples.attempts_B[rows] if self.samples.by_attempt else rows, return_inverse=True
        )
        counts_S = np.zeros(len(rows), dtype=np.int64)
        np.add.at(counts_S, sequences, counts_B[rows])
        return counts_S[sequences], int(counts_S.sum()), int((counts_S > 0).sum())

    @property
    def num_trained(self) -> int:
        """Tokens that are trained. A row's first is not: nothing predicts it."""
        return int(self.trained_T.sum() - self.trained_T[self.samples.offsets[:-1]].sum())

    @property
    def num_measured(self) -> int:
        """Groups that are computed."""
        return len(np.unique(self.samples.groups_B[self.moving_B]))

    @property
    def num_routed(self) -> int:
        """Trained tokens whose experts are the engine's. A token's log-probability comes from the states of the one
        before it."""
        if self.samples.routed_T is None:
            return 0
        is_routed_T = np.concatenate([[False], self.samples.routed_T[:-1]])
        return int((is_routed_T & self.trained_T).sum())


@dataclass(kw_only=True)
class Update:
    """One optimizer update while its gradients are added up: of a mini-batch, or part by part of a step whose last
    groups are still being sampled."""

    number: int = 0  # of the step's updates, from 0
    sums: dict[str, float] = field(default_factory=lambda: {"loss": 0.0, "tokens": 0.0, "entropy": 0.0})
    meter: GapMeter = field(default_factory=GapMeter)
    checks: list[tuple[FiniteCheck, Samples]] = field(default_factory=list)
    num_packs: int = 0
    num_parts: int = 0
    denominator: int = 0  # what weights of parts are divided by once all are here
    num_trained: int = 0  # tokens of the parts that are trained
    num_measured: int = 0  # groups of the parts that were computed
    num_routed: int = 0  # tokens of `num_trained` whose experts are the engine's
    gap_seconds: float = 0.0  # what was spent on forward passes for the gap alone

    def add(self, sums: Mapping[str, float]) -> None:
        self.sums = {key: self.sums.get(key, 0.0) + value for key, value in sums.items()}


class UpdateSums(NamedTuple):
    """What an optimizer update left behind."""

    sums: dict[str, float]  # over trained tokens of all ranks
    norms: dict[str, float]  # of gradients
    gap: dict[str, float]  # to the engine, of the step's first update


def step_metrics(samples: Samples, updates: Sequence[UpdateSums]) -> dict[str, float]:
    """What a step's updates add up to, and what its samples are."""
    totals: dict[str, float] = {}
    for update in updates:
        totals = {key: totals.get(key, 0.0) + value for key, value in update.sums.items()}
    # Before the first update the trainer holds the step's base policy: staleness and the engine make the rest.
    start = {**updates[0].gap}
    first, (k3, ratio, squared) = updates[0].sums["tokens"], (updates[0].sums.get(name, 0.0) for name in OFF_POLICY)
    if first:
        start["off_policy_kl"] = k3 / first
        start["effective_sample_size"] = ratio**2 / max(1e-30, first * squared)
    for name in OFF_POLICY:
        totals.pop(name, None)
    num_tokens = totals.pop("tokens")
    means = {name: totals.pop(name) / len(updates) for name in ("loss", *ROUTER_TERMS) if name in totals}
    loads = load_metrics(totals)
    return {
        **means,
        **loads,
        **mean_metrics(totals, num_tokens=num_tokens),
        **metrics_of_rewards(samples),
        **start,
        **{name: float(np.mean([update.norms[name] for update in updates])) for name in updates[0].norms},
        "trained_rows": float(samples.num_rows),
        "trained_groups": float(len(np.unique(samples.groups_B))),
    }


def lag_and_in_time(
    samples: Samples, settings: TrainSettings, *, base_version: int, max_staleness: float
) -> tuple[np.ndarray, np.ndarray]:
    """How many weight updates each token is behind, and whether it may be trained."""
    versions_T, mask_T, updates = samples.versions_T, samples.mask_T, settings.steps_per_update
    lag_T = lag_of_tokens(versions_T, mask_T, base_version=base_version, steps_per_update=updates)
    return lag_T, tokens_to_train(lag_T, mask_T, stale_policy=settings.stale_policy, max_staleness=max_staleness)


def minibatches(samples: Samples, settings: TrainSettings, *, seed: int, step: int) -> Iterator[np.ndarray]:
    """The rows of each, epoch after epoch: whole groups, shuffled by seed and step."""
    draw = np.random.Generator(np.random.PCG64([seed, step]))
    for _ in range(settings.num_epochs):
        order = draw.permutation(np.unique(samples.groups_B))
        for groups in np.array_split(order, min(settings.num_minibatches, len(order))):
            yield np.flatnonzero(np.isin(samples.groups_B, groups))


def step_batch(
    samples: Samples,
    settings: TrainSettings,
    credit: Credit,
    looked: Looked,
    *,
    in_time_T: np.ndarray,
    base_version: int,
    kept_version: int | None = None,
) -> StepBatch:
    """Put together what the loss of these settings needs; `in_time_T` is False at tokens over the staleness bound.
    `kept_version` is the earlier policy whose weights are kept, if there is one."""
    sampled_T = samples.mask_T
    token_row = np.repeat(np.arange(samples.num_rows), np.diff(samples.offsets))
    if settings.loss.kind == "sft":
        sampled_T = sampled_T & (samples.rewards_B >= settings.loss.min_reward)[token_row]
    trained_T = in_time_T & sampled_T & (credit.known_T | (settings.loss.kind == "sft"))
    moving_B = np.ones(samples.num_rows, bool)
    if moved_by_advantages_alone(settings):
        pulled_B = np.logical_or.reduceat(trained_T & (credit.advantages_T != 0), samples.offsets[:-1])
        moving_B = np.isin(samples.groups_B, samples.groups_B[pulled_B])
    shards_T = np.zeros_like(token_row) if not len(samples.shards_B) else samples.shards_B[token_row]
    compared_T = samples.mask_T  # a grammar's logprobs are those of another distribution than the policy's
    if samples.constrained_B is not None:
        compared_T = compared_T & ~samples.constrained_B[token_row]
    own_T, kept_T = gap_weights(
        samples.versions_T, compared_T, shards_T, base_version=base_version, kept_version=kept_version
    )
    values: dict[str, np.ndarray] = {
        "sampled_logprobs": samples.logprobs_T,
        "advantages": credit.advantages_T,
        "gap_weights": own_T,
        "kept_gap_weights": kept_T,
        "shards": shards_T,
    }
    if settings.decoupled is not None:
        values["versions"] = samples.versions_T
        if looked.logprobs_T is not None:
            values["proximal"] = looked.logprobs_T
    if looked.reference_T is not None:
        values["reference"] = looked.reference_T
    if looked.entropy_T is not None:
        selected_T = top_entropy_mask(looked.entropy_T, trained_T, fraction=settings.top_entropy_fraction)
        values["selected"] = selected_T.astype(np.float32)
    if credit.returns_T is not None and looked.values_T is not None:
        values |= {"returns": credit.returns_T, "old_values": looked.values_T}
    return StepBatch(
        samples=samples,
        sampled_T=sampled_T,
        trained_T=trained_T,
        moving_B=moving_B,
        values=values,
        base_version=base_version,
    )
