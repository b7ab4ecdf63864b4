"""How much better an attempt, or one of its tokens, was than expected.

In: rewards and group ids, one per attempt; or rewards and values, one per token. Out: advantages of the same shape.

    per attempt (tensors [B])   rewards, groups ─▶ advantages_of   ·   reward_metrics
    per token (arrays [T])      rewards_at_end ─▶ gae ─▶ whitened   ·   distillation_advantages

Groups are matched by id, never by position, so partial groups cannot shift their neighbours. A reward of None is NaN
here: it enters no mean and no deviation, and its attempt has advantage 0. A group of equal rewards has exactly 0 if the
baseline is its own. docs/algorithms.md has every formula. Sums are in float64, results have the rewards' type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from settings.errors import InvalidInput
from settings.places.hints import command

if TYPE_CHECKING:
    from settings.advantage import Advantage


def advantages_of(
    settings: Advantage,
    rewards_B: torch.Tensor,
    groups_B: torch.Tensor,
    *,
    lengths_B: torch.Tensor,
    reward_parts_B: Mapping[str, torch.Tensor],
    reward_weights: Mapping[str, float],
) -> torch.Tensor:
    """Advantages of B attempts by `settings`; `lengths_B` are their sampled tokens, `reward_parts_B` named rewards.

    NaN for the kinds that have one advantage per token. Parts without a weight in `reward_weights` count 1. Raises
    `ValueError` when every reward is None, unless rewards are not used, and when a part that the settings name is
    missing.
    """
    if settings.kind != "distill" and rewards_B.isnan().all():
        raise InvalidInput(
            f"all {len(rewards_B)} rewards are None, which is for faults of the environment; an attempt that is merely"
            f" wrong gets a number, 0 for example. `{command('rollout', 'once', 'RUN', '--n', 4)}` shows the errors"
        )
    groups = _Groups(rewards_B, groups_B)
    options = settings.model_dump(exclude={"kind", "per_reward", "baseline_part"})
    match settings.kind:
        case "grpo" if settings.per_reward:
            advantages_B = _gdpo(groups, reward_parts_B, reward_weights, **options)
        case "grpo":
            advantages_B = _grpo(groups, **options)
        case "leave_one_out":
            advantages_B = _leave_one_out(groups, **options)
        case "reinforce++":
            advantages_B = _reinforce(groups, lengths_B.double(), **options)
        case "remax":
            # ReMax, https://arxiv.org/abs/2310.10505: A = r − b, b the reward of the greedy reply; 0 if one is None.
            if settings.baseline_part not in reward_parts_B:
                raise InvalidInput(
                    f'train.advantage.baseline_part = "{settings.baseline_part}" is not a part of the reward'
                    f" ({_listed(reward_parts_B)}): return it from the reward function, weight 0 in [reward.weights]"
                )
            advantages_B = (rewards_B - reward_parts_B[settings.baseline_part].to(rewards_B.dtype)).nan_to_num(nan=0.0)
        case "opo":
            advantages_B = _opo(groups, lengths_B.double())
        case "pass_at_k":
            advantages_B = _pass_at_k(groups, **options)
        case "gae" | "distill":
            advantages_B = torch.full_like(rewards_B, torch.nan)
    return advantages_B.to(rewards_B.dtype)


def reward_metrics(
    rewards_B: torch.Tensor, groups_B: torch.Tensor, *, reward_parts_B: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """The metrics of rewards in docs/algorithms.md, for B ≥ 1. Means are over rewards that are not None; a mean of none
    is absent."""
    groups = _Groups(rewards_B, groups_B)
    numbers = rewards_B[groups.known_B].double()
    metrics = {"null_reward_fraction": 1 - len(numbers) / len(rewards_B)}
    metrics["fraction_groups_without_signal"] = 1 - float(groups.differs_G.double().mean())
    if len(numbers):
        deviation = float(numbers.std()) if len(numbers) > 1 else 0.0
        metrics |= {"reward": float(numbers.mean()), "reward_std": deviation}
    for name, part_B in reward_parts_B.items():
        if not part_B.isnan().all():
            metrics[f"reward/{name}"] = float(part_B.double().nanmean())
    return metrics


class _Groups:
    """Attempts with a reward, by group; every `_B` is per attempt, whatever it is about."""

    def __init__(self, rewards_B: torch.Tensor, groups_B: torch.Tensor) -> None:
        self.known_B = ~rewards_B.isnan()
        self.values_B = torch.where(self.known_B, rewards_B.double(), 0.0)
        ids, self.group_B = groups_B.unique(return_inverse=True)
        self._num_groups = len(ids)
        self.size_B = self.sum(torch.ones_like(self.values_B))
        self.differs_G = self._extreme("amax", -torch.inf) > self._extreme("amin", torch.inf)
        """Whether a group has two rewards that differ."""
        self.differs_B = self.known_B & self.differs_G[self.group_B]
        self.mean_B = self.sum(self.values_B) / self.size_B.clamp(min=1)
        # Equal rewards leave rounding noise behind: dividing it by eps, or by Adam, would invent a preference.
        self.centred_B = torch.where(self.differs_B, self.values_B - self.mean_B, 0.0)

    def sum(self, x_B: torch.Tensor) -> torch.Tensor:
        """Sum over the known attempts of each one's group."""
        sums_G = torch.zeros(self._num_groups, dtype=torch.float64)
        return sums_G.index_add_(0, self.group_B, torch.where(self.known_B, x_B, 0.0))[self.group_B]

    def _extreme(self, kind: Literal["amin", "amax"], start: float) -> torch.Tensor:
        starts_G = torch.full((self._num_groups,), start, dtype=torch.float64)
        return starts_G.scatter_reduce(0, self.group_B, torch.where(self.known_B, self.values_B, start), kind)


