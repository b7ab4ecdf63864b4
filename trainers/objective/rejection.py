"""How far a policy is from the one that sampled, token by token or over sequences; and what is out of bounds.

In: log-probabilities of both. Out: a statistic per token, and whether it is out of bounds. Importance weights
(`importance.py`), `train.reject` and DPPO's trust region are bounds of this one kind.

r = π / π_sampled. Names: k1, k2, k3 http://joschu.net/blog/kl-approx.html, as in verl's `rollout_rs`; tv and binary_kl
DPPO, https://arxiv.org/abs/2602.04879, as in OpenRLHF's `is_correction_gating`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from settings.loss import Over, RejectSettings, Statistic
from trainers.objective.losses import LossInputs, numbers

_TINY = 1e-8
"""Keeps the logarithm of a probability's complement finite."""


def divergence(statistic: Statistic, logprobs_T: torch.Tensor, sampled_logprobs_T: torch.Tensor) -> torch.Tensor:
    """Each token's statistic, shape [T]; for `ratio` its logarithm, so that sums and means are those of logarithms."""
    log_ratio_T = logprobs_T - sampled_logprobs_T
    match statistic:
        case "ratio":
            return log_ratio_T
        case "k1":
            return -log_ratio_T
        case "k2":
            return log_ratio_T.square() / 2
        case "k3":
            return log_ratio_T.expm1() - log_ratio_T
        case "tv":
            return (logprobs_T.exp() - sampled_logprobs_T.exp()).abs()
        case "binary_kl":
            others_T, sampled_others_T = (-log_p_T.expm1().clamp(max=0) for log_p_T in (logprobs_T, sampled_logprobs_T))
            of_others_T = sampled_others_T * ((sampled_others_T + _TINY) / (others_T + _TINY)).log()
            return of_others_T - sampled_logprobs_T.exp() * log_ratio_T


def over_sequences(
    values_T: torch.Tensor, trained_T: torch.Tensor, sequences_T: torch.Tensor, over: Over
) -> torch.Tensor:
    """At each token the sum, mean or maximum of its sequence's trained tokens, or its own; shape [T]. What stands at
    other tokens counts nowhere. There are as many slots as tokens: their number would have to come from the device."""
    values_T = torch.where(trained_T, values_T, 0)
    zeros_T = torch.zeros_like(values_T)
    match over:
        case "token":
            return values_T
        case "sequence_max":
            lowest_T = torch.where(trained_T, values_T, -torch.inf)
            return zeros_T.scatter_reduce(0, sequences_T, lowest_T, "amax", include_self=False)[sequences_T]
    sums_T = zeros_T.index_add(0, sequences_T, values_T)
    if over == "sequence_mean":
        sums_T = sums_T / zeros_T.index_add(0, sequences_T, trained_T.to(values_T.dtype)).clamp(min=1)
    return sums_T[sequences_T]


def out_of_bounds(
    values_T: torch.Tensor, trained_T: torch.Tensor, *, low: float | None, high: float | None
) -> torch.Tensor:
    """True at trained tokens below `low` or above `high`; None is no bound."""
    is_low_T = values_T < (-torch.inf if low is None else low)
    return trained_T & (is_low_T | (values_T > (torch.inf if high is None else high)))


@torch.no_grad()
def rejected(inputs: LossInputs, rules: Sequence[RejectSettings]) -> tuple[torch.Tensor, dict[str, float]]:
    """Trained tokens that break one of the rules, and their number as `rejected_fraction`; bool of shape [T].

    DeepSeek-V3.2's off-policy sequence mask (https://arxiv.org/abs/2512.02556) is k1, `sequence_mean`, negative.
    """
    trained_T = inputs.mask > 0
    rejected_T = torch.zeros_like(trained_T)
    for rule in rules:
        logprobs_T = inputs.logprobs if rule.policy == "current" else inputs.old_logprobs
        values_T = divergence(rule.statistic, logprobs_T, inputs.sampled_logprobs)
        values_T = over_sequences(values_T, trained_T, inputs.sequences, rule.over)
        if rule.statistic == "ratio":
            values_T = values_T.exp()
        outside_T = out_of_bounds(values_T, trained_T, low=rule.low, high=rule.high)
        rejected_T |= outside_T & ((inputs.advantages < 0) | (rule.advantage == "any"))
    return rejected_T, numbers({"rejected_fraction": rejected_T.sum()})
