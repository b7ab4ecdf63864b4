"""KL divergence from a reference, estimated at the sampled tokens.

In: log-probabilities of policy and reference. Out: one estimate per token.

d = log π − log π_ref and ρ = π / π_old; means are over tokens that π_old sampled:

                 value                 mean of the value    mean of the gradient
    on policy, π_old = π
    k1           d           any sign  KL(π ‖ π_ref)        0: as a term of the loss it is only noise
    k2           d²/2        ≥ 0       biased               ∇ KL(π ‖ π_ref)
    k3           e^−d − 1 + d  ≥ 0     KL(π ‖ π_ref)        ∇ KL(π_ref ‖ π), the other direction
    on or off policy
    ρ k1, ρ k3                         KL(π ‖ π_ref)        ∇ KL(π ‖ π_ref)
    k1, k3 with the gradient of k2: the mean of the value is theirs, that of the gradient k2's; with ρ off policy, too

Values: http://joschu.net/blog/kl-approx.html · gradients: https://arxiv.org/abs/2506.09477 · ρ k3: DeepSeek-V3.2,
https://arxiv.org/abs/2512.02556. A gradient at each token leaves out what the token does to those after it.
"""

from __future__ import annotations

from typing import Literal

import torch

Estimator = Literal["k1", "k2", "k3"]

_LARGEST_EXPONENT = 20.0


def kl_estimate(
    logprobs_T: torch.Tensor,
    reference_logprobs_T: torch.Tensor,
    mask_T: torch.Tensor,
    *,
    estimator: Estimator,
    clamp: float | None = None,
    ratio_T: torch.Tensor | None = None,
    gradient: Literal["estimator", "k2"] = "estimator",
) -> torch.Tensor:
    """Each token's estimate of KL(policy ‖ reference) in nats, 0 where masked; shape [T], differentiable.

    `clamp` bounds each to [−clamp, clamp]; a token beyond has no gradient. `ratio_T` is ρ with its gradient, which
    multiplies the estimate. `gradient` "k2" puts that of k2, which no clamp cuts, under the value; the ratio then
    multiplies it without a gradient of its own.
    """
    difference_T = torch.where(mask_T > 0, logprobs_T - reference_logprobs_T, 0)
    match estimator:
        case "k1":
            estimate_T = difference_T
        case "k2":
            estimate_T = difference_T.square() / 2
        case "k3":
            exponent_T = -difference_T
            if clamp is not None:
                # e^20 is over any clamp already; unbounded, exp would overflow and its gradient be 0 · inf.
                exponent_T = exponent_T.clamp(max=_LARGEST_EXPONENT)
            estimate_T = exponent_T.expm1() + difference_T
    if clamp is not None:
        estimate_T = estimate_T.clamp(-clamp, clamp)
    if ratio_T is not None:
        estimate_T = estimate_T * ratio_T
    if gradient == "k2":
        moving_T = difference_T.square() / 2 * (1 if ratio_T is None else ratio_T.detach())
        estimate_T = estimate_T.detach() + (moving_T - moving_T.detach())
    return estimate_T