# Each formula takes the attempts' rewards by group, and returns float64 of shape [B].


def _grpo(groups: _Groups, *, scale: str, ddof: int, eps: float, singleton: str) -> torch.Tensor:
    """GRPO: A = (r − mean_g) / (std + eps), with `scale="none"` Dr. GRPO: A = r − mean_g, with "mean" MaxRL: that /
    mean_g.

    The deviation is the group's, or with `scale="batch"` that of all rewards of the batch; `ddof` 1 is unbiased.
    `singleton` says what a group's only reward gets: 0, or itself as if mean and deviation were 0 and 1 (verl).

    GRPO: https://arxiv.org/abs/2402.03300 eq. 3 · Dr. GRPO: https://arxiv.org/abs/2503.20783 ·
    batch: https://arxiv.org/abs/2508.08221 · MaxRL: https://arxiv.org/abs/2602.02710
    """
    spread_B = lone_B = torch.ones_like(groups.values_B)
    if scale == "mean":
        if groups.values_B.min() < 0:
            raise InvalidInput(
                'train.advantage.scale = "mean" is for rewards of at least 0 (MaxRL), and there is one of '
                f"{groups.values_B.min():g}; add to them with reward.bias, or use another scale"
            )
        spread_B = torch.where(groups.differs_B, groups.mean_B, 1)  # rewards that differ have a mean above 0
    elif scale == "std":
        variance_B = groups.sum(groups.centred_B**2) / (groups.size_B - ddof).clamp(min=1)
        spread_B, lone_B = variance_B.sqrt() + eps, torch.full_like(variance_B, 1 + eps)
    elif scale == "batch":
        rewards = groups.values_B[groups.known_B]
        # 1 if all are equal, so that nothing is divided by eps alone.
        deviation = float(rewards.std(correction=ddof)) if len(rewards.unique()) > 1 else 1.0
        spread_B = lone_B = torch.full_like(groups.values_B, deviation + eps)
    advantages_B = torch.where(groups.differs_B, groups.centred_B / spread_B, 0.0)
    if singleton == "reward":
        is_lone_B = groups.known_B & (groups.size_B == 1)
        advantages_B = torch.where(is_lone_B, groups.values_B / lone_B, advantages_B)
    return advantages_B


def _leave_one_out(groups: _Groups, *, scale: str, eps: float) -> torch.Tensor:
    """A = r − mean of the others in the group, with `scale="std"` over (their unbiased deviation + eps).

    Without scale it is RLOO: r − Σ_{j≠i} r_j / (n − 1) = (r − mean_g) · n / (n − 1). If the others all agree there
    is nothing to scale by, and the difference stays as it is (so does NeMo-RL).

    RLOO: https://arxiv.org/abs/2402.14740
    """
    size_B, centred_B = groups.size_B, groups.centred_B
    advantages_B = centred_B * size_B / (size_B - 1).clamp(min=1)
    if scale == "std":
        squares_B = groups.sum(centred_B**2)
        others_B = squares_B - centred_B * advantages_B
        # The subtraction leaves rounding noise where the others agree.
        varies_B = (size_B > 2) & (others_B > 1e-12 * squares_B)
        deviation_B = (others_B.clamp(min=0) / (size_B - 2).clamp(min=1)).sqrt()
        advantages_B = torch.where(varies_B, advantages_B / (deviation_B + eps), advantages_B)
    return torch.where(groups.differs_B, advantages_B, 0.0)


