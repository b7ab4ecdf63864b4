"""How much better an attempt was than its siblings.

In: rewards and group ids, one per attempt. Out: advantages, one per attempt. Groups are found by id, never by
position, so partial groups cannot shift their neighbours.
"""

from __future__ import annotations

from typing import Literal

import torch


def group_advantages(
    rewards_B: torch.Tensor,
    group_ids_B: torch.Tensor,
    *,
    scale: Literal["std", "none"],
    eps: float = 1e-4,
    ddof: int = 1,
) -> torch.Tensor:
    """GRPO: A = (r − mean_g) / (std_g + eps), with `scale="none"` Dr. GRPO: A = r − mean_g. Shape [B].

    `rewards_B` float; NaN means not applicable: it enters neither mean nor std and gets advantage 0.
    `group_ids_B` int, any order. `ddof` 1 is the unbiased standard deviation. A group with one reward, or with
    equal rewards, gets 0.

    GRPO: https://arxiv.org/abs/2402.03300 eq. 3 · Dr. GRPO: https://arxiv.org/abs/2503.20783

    >>> group_advantages(torch.tensor([1., 2., 3.]), torch.tensor([0, 0, 1]), scale="none")
    tensor([-0.5000,  0.5000,  0.0000])
    """
    known_B = ~rewards_B.isnan()
    values_B = torch.where(known_B, rewards_B, 0.0)
    _, group_B = group_ids_B.unique(return_inverse=True)
    num_groups = int(group_B.max()) + 1 if len(group_B) else 0

    def per_group(x_B: torch.Tensor) -> torch.Tensor:
        return torch.zeros(num_groups, dtype=values_B.dtype).index_add_(0, group_B, x_B)

    count_G = per_group(known_B.to(values_B.dtype))
    mean_G = per_group(values_B) / count_G.clamp(min=1)
    # Equal rewards leave rounding noise behind the centring; dividing it by eps, or by Adam, would invent a preference.
    low_G = torch.full((num_groups,), torch.inf, dtype=values_B.dtype).scatter_reduce(
        0, group_B, torch.where(known_B, values_B, torch.inf), "amin"
    )
    high_G = torch.full((num_groups,), -torch.inf, dtype=values_B.dtype).scatter_reduce(
        0, group_B, torch.where(known_B, values_B, -torch.inf), "amax"
    )
    differs_B = (high_G > low_G)[group_B]
    centred_B = torch.where(known_B & differs_B, values_B - mean_G[group_B], 0.0)
    if scale == "none":
        return centred_B
    variance_G = per_group(centred_B**2) / (count_G - ddof).clamp(min=1)
    return torch.where(differs_B, centred_B / (variance_G.sqrt()[group_B] + eps), 0.0)
