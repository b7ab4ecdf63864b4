"""What one step trains on: one number per token of its samples for everything the loss needs, and its mini-batches.

In: samples, their credit, what was looked up before the first update, which tokens are in time. Out: a `StepBatch`, and
the rows of its mini-batches, which are whole groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from settings.train import TrainSettings
from trainers.data.samples import Samples
from trainers.health import gap_weights
from trainers.objective.aggregation import Aggregation, aggregation_weights, top_entropy_mask
from trainers.objective.credit import Credit, Looked
from trainers.objective.objective import moved_by_advantages_alone


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """Arrays with one number per token of `samples`."""

    samples: Samples
    sampled_T: np.ndarray  # true where the policy sampled, in the rows that are trained at all: what denominators count
    trained_T: np.ndarray  # true where the token is trained: not stale, and with a known reward
    moving_B: np.ndarray  # true for rows of a group whose gradient may be other than 0
    values: Mapping[str, np.ndarray]  # what the loss needs beside them, by name
    base_version: int  # the policy version being trained

    def weights_T(self, rows: np.ndarray, aggregation: Aggregation, *, max_tokens: int) -> np.ndarray:
        """What each token of a mini-batch's rows counts, others 0; counted before anything stale is masked."""
        offsets = self.samples.offsets
        counts_B = np.add.reduceat(self.sampled_T, offsets[:-1], dtype=np.int64)
        _, sequences = np.unique(
            self.samples.attempts_B[rows] if self.samples.by_attempt else rows, return_inverse=True
        )
        counts_S = np.zeros(len(rows), dtype=np.int64)
        np.add.at(counts_S, sequences, counts_B[rows])
        weights_B = np.zeros(len(counts_B))
        weights_B[rows] = aggregation_weights(
            counts_S[sequences],
            aggregation=aggregation,
            num_tokens=int(counts_S.sum()),
            num_sequences=int((counts_S > 0).sum()),
            max_tokens=max_tokens,
        )
        return np.repeat(weights_B, np.diff(offsets)).astype(self.samples.logprobs_T.dtype)

    @property
    def num_trained(self) -> int:
        """Tokens that are trained. A row's first is not: nothing predicts it."""
        return int(self.trained_T.sum() - self.trained_T[self.samples.offsets[:-1]].sum())

    @property
    def route_metrics(self) -> dict[str, float]:
        """The share of the trained tokens whose experts are the engine's; nothing if no experts are replayed. A token's
        log-probability comes from the states of the one before it."""
        if self.samples.routed_T is None:
            return {}
        is_routed_T = np.concatenate([[False], self.samples.routed_T[:-1]])
        return {"routes_replayed": float((is_routed_T & self.trained_T).sum() / max(1, self.num_trained))}


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