def _reinforce(groups: _Groups, lengths_B: torch.Tensor, *, baseline: bool, eps: float) -> torch.Tensor:
    """REINFORCE++: A = (r − mean) / (std + eps) over all sampled tokens of the batch; https://arxiv.org/abs/2501.03262

    Every token carries its attempt's reward, so an attempt counts by its length in mean and (biased) deviation. With
    `baseline` the group's mean is subtracted from the rewards first; groups of equal rewards enter the deviation, but
    are not moved by a batch mean that is only there because lengths differ: they get 0.
    """
    values_B = groups.centred_B if baseline else groups.values_B
    moves_B = groups.differs_B if baseline else groups.known_B
    weights_B = torch.where(groups.known_B, lengths_B, 0.0)
    return _whitened_over_batch(values_B, weights_B, moves_B, ddof=0, eps=eps)


def _whitened_over_batch(
    values_B: torch.Tensor, weights_B: torch.Tensor, moves_B: torch.Tensor, *, ddof: int, eps: float
) -> torch.Tensor:
    """(x − weighted mean) / (weighted deviation + eps) where `moves_B`, else 0; 0 without a deviation."""
    if len(values_B[weights_B > 0].unique()) < 2:
        return torch.zeros_like(values_B)
    centred_B = values_B - (weights_B * values_B).sum() / weights_B.sum()
    variance = (weights_B * centred_B**2).sum() / (weights_B.sum() - ddof).clamp(min=1)
    return torch.where(moves_B, centred_B / (variance.sqrt() + eps), 0.0)


def _opo(groups: _Groups, lengths_B: torch.Tensor) -> torch.Tensor:
    """OPO: A = r − Σ_j l_j r_j / Σ_j l_j over the group, l in sampled tokens: the baseline of least variance if a
    reply's squared gradient grows with its length. https://arxiv.org/abs/2505.23585"""
    shift_B = groups.sum(lengths_B * groups.centred_B) / groups.sum(lengths_B).clamp(min=1)
    return torch.where(groups.differs_B, groups.centred_B - shift_B, 0.0)


def _gdpo(
    groups: _Groups,
    reward_parts_B: Mapping[str, torch.Tensor],
    reward_weights: Mapping[str, float],
    *,
    ddof: int,
    eps: float,
    **grpo: Any,
) -> torch.Tensor:
    """GDPO: s = Σ_k w_k · GRPO(r_k), then A = (s − mean) / (std + eps) over the batch's attempts.

    Null parts are left out of the sum; an attempt without any part, or without a reward, gets 0 and is not counted.
    Parts of weight 0 are not looked at. A group in which no part differs gets 0. https://arxiv.org/abs/2601.05242
    """
    weights = {name: reward_weights.get(name, 1.0) for name in reward_parts_B}
    if not any(weights.values()):
        raise InvalidInput(
            f"train.advantage.per_reward needs named rewards with a weight ({_listed(reward_parts_B)}): return a"
            " dictionary from the reward function, or set per_reward = false"
        )
    summed_B = torch.zeros_like(groups.values_B)
    is_scored_B = torch.zeros_like(groups.known_B)
    for name, weight in weights.items():
        if weight:
            part = _Groups(torch.where(groups.known_B, reward_parts_B[name].double(), torch.nan), groups.group_B)
            summed_B += weight * _grpo(part, ddof=ddof, eps=eps, **grpo)
            is_scored_B |= part.known_B
    scored = _Groups(torch.where(is_scored_B, summed_B, torch.nan), groups.group_B)
    moves_B = is_scored_B & (scored.sum(summed_B.abs()) > 0)
    return _whitened_over_batch(summed_B, is_scored_B.double(), moves_B, ddof=ddof, eps=eps)


def _listed(reward_parts_B: Mapping[str, torch.Tensor]) -> str:
    return "parts here: " + (", ".join(reward_parts_B) or "none")


def _pass_at_k(groups: _Groups, *, k: int, threshold: float, eps: float) -> torch.Tensor:
    """The mean GRPO advantage of the k-subsets of its group that an attempt is in, each scored pass or fail.

    With n attempts, w of them wrong (reward at most `threshold`), R = 1 − C(w, k) / C(n, k) and σ = √(R (1 − R)):
    right: (1 − R) / (σ + eps); wrong: (1 − R − C(w − 1, k − 1) / C(n − 1, k − 1)) / (σ + eps). If all subsets pass
    (w < k, so always if k ≥ n) or all fail, it is 0. https://arxiv.org/abs/2508.10751
    """
    is_right_B = groups.known_B & (groups.values_B > threshold)
    size_B = groups.size_B
    wrong_B = size_B - groups.sum(is_right_B.double())
    fails_beside_B = torch.ones_like(size_B)  # all of the other k − 1 are wrong, if this one is
    for i in range(1, k):
        fails_beside_B = fails_beside_B * (wrong_B - i).clamp(min=0) / (size_B - i).clamp(min=1)
    fails_B = fails_beside_B * wrong_B / size_B.clamp(min=1)  # 1 − R
    deviation_B = ((1 - fails_B) * fails_B).sqrt()
    advantages_B = torch.where(is_right_B, fails_B, fails_B - fails_beside_B) / (deviation_B + eps)
    varies_B = groups.known_B & (wrong_B >= k) & (wrong_B < size_B)
    return torch.where(varies_B, advantages_B, 0.0)


