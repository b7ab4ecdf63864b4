"""Decoupled PPO: how far the proximal policy is from the one that sampled, token by token.

In: log-probabilities of both. Out: importance weights that multiply the loss, and sums for metrics.

    loss = −Σ weights · (π_prox / π_sampled, corrected) · min(ρA, clip(ρ)A), ρ = π_θ / π_prox

https://arxiv.org/abs/2505.24298 eq. 5. The denominators inside `weights` count every sampled token, also those masked
here: masking must not make the others louder.
"""

from __future__ import annotations

from typing import Literal

import torch

from trainers.objective.losses import numbers
from trainers.objective.rejection import out_of_bounds, over_sequences

Correction = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


def loglinear_proximal(
    logprobs_T: torch.Tensor,
    sampled_logprobs_T: torch.Tensor,
    versions_T: torch.Tensor,
    *,
    proximal_version: float,
    current_version: float,
) -> torch.Tensor:
    """The proximal policy's log-probabilities between two known ones, without a forward pass; shape [T], no gradient:

    log π_prox ≈ log π_sampled + α (log π_θ − log π_sampled), α = (v_prox − v_sampled) / (v_θ − v_sampled) in [0, 1]

    `versions_T` is each token's sampling policy. Within a step `current_version` grows from `proximal_version` to the
    next version, by the share of the step's updates that are done: before the first, α = 1 and this is the recomputed
    value; for a token the proximal policy sampled itself α = 0 from then on. As in AReaL's `prox_logp_method =
    "loglinear"`.
    """
    # Whole numbers are exact, and the small difference is taken before it meets them.
    behind_T, ahead = (proximal_version - versions_T).to(logprobs_T.dtype), current_version - proximal_version
    alpha_T = torch.where(behind_T + ahead > 0, behind_T / (behind_T + ahead), 1).clamp(0, 1)
    # lerp is exact at both ends
    return torch.lerp(sampled_logprobs_T, logprobs_T.detach(), alpha_T)


@torch.no_grad()
def importance_weights(
    proximal_logprobs_T: torch.Tensor,
    sampled_logprobs_T: torch.Tensor,
    mask_T: torch.Tensor,
    sequences_T: torch.Tensor,
    *,
    correction: Correction,
    cap: float,
    floor: float | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """(w = π_prox / π_sampled, corrected; sums over trained tokens). w has shape [T], 1 where masked, no gradient.

    token_*: one weight per token. sequence_*: one for all tokens of a sequence, the *product* over its trained tokens.
    *_truncate: w outside [floor, cap] becomes the bound. *_mask: it becomes 0.
    The product, not the geometric mean, is the likelihood ratio of the sequence; over long sequences it leaves the
    bounds soon. Names and formulas as in TRL's `vllm_importance_sampling_mode`.

    Sums: `importance` Σw and `importance_squared` Σw² after correction, `importance_corrected` the tokens truncated or
    masked, `importance_log_ratio` Σ |log w| before it.
    """
    trained_T = mask_T > 0
    log_ratio_T = torch.where(trained_T, proximal_logprobs_T - sampled_logprobs_T, 0)
    size = log_ratio_T.abs().sum()
    over, bounding = correction.split("_")
    raw_T = over_sequences(log_ratio_T, trained_T, sequences_T, "token" if over == "token" else "sequence_sum").exp()
    outside_T = out_of_bounds(raw_T, trained_T, low=floor, high=cap)
    weights_T = raw_T.clamp(floor, cap) if bounding == "truncate" else torch.where(outside_T, 0, raw_T)
    weights_T = torch.where(trained_T, weights_T, 1)
    kept_T = torch.where(trained_T, weights_T, 0)
    return weights_T, numbers(
        {
            "importance": kept_T.sum(),
            "importance_squared": kept_T.square().sum(),
            "importance_corrected": outside_T.sum(),
            "importance_log_ratio": size,
        }
    )
