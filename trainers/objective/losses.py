"""Losses as pure functions of per-token log-probabilities.

In: `LossInputs`, tensors over the tokens of one pack. Out: `LossOutput`, a scalar to minimise and sums for metrics.
Every policy loss is −Σ_t weights_t · importance_t · mask_t · surrogate_t: the denominators are inside `weights`, so
neither the loss nor its gradient depends on how the batch is cut into micro-batches, packed, or spread over ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

OF = "/of"
"""The sum `<name>/of` is the denominator of the sum `<name>`; without one it is the number of trained tokens."""


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """One pack's tokens; every tensor has shape [T], at the positions that predict them. What stands at a masked
    position counts nowhere, NaN and infinity included."""

    logprobs: torch.Tensor
    """log π_θ of the token, with gradient."""
    old_logprobs: torch.Tensor
    """Logprobs of the denominator of the ratio: the policy that sampled, or the proximal one (decoupled PPO)."""
    sampled_logprobs: torch.Tensor
    """Logprobs of the policy that sampled, as the engine reported them."""
    advantages: torch.Tensor
    """How much better the token was than expected; one value per sequence, or per token with a critic."""
    mask: torch.Tensor
    """1 where the token is trained, 0 elsewhere: prompts, tools, and what is stale or filtered."""
    weights: torch.Tensor
    """1 / denominator (`trainers.objective.aggregation.aggregation_weights`), counted before anything was masked."""
    importance: torch.Tensor
    """π_proximal / π_sampled after its correction (trainers/objective/importance.py), 1 if not decoupled; 0 where
    `train.reject` leaves a token out, when a loss function is called."""
    sequences: torch.Tensor
    """int64: which sequence of the pack a token belongs to, from 0."""
    entropy: torch.Tensor
    """Entropy of π_θ at the token, in nats; with gradient if there is a bonus on it."""
    reference_logprobs: torch.Tensor | None = None
    """Logprobs of the reference policy, if there is one."""
    selected: torch.Tensor | None = None
    """1 on the tokens of highest entropy (`trainers.objective.aggregation.top_entropy_mask`), the only ones whose
    policy term and entropy bonus count; None: all. `importance` has it already when a loss function is called."""


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """A pack's share of the loss."""

    loss: torch.Tensor
    """Scalar; the shares of all packs and ranks add up to the mini-batch's loss."""
    sums: dict[str, float]
    """Sums over trained tokens; divided by their number, or by the sum named `<name>/of`, they are metrics."""


def clip_loss(inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None = None) -> LossOutput:
    """PPO's clipped surrogate with a bound on either side and optionally a third one:

    surrogate = min(ρA, clip(ρ, 1 − clip_low, 1 + clip_high) A), ρ = exp(logprobs − old_logprobs)
    and, where A < 0, max(surrogate, dual_clip · A)

    PPO: https://arxiv.org/abs/1707.06347 eq. 7 · clip-higher: DAPO, https://arxiv.org/abs/2503.14476 · dual clip:
    https://arxiv.org/abs/1912.09729
    """
    log_ratio_T = _log_ratio(inputs)
    advantages_T = _trained(inputs.advantages, inputs)
    sums: dict[str, torch.Tensor] = {}
    if dual_clip is not None:
        negative_T = advantages_T < 0
        bound = math.log(dual_clip)
        sums["dual_clip_fraction"] = (negative_T & (log_ratio_T > bound)).sum()
        sums["dual_clip_fraction" + OF] = (negative_T & (inputs.mask > 0)).sum()
        # Bounded before exp: its overflow would make the gradient of an entirely clipped token NaN.
        log_ratio_T = torch.where(negative_T, log_ratio_T.clamp(max=bound), log_ratio_T)
    surrogate_T, clip_sums = _clipped(log_ratio_T.exp(), advantages_T, inputs.mask, clip_low, clip_high)
    return LossOutput(loss=_total(inputs, surrogate_T), sums=numbers({**clip_sums, **sums}))