def rewards_at_end(rewards_B: np.ndarray, mask_T: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Each row's reward at its last sampled token (`mask_T`), 0 elsewhere; float64 of shape [T]. Row i is
    offsets[i]:offsets[i + 1]."""
    sampled = np.flatnonzero(mask_T)
    row = np.searchsorted(offsets, sampled, side="right") - 1
    is_last = np.diff(row, append=-1) != 0
    rewards_T = np.zeros(len(mask_T))
    rewards_T[sampled[is_last]] = rewards_B[row[is_last]]
    return rewards_T


def gae(
    rewards_T: np.ndarray, values_T: np.ndarray, mask_T: np.ndarray, offsets: np.ndarray, *, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantage estimation; advantages and returns, float64 of shape [T], 0 where nothing was sampled.

    δ_t = r_t + γ V_{t+1} − V_t, A_t = δ_t + γλ A_{t+1}, return = A_t + V_t, where t + 1 is the row's next *sampled*
    token: what tools and users wrote in between is skipped, and behind the last one V and A are 0. V_t is what the
    critic expected before token t was sampled. Raises `ValueError` for a reward or value that is not finite.

    https://arxiv.org/abs/1506.02438 eq. 16
    """
    sampled = np.flatnonzero(mask_T)
    row = np.searchsorted(offsets, sampled, side="right") - 1
    rewards, values = rewards_T[sampled].astype(np.float64), values_T[sampled].astype(np.float64)
    broken = np.unique(row[~(np.isfinite(rewards) & np.isfinite(values))])
    if len(broken):
        raise InvalidInput(
            f"rows {broken[:8].tolist()} have a reward or value that is NaN or infinite; mask rows without a reward"
        )
    goes_on = np.diff(row, append=-1) == 0
    deltas = rewards + gamma * np.where(goes_on, np.roll(values, -1), 0.0) - values
    advantages = np.empty_like(deltas)
    # From the last token of all rows backwards, one step for all rows that are long enough.
    ends = np.flatnonzero(~goes_on)
    lengths = np.diff(ends, prepend=-1)
    longest_first = np.argsort(-lengths, kind="stable")
    following = np.zeros(len(ends))
    for back in range(max(lengths, default=0)):
        at = ends[longest_first[: np.count_nonzero(lengths > back)]] - back
        following = deltas[at] + gamma * lam * following[: len(at)]
        advantages[at] = following
    advantages_T, returns_T = np.zeros(len(mask_T)), np.zeros(len(mask_T))
    advantages_T[sampled], returns_T[sampled] = advantages, advantages + values
    return advantages_T, returns_T


def whitened(values_T: np.ndarray, mask_T: np.ndarray, *, eps: float = 1e-8) -> np.ndarray:
    """(x − mean) / √(variance + eps) over all masked-in tokens, 0 elsewhere; unbiased variance, as verl has it."""
    values = values_T[mask_T > 0].astype(np.float64)
    whitened_T = np.zeros(len(values_T))
    if len(values) > 1 and values.min() != values.max():
        whitened_T[mask_T > 0] = (values - values.mean()) / np.sqrt(values.var(ddof=1) + eps)
    return whitened_T


def distillation_advantages(
    teacher_logprobs_T: np.ndarray,
    sampled_logprobs_T: np.ndarray,
    mask_T: np.ndarray,
    *,
    scale: float = 1.0,
    clip: float | None = None,
) -> np.ndarray:
    """A_t = scale · (log π_teacher − log π_sampled), the difference clipped to ± `clip` nats; float64 of shape [T].

    Minus the one-sample estimate of the reverse KL, 0 where nothing was sampled; https://arxiv.org/abs/2306.13649
    """
    difference_T = teacher_logprobs_T.astype(np.float64) - sampled_logprobs_T
    if clip is not None:
        difference_T = difference_T.clip(-clip, clip)
    return np.where(mask_T > 0, scale * difference_T, 0.0)
