"""Policy losses as pure functions of per-token log-probabilities.

In: tensors over tokens, and the denominator. Out: a scalar to minimise, and sums for metrics. The denominator is an
argument, the number of trained tokens in the whole batch, so neither the loss nor its gradient depends on how the
batch is cut into micro-batches, packed, or spread over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """A micro-batch's share of the loss."""

    loss: torch.Tensor
    """Scalar; the shares of all micro-batches add up to the batch's loss."""
    sums: dict[str, float]
    """Sums over trained tokens; divide by the denominator for a mean."""


def clip_loss(
    logprobs_T: torch.Tensor,
    old_logprobs_T: torch.Tensor,
    advantages_T: torch.Tensor,
    mask_T: torch.Tensor,
    *,
    denominator: float,
    clip_low: float,
    clip_high: float,
    weights_T: torch.Tensor | None = None,
) -> LossOutput:
    """PPO's clipped surrogate, token mean over the global batch:

    L = −Σ_t m_t · w_t · min(ρ_t A_t, clip(ρ_t, 1 − clip_low, 1 + clip_high) A_t) / denominator,  ρ_t = exp(logp − old)

    All tensors have shape [T]; `mask_T` is 1 on trained tokens; `weights_T` are importance weights, 1 when absent.
    PPO: https://arxiv.org/abs/1707.06347 eq. 7 · clip-higher and token mean: DAPO, https://arxiv.org/abs/2503.14476
    """
    mask_T = mask_T.to(logprobs_T.dtype)
    log_ratio_T = (logprobs_T - old_logprobs_T) * mask_T
    ratio_T = log_ratio_T.exp()
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    surrogate_T = torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    if weights_T is not None:
        surrogate_T = surrogate_T * weights_T
    loss = -(surrogate_T * mask_T).sum() / denominator
    is_clipped_T = ratio_T * advantages_T > clipped_T * advantages_T
    return LossOutput(loss=loss, sums=_sums(log_ratio_T, is_clipped_T, mask_T))


def cispo_loss(
    logprobs_T: torch.Tensor,
    old_logprobs_T: torch.Tensor,
    advantages_T: torch.Tensor,
    mask_T: torch.Tensor,
    *,
    denominator: float,
    clip_high: float,
    weights_T: torch.Tensor | None = None,
) -> LossOutput:
    """CISPO: the importance weight is clipped, not the update, so every token keeps a gradient:

    L = −Σ_t m_t · w_t · sg(min(ρ_t, 1 + clip_high)) · A_t · logp_t / denominator,  ρ_t = exp(logp − old)

    sg stops the gradient. The paper's clip(ρ, 1 − ε_low, 1 + ε_high) has a lower bound too, but trains without it
    ("we did not impose a lower bound", ε_low large), and so does this. Shapes and `weights_T` as in `clip_loss`.
    The value is no estimate of an objective, only its gradient is.
    CISPO: MiniMax-M1, https://arxiv.org/abs/2506.13585 eq. 4 and 5
    """
    mask_T = mask_T.to(logprobs_T.dtype)
    log_ratio_T = (logprobs_T - old_logprobs_T) * mask_T
    ratio_T = log_ratio_T.detach().exp()
    surrogate_T = ratio_T.clamp(max=1 + clip_high) * advantages_T * logprobs_T
    if weights_T is not None:
        surrogate_T = surrogate_T * weights_T
    loss = -(surrogate_T * mask_T).sum() / denominator
    return LossOutput(loss=loss, sums=_sums(log_ratio_T, ratio_T > 1 + clip_high, mask_T))


@torch.no_grad()
def _sums(log_ratio_T: torch.Tensor, is_clipped_T: torch.Tensor, mask_T: torch.Tensor) -> dict[str, float]:
    return {
        "clip_fraction": float((is_clipped_T.to(mask_T.dtype) * mask_T).sum()),
        # k3 ≥ 0 estimate of KL(old ‖ new), http://joschu.net/blog/kl-approx.html
        "approx_kl": float(((log_ratio_T.exp() - 1 - log_ratio_T) * mask_T).sum()),
    }
