"""Credit assignment: which sampled token is made more likely, and by how much.

In: samples, what was looked up before the first update, settings. Out: one advantage per sampled token, and the returns
a critic learns; and metrics.

    rewards ─(− KL in the reward)─▶ per attempt: relative to its group, or the batch ─▶ every token of the attempt
                                 └▶ per token:   GAE with a critic · log-ratio to a teacher
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from settings.advantage import DistillAdvantage, GaeAdvantage
from settings.train import TrainSettings
from trainers.data.samples import Samples
from trainers.objective.advantages import (
    advantages_of,
    distillation_advantages,
    gae,
    reward_metrics,
    rewards_at_end,
    whitened,
)
from trainers.objective.divergence import kl_estimate


@dataclass(frozen=True, kw_only=True)
class Looked:
    """Per token of the samples, under the weights as they were before the step's first update; None if not needed. Each
    has shape [T], with 0 where nothing was sampled."""

    logprobs_T: np.ndarray | None = None  # the policy's own
    entropy_T: np.ndarray | None = None  # of the policy, in nats
    reference_T: np.ndarray | None = None  # log-probabilities of the reference, or of the teacher
    values_T: np.ndarray | None = None  # the critic's


@dataclass(frozen=True, kw_only=True)
class Credit:
    """What the policy and the critic learn."""

    advantages_T: np.ndarray  # of the type of the samples' log-probabilities, shape [T]
    returns_T: np.ndarray | None  # targets of the critic, likewise; None without one
    known_T: np.ndarray  # false on tokens of attempts without a reward


def assign_credit(
    samples: Samples, settings: TrainSettings, looked: Looked, *, reward_weights: Mapping[str, float]
) -> Credit:
    """Advantages by `settings.advantage`. Raises `ValueError` if no attempt has a reward, or a part is missing. Rows of
    one attempt share its reward; its length is what was sampled in all of them."""
    rewards_A, groups_A, parts_A = _by_attempt(samples)
    token_row = np.repeat(np.arange(samples.num_rows), np.diff(samples.offsets))
    token_attempt = samples.attempts_B[token_row]
    penalty_T = _penalty(samples, settings, looked)
    if penalty_T is not None and settings.advantage.kind != "gae":
        charges_A = np.bincount(token_attempt, weights=penalty_T, minlength=len(rewards_A))
        rewards_A = rewards_A - _same_for_the_same(charges_A, samples)
    advantages_A = advantages_of(
        settings.advantage,
        torch.from_numpy(rewards_A),
        groups_A,
        lengths_B=torch.from_numpy(np.bincount(token_attempt, weights=samples.mask_T, minlength=len(rewards_A))),
        reward_parts_B=parts_A,
        reward_weights=reward_weights,
    )
    returns_T = None
    known_T = ~np.isnan(samples.rewards_B)[token_row]
    match settings.advantage:
        case GaeAdvantage(gamma=gamma, lam=lam, whiten=whiten):
            assert looked.values_T is not None
            mask_T = samples.mask_T & known_T
            rewards_T = rewards_at_end(samples.rewards_B, mask_T, samples.offsets)
            if penalty_T is not None:
                rewards_T -= penalty_T
            advantages_T, returns_T = gae(rewards_T, looked.values_T, mask_T, samples.offsets, gamma=gamma, lam=lam)
            if whiten:
                advantages_T = whitened(advantages_T, mask_T)
            returns_T = returns_T.astype(samples.logprobs_T.dtype)
        case DistillAdvantage(scale=scale, clip=clip):
            assert looked.reference_T is not None
            advantages_T = distillation_advantages(
                looked.reference_T, samples.logprobs_T, samples.mask_T, scale=scale, clip=clip
            )
            known_T = np.ones_like(known_T)
        case _:
            advantages_T = advantages_A.numpy()[token_attempt]
    advantages_T = advantages_T.astype(samples.logprobs_T.dtype)
    return Credit(advantages_T=advantages_T, returns_T=returns_T, known_T=known_T)


def metrics_of_rewards(samples: Samples) -> dict[str, float]:
    """Metrics of the rewards as they were scored, over attempts; `reference_kl` shows a KL penalty in the reward."""
    rewards_A, groups_A, parts_A = _by_attempt(samples)
    return reward_metrics(torch.from_numpy(rewards_A), groups_A, reward_parts_B=parts_A)


def _by_attempt(samples: Samples) -> tuple[np.ndarray, torch.Tensor, dict[str, torch.Tensor]]:
    """Reward in float64, group and parts of the reward of each attempt."""
    _, first_row = np.unique(samples.attempts_B, return_index=True)
    groups_A = torch.from_numpy(samples.groups_B[first_row].astype(np.int64))
    parts_A = {name: torch.from_numpy(part[first_row]) for name, part in samples.reward_parts_B.items()}
    return samples.rewards_B[first_row].astype(np.float64), groups_A, parts_A


def _penalty(samples: Samples, settings: TrainSettings, looked: Looked) -> np.ndarray | None:
    """β · KL estimate per sampled token, of the policy that sampled it; None if the reward carries none."""
    kl = settings.kl
    if not kl.coefficient or kl.place != "reward":
        return None
    assert looked.reference_T is not None
    tensors = (torch.tensor(a) for a in (samples.logprobs_T, looked.reference_T, samples.mask_T))
    estimate_T = kl_estimate(*tensors, estimator=kl.estimator, clamp=kl.clamp)
    return kl.coefficient * estimate_T.double().numpy()


def _same_for_the_same(charges_A: np.ndarray, samples: Samples) -> np.ndarray:
    """Attempts of a group with the very same tokens, from the same policies, are charged the mean of what each was:
    their log-probabilities differ by the engine's rounding, which a group of equal scores would take for its signal."""
    content_A: list[list[bytes]] = [[] for _ in charges_A]
    for row, attempt in enumerate(samples.attempts_B):
        tokens = slice(samples.offsets[row], samples.offsets[row + 1])
        arrays = (samples.input_ids_T[tokens], samples.mask_T[tokens], samples.versions_T[tokens])
        content_A[attempt] += [int(samples.groups_B[row]).to_bytes(8, "little"), *(array.tobytes() for array in arrays)]
    numbers: dict[tuple[bytes, ...], int] = {}
    kind_A = np.array([numbers.setdefault(tuple(content), len(numbers)) for content in content_A])
    return (np.bincount(kind_A, weights=charges_A) / np.bincount(kind_A))[kind_A]