def gspo_loss(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossOutput:
    """The clipped surrogate with one ratio per sequence, the geometric mean of its trained tokens' ratios:

    s_i = exp(mean_t log ρ_t) over the trained tokens of sequence i; surrogate_t = min(s A, clip(s) A)

    A sequence is a row: of an attempt whose history was forked, each branch is likely after a context of its own.
    Each token's gradient goes through its own log-probability: s_t = sg(s_i) · π_t / sg(π_t), sg stops the gradient
    (GSPO-token). With the same advantage, weight and importance at all tokens of a sequence, value and gradient are
    those of the sequence objective, under any aggregation: `sequence_mean` is the paper's mean over sequences,
    `token_mean` the same weighed by length, `sequence_sum` LUSPO.

    https://arxiv.org/abs/2507.18071 eq. 5 (GSPO) and its GSPO-token · LUSPO: https://arxiv.org/abs/2602.05261
    """
    log_ratio_T = _log_ratio(inputs)
    fixed_T = log_ratio_T.detach()
    mask_T = inputs.mask.to(fixed_T.dtype)
    # As many slots as tokens: the number of sequences would have to be fetched from a GPU.
    slots_T = torch.zeros_like(fixed_T)
    counts_T = slots_T.index_add(0, inputs.sequences, mask_T).clamp(min=1)
    means_T = slots_T.index_add(0, inputs.sequences, fixed_T) / counts_T
    ratio_T = means_T[inputs.sequences].exp() * (log_ratio_T - fixed_T).exp()
    advantages_T = _trained(inputs.advantages, inputs)
    surrogate_T, sums = _clipped(ratio_T, advantages_T, inputs.mask, clip_low, clip_high)
    return LossOutput(loss=_total(inputs, surrogate_T), sums=numbers(sums))


def cispo_loss(inputs: LossInputs, *, clip_high: float, clip_low: float | None = None) -> LossOutput:
    """CISPO: the importance weight is clipped, not the update, so every token keeps a gradient:

    surrogate = sg(clip(ρ, 1 − clip_low, 1 + clip_high)) · A · logprobs, where sg stops the gradient

    Without `clip_low` there is no lower bound, as in the paper's runs. Only the gradient is an estimate of an
    objective's, not the value. Clip fractions are of all trained tokens, of either sign. MiniMax-M1,
    https://arxiv.org/abs/2506.13585 eq. 4 and 5
    """
    ratio_T = _log_ratio(inputs).detach().exp()
    low = 0.0 if clip_low is None else 1 - clip_low
    mask_T = inputs.mask > 0
    is_low_T, is_high_T = mask_T & (ratio_T < low), mask_T & (ratio_T > 1 + clip_high)
    logprobs_T, advantages_T = _trained(inputs.logprobs, inputs), _trained(inputs.advantages, inputs)
    surrogate_T = ratio_T.clamp(low, 1 + clip_high) * advantages_T * logprobs_T
    sums = {
        "clip_fraction": (is_low_T | is_high_T).sum(),
        "clip_fraction_low": is_low_T.sum(),
        "clip_fraction_high": is_high_T.sum(),
    }
    return LossOutput(loss=_total(inputs, surrogate_T), sums=numbers(sums))


def sapo_loss(inputs: LossInputs, *, tau_positive: float, tau_negative: float) -> LossOutput:
    """SAPO: a smooth gate of the ratio instead of a clip:

    surrogate = f(ρ) · A, f(ρ) = 4/τ · σ(τ(ρ − 1)), τ = tau_positive where A > 0 and tau_negative elsewhere

    f has slope 1 at ρ = 1, like ρ itself, and value 2/τ. https://arxiv.org/abs/2511.20347
    """
    ratio_T = _log_ratio(inputs).exp()
    advantages_T = _trained(inputs.advantages, inputs)
    # Of the ratio's own type: two Python numbers would make float32 of a float64 loss.
    tau_T = torch.where(advantages_T > 0, ratio_T.new_full((), tau_positive), ratio_T.new_full((), tau_negative))
    gate_T = 4 / tau_T * torch.sigmoid(tau_T * (ratio_T - 1))
    return LossOutput(loss=_total(inputs, gate_T * advantages_T), sums={})


def dppo_loss(
    inputs: LossInputs, *, divergence_T: torch.Tensor, clip_low: float, clip_high: float, cap: float
) -> LossOutput:
    """DPPO: the importance weight is cut, and tokens that have left a trust region in the direction their advantage
    pushes them have no gradient:

    surrogate = sg(min(ρ, cap)) · A · logprobs, 0 where A > 0, ρ > 1 and D > clip_high, or A < 0, ρ < 1 and D > clip_low

    `divergence_T` is D, how far the token's probability is from that of π_old (`rejection.divergence`). Only the
    gradient is an estimate of an objective's, not the value. https://arxiv.org/abs/2602.04879
    """
    log_ratio_T = _log_ratio(inputs).detach()
    logprobs_T, advantages_T = _trained(inputs.logprobs, inputs), _trained(inputs.advantages, inputs)
    divergence_T = _trained(divergence_T.detach(), inputs)
    is_high_T = (advantages_T > 0) & (log_ratio_T > 0) & (divergence_T > clip_high)
    is_low_T = (advantages_T < 0) & (log_ratio_T < 0) & (divergence_T > clip_low)
    weights_T = torch.where(is_high_T | is_low_T, 0, log_ratio_T.exp().clamp(max=cap))
    sums = {
        "clip_fraction": (is_low_T | is_high_T).sum(),
        "clip_fraction_low": is_low_T.sum(),
        "clip_fraction_low" + OF: (advantages_T < 0).sum(),
        "clip_fraction_high": is_high_T.sum(),
        "clip_fraction_high" + OF: (advantages_T > 0).sum(),
    }
    return LossOutput(loss=_total(inputs, weights_T * advantages_T * logprobs_T), sums=numbers(sums))


def sft_loss(inputs: LossInputs) -> LossOutput:
    """Negative log-likelihood: surrogate = logprobs. Advantages are not used; `mask` says what is worth imitating."""
    return LossOutput(loss=_total(inputs, _trained(inputs.logprobs, inputs)), sums={})


def value_loss(
    values_T: torch.Tensor,
    old_values_T: torch.Tensor,
    returns_T: torch.Tensor,
    mask_T: torch.Tensor,
    weights_T: torch.Tensor,
    *,
    clip: float | None,
) -> LossOutput:
    """The critic's squared error, pessimistic about values that moved far:

    L = Σ_t w_t · m_t · ½ max((v − R)², (clip(v, v_old − clip, v_old + clip) − R)²); without `clip` ½ (v − R)²

    `old_values_T` are those of when the step began, `weights_T` as in `LossInputs`. PPO2,
    https://github.com/openai/baselines/blob/master/baselines/ppo2/model.py
    """
    trained_T = mask_T > 0
    error_T = torch.where(trained_T, values_T - returns_T, 0)
    square_T = error_T.square()
    sums = {}
    if clip is not None:
        moved_T = torch.where(trained_T, values_T - old_values_T, 0)
        clipped_T = torch.where(trained_T, old_values_T + moved_T.clamp(-clip, clip) - returns_T, 0).square()
        sums["value_clip_fraction"] = (clipped_T > square_T).sum()
        square_T = torch.maximum(square_T, clipped_T)
    sums["value_error"] = error_T.detach().abs().sum()
    sums["value_loss"] = 0.5 * square_T.detach().sum()
    return LossOutput(loss=0.5 * (weights_T * mask_T * square_T).sum(), sums=numbers(sums))


def numbers(sums: dict[str, torch.Tensor]) -> dict[str, float]:
    """Scalars from the device in one transfer."""
    if not sums:
        return {}
    return dict(zip(sums, torch.stack([value.detach().double() for value in sums.values()]).tolist(), strict=True))


def _clipped(
    ratio_T: torch.Tensor, advantages_T: torch.Tensor, mask_T: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """min(ρA, clip(ρ)A), and how many tokens lose their gradient by it, by the sign of their advantage."""
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    negative_T, positive_T = (advantages_T < 0) & (mask_T > 0), (advantages_T > 0) & (mask_T > 0)
    is_low_T, is_high_T = negative_T & (ratio_T < 1 - clip_low), positive_T & (ratio_T > 1 + clip_high)
    return torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T), {
        "clip_fraction": (is_low_T | is_high_T).sum(),
        "clip_fraction_low": is_low_T.sum(),
        "clip_fraction_low" + OF: negative_T.sum(),
        "clip_fraction_high": is_high_T.sum(),
        "clip_fraction_high" + OF: positive_T.sum(),
    }


def _log_ratio(inputs: LossInputs) -> torch.Tensor:
    return _trained(inputs.logprobs - inputs.old_logprobs, inputs)


def _trained(values_T: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """0 where masked. Not a product: 0 · NaN is NaN, in the value and in the gradient."""
    return torch.where(inputs.mask > 0, values_T, 0)


def _total(inputs: LossInputs, surrogate_T: torch.Tensor) -> torch.Tensor:
    return -(inputs.weights * inputs.importance * inputs.mask * surrogate_T).sum()
