"""Advantages are what the papers say, per group, whatever the order, and silent where there is nothing to learn.

The references are written group by group and token by token, in numpy and float64.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as patience
from hypothesis import strategies as st

from settings.advantage import (
    DistillAdvantage,
    GaeAdvantage,
    GrpoAdvantage,
    LeaveOneOutAdvantage,
    OpoAdvantage,
    PassAtKAdvantage,
    ReinforceAdvantage,
    RemaxAdvantage,
)
from trainers.objective.advantages import (
    advantages_of,
    distillation_advantages,
    gae,
    gdpo_advantages,
    group_advantages,
    leave_one_out_advantages,
    opo_advantages,
    pass_at_k_advantages,
    reinforce_advantages,
    remax_advantages,
    reward_metrics,
    rewards_at_end,
    whitened,
)

NULL = math.nan
_PATIENT = patience(deadline=None, max_examples=60)


def _tensor(values: Any) -> torch.Tensor:
    return torch.tensor(np.asarray(values, dtype=np.float64))


def _advantages(rewards: list[float], groups: list[int], **options: Any) -> list[float]:
    return group_advantages(_tensor(rewards), torch.tensor(groups), **{"scale": "std", **options}).tolist()


# GRPO and Dr. GRPO


def test_grpo_on_two_groups_in_closed_form() -> None:
    # One of n right: mean 1/n, variance 1/n. (1, 0): ±0.5 / (√0.5 + eps). (1, 0, 0, 0): std 0.5.
    half = 0.5 / (math.sqrt(0.5) + 1e-4)
    expected = [half, 0.75 / 0.5001, -half, *[-0.25 / 0.5001] * 3]
    assert _advantages([1, 1, 0, 0, 0, 0], [5, 9, 5, 9, 9, 9]) == pytest.approx(expected, rel=1e-12)


def test_grpo_divides_by_the_unbiased_std_plus_eps() -> None:
    # mean 2; std with ddof 1 of (1, 2, 3) is 1.
    assert _advantages([1, 2, 3], [7, 7, 7]) == pytest.approx([-1 / 1.0001, 0, 1 / 1.0001], abs=1e-12)


def test_ddof_and_eps_are_the_callers_choice() -> None:
    # Population variance of (0, 2) is 1.
    assert _advantages([0, 2], [0, 0], ddof=0, eps=1.0) == pytest.approx([-0.5, 0.5])
    assert _advantages([0, 2], [0, 0], ddof=1, eps=0.0) == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)])


def test_dr_grpo_only_centres() -> None:
    assert _advantages([1, 0, 0, 0], [0, 0, 0, 0], scale="none") == [0.75, -0.25, -0.25, -0.25]


def test_batch_scale_divides_by_the_deviation_of_all_rewards() -> None:
    # Rewards 0, 1, 2, 5: mean 2, Σ(r − 2)² = 14; group means 0.5 and 3.5.
    spread = math.sqrt(14 / 3) + 1e-4
    expected = [-0.5 / spread, 0.5 / spread, -1.5 / spread, 1.5 / spread]
    assert _advantages([0, 1, 2, 5], [0, 0, 1, 1], scale="batch") == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("scale", "half"), [("std", 0.5 / (math.sqrt(0.5) + 1e-4)), ("none", 0.5), ("batch", 0.49995)])
def test_a_partial_group_neither_shifts_its_neighbour_nor_learns(scale: str, half: float) -> None:
    assert _advantages([1, 2, 3], [0, 0, 1], scale=scale) == pytest.approx([-half, half, 0], rel=1e-6)


@pytest.mark.parametrize(("scale", "lone"), [("std", 3 / (1 + 1e-4)), ("none", 3.0), ("batch", 3 / (1 + 1e-4))])
def test_a_lone_reward_may_be_its_own_advantage(scale: str, lone: float) -> None:
    # Deviation of 1, 2, 3 is 1, as it is for one reward by verl's convention.
    assert _advantages([1, 2, 3], [0, 0, 1], scale=scale, singleton="reward")[2] == pytest.approx(lone, rel=1e-12)


def test_a_lone_reward_is_never_divided_by_eps_alone() -> None:
    assert _advantages([3, 3], [0, 1], scale="batch", singleton="reward") == pytest.approx([3, 3], rel=1e-3)


# The other estimators by hand


def test_leave_one_out_compares_with_the_others() -> None:
    advantages = leave_one_out_advantages(_tensor([3, 0, 1, 8]), torch.tensor([0, 0, 0, 1]), scale="none")
    assert advantages.tolist() == pytest.approx([3 - 0.5, 0 - 2, 1 - 1.5, 0], abs=1e-12)


def test_leave_one_out_scales_by_the_others_where_they_differ() -> None:
    # Others of the 1: all 0, nothing to scale by. Others of a 0: (1, 0, 0), mean 1/3, std √(1/3).
    advantages = leave_one_out_advantages(_tensor([1, 0, 0, 0]), torch.tensor([0, 0, 0, 0]), scale="std")
    assert advantages.tolist() == pytest.approx([1, *[-(1 / 3) / (math.sqrt(1 / 3) + 1e-6)] * 3], rel=1e-9)


def test_two_attempts_have_no_deviation_to_leave_out() -> None:
    advantages = leave_one_out_advantages(_tensor([1, 0]), torch.tensor([0, 0]), scale="std")
    assert advantages.tolist() == [1.0, -1.0]


def test_reinforce_weighs_attempts_by_their_tokens() -> None:
    # Three tokens of reward 1 and one of reward 0: mean 0.75, variance 3/16.
    advantages = reinforce_advantages(
        _tensor([1, 0]), torch.tensor([0, 1]), lengths_B=_tensor([3, 1]), baseline=False, eps=0.0
    )
    assert advantages.tolist() == pytest.approx([0.25 / math.sqrt(3 / 16), -0.75 / math.sqrt(3 / 16)], rel=1e-12)


def test_reinforce_with_a_baseline_is_silent_where_a_group_agrees() -> None:
    # Centred: ±1 (lengths 3 and 1), 0, 0 (lengths 2 and 2): mean 2/8, variance 4/8 − 1/16.
    advantages = reinforce_advantages(
        _tensor([2, 0, 5, 5]),
        torch.tensor([0, 0, 1, 1]),
        lengths_B=_tensor([3, 1, 2, 2]),
        baseline=True,
        eps=0.0,
    )
    deviation = math.sqrt(0.5 - 1 / 16)
    assert advantages.tolist() == pytest.approx([0.75 / deviation, -1.25 / deviation, 0, 0], rel=1e-12)
    assert advantages[2:].tolist() == [0.0, 0.0]


def test_remax_subtracts_the_greedy_reward_and_needs_both() -> None:
    advantages = remax_advantages(_tensor([1, 0.5, NULL, 1]), _tensor([0.25, 1, 0, NULL]))
    assert advantages.tolist() == [0.75, -0.5, 0.0, 0.0]


def test_opo_weighs_the_baseline_by_length() -> None:
    # (1 · 1 + 3 · 0) / 4 = 0.25.
    advantages = opo_advantages(_tensor([1, 0, 7]), torch.tensor([0, 0, 1]), lengths_B=_tensor([1, 3, 9]))
    assert advantages.tolist() == [0.75, -0.25, 0.0]


def test_gdpo_tells_apart_what_the_sum_of_rewards_does_not() -> None:
    # Sums are (2, 1) and (1, 0): the same group for GRPO. By parts the first pair differs in one, the second in one.
    parts = {"right": _tensor([1, 0, 1, 0]), "short": _tensor([1, 1, 0, 0])}
    groups = torch.tensor([0, 0, 1, 1])
    advantages = gdpo_advantages(_tensor([2, 1, 1, 0]), groups, reward_parts_B=parts, reward_weights={}, eps=0.0)
    # Parts normalised: ±√0.5, and 0; the sum over the batch: mean 0, variance 4 · 0.5 / 3.
    one = math.sqrt(0.5) / math.sqrt(2 / 3)
    assert advantages.tolist() == pytest.approx([one, -one, one, -one], rel=1e-12)
    both = {"right": _tensor([1, 0, 1, 0]), "short": _tensor([1, 0, 0, 0])}
    advantages = gdpo_advantages(_tensor([2, 0, 1, 0]), groups, reward_parts_B=both, reward_weights={}, eps=0.0)
    assert advantages[0] == pytest.approx(2 * float(advantages[2]), rel=1e-12)


def test_pass_at_2_of_4_with_one_right() -> None:
    # 3 of 6 pairs pass: R = 0.5, σ = 0.5. Of a wrong attempt's 3 pairs, 2 fail: 0.5 − 2/3.
    advantages = pass_at_k_advantages(_tensor([0, 1, 0, 0]), torch.tensor([0, 0, 0, 0]), k=2, eps=0.0)
    assert advantages.tolist() == pytest.approx([-1 / 3, 1, -1 / 3, -1 / 3], rel=1e-12)


@pytest.mark.parametrize("rewards", [[0, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]])
def test_pass_at_k_is_silent_where_every_subset_is_alike(rewards: list[float]) -> None:
    assert not pass_at_k_advantages(_tensor(rewards), torch.tensor([0, 0, 0, 0]), k=2, eps=0.0).any()


@pytest.mark.parametrize("k", [2, 3, 7])
def test_a_group_of_at_most_k_attempts_teaches_pass_at_k_nothing(k: int) -> None:
    assert not pass_at_k_advantages(_tensor([1, 0, NULL, NULL, 1]), torch.tensor([0, 0, 0, 0, 1]), k=k).any()


# Against references written from the papers


def _known(rewards: np.ndarray, groups: np.ndarray) -> list[np.ndarray]:
    """The rows of each group that have a reward."""
    return [np.flatnonzero((groups == group) & ~np.isnan(rewards)) for group in np.unique(groups)]


def _grpo(rewards: np.ndarray, groups: np.ndarray, lengths: np.ndarray, scale: str) -> np.ndarray:
    advantages = np.zeros(len(rewards))
    for rows in _known(rewards, groups):
        if len(rows) > 1 and np.ptp(rewards[rows]):
            spread = {"std": lambda: np.std(rewards[rows], ddof=1), "batch": lambda: np.nanstd(rewards, ddof=1)}  # noqa: B023
            advantages[rows] = rewards[rows] - rewards[rows].mean()
            if scale != "none":
                advantages[rows] /= spread[scale]() + 1e-4
    return advantages


def _rloo(rewards: np.ndarray, groups: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """As verl writes it: r · n / (n − 1) − mean · n / (n − 1)."""
    advantages = np.zeros(len(rewards))
    for rows in _known(rewards, groups):
        if (n := len(rows)) > 1:
            advantages[rows] = rewards[rows] * n / (n - 1) - rewards[rows].mean() * n / (n - 1)
    return advantages


def _leave_one_out_std(rewards: np.ndarray, groups: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    advantages = np.zeros(len(rewards))
    for rows in _known(rewards, groups):
        for row in rows if len(rows) > 1 else ():
            others = rewards[rows[rows != row]]
            scale = np.std(others, ddof=1) + 1e-6 if len(others) > 1 and np.ptp(others) else 1.0
            advantages[row] = (rewards[row] - others.mean()) / scale
    return advantages


def _reinforce(rewards: np.ndarray, groups: np.ndarray, lengths: np.ndarray, baseline: bool) -> np.ndarray:
    """One entry per sampled token, whitened over all of them."""
    centred, silent = rewards.copy(), np.isnan(rewards)
    for rows in _known(rewards, groups) if baseline else ():
        if len(rows) and not np.ptp(rewards[rows]):
            centred[rows], silent[rows] = 0.0, True
        elif len(rows):
            centred[rows] -= rewards[rows].mean()
    tokens = np.repeat(centred, lengths)
    tokens = tokens[~np.isnan(tokens)]
    if not len(tokens) or not np.ptp(tokens):
        return np.zeros(len(rewards))
    return np.where(silent, 0.0, (centred - tokens.mean()) / (tokens.std() + 1e-8))


def _opo(rewards: np.ndarray, groups: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    advantages = np.zeros(len(rewards))
    for rows in _known(rewards, groups):
        if len(rows) and np.ptp(rewards[rows]):
            advantages[rows] = rewards[rows] - (lengths[rows] * rewards[rows]).sum() / lengths[rows].sum()
    return advantages


def _pass_at_k(rewards: np.ndarray, groups: np.ndarray, lengths: np.ndarray, k: int) -> np.ndarray:
    """By counting: each k-subset is a draw that passes or fails; normalised over draws, averaged over an attempt's."""
    advantages = np.zeros(len(rewards))
    for rows in _known(rewards, groups):
        subsets = list(itertools.combinations(rows, k))
        passes = np.array([max(rewards[row] > 0.5 for row in subset) for subset in subsets], dtype=np.float64)
        for row in rows if len(subsets) and np.ptp(passes) else ():
            mine = [row in subset for subset in subsets]
            advantages[row] = (passes[mine].mean() - passes.mean()) / (passes.std() + 1e-6)
    return advantages


_Reference = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
_Ours = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_ESTIMATORS: dict[str, tuple[_Ours, _Reference]] = {
    **{
        f"grpo {scale}": (
            lambda r, g, _, scale=scale: group_advantages(r, g, scale=scale),
            lambda r, g, n, scale=scale: _grpo(r, g, n, scale),
        )
        for scale in ("std", "batch", "none")
    },
    "rloo": (lambda r, g, _: leave_one_out_advantages(r, g, scale="none"), _rloo),
    "leave one out std": (lambda r, g, _: leave_one_out_advantages(r, g, scale="std"), _leave_one_out_std),
    **{
        f"reinforce++ baseline {baseline}": (
            lambda r, g, n, baseline=baseline: reinforce_advantages(r, g, lengths_B=n, baseline=baseline),
            lambda r, g, n, baseline=baseline: _reinforce(r, g, n, baseline),
        )
        for baseline in (False, True)
    },
    "opo": (lambda r, g, n: opo_advantages(r, g, lengths_B=n), _opo),
    **{
        f"pass@{k}": (
            lambda r, g, _, k=k: pass_at_k_advantages(r, g, k=k),
            lambda r, g, n, k=k: _pass_at_k(r, g, n, k),
        )
        for k in (1, 2, 3)
    },
}
_BY_NAME = pytest.mark.parametrize("name", _ESTIMATORS)
_RELATIVE_TO_THE_GROUP = pytest.mark.parametrize("name", [name for name in _ESTIMATORS if name[-5:] != "False"])
_ALONE_IN_THE_GROUP = pytest.mark.parametrize(
    "name", [name for name in _ESTIMATORS if "batch" not in name and "reinforce" not in name]
)

_REWARDS = st.integers(-8, 8).map(lambda eighths: eighths / 8) | st.sampled_from([0.0, 1.0, NULL])
_ATTEMPTS = st.lists(st.tuples(_REWARDS, st.integers(-1, 2), st.integers(1, 9)), min_size=1, max_size=14)
_Attempts = list[tuple[float, int, int]]


def _columns(attempts: _Attempts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rewards, groups, lengths = zip(*attempts, strict=True)
    return np.array(rewards), np.array(groups), np.array(lengths)


def _ours(name: str, attempts: _Attempts) -> np.ndarray:
    rewards, groups, lengths = _columns(attempts)
    return _ESTIMATORS[name][0](_tensor(rewards), torch.from_numpy(groups), torch.from_numpy(lengths)).numpy()


@_BY_NAME
@_PATIENT
@given(_ATTEMPTS)
def test_it_equals_the_formula_taken_group_by_group(name: str, attempts: _Attempts) -> None:
    np.testing.assert_allclose(_ours(name, attempts), _ESTIMATORS[name][1](*_columns(attempts)), rtol=1e-8, atol=1e-9)


@_BY_NAME
@_PATIENT
@given(_ATTEMPTS, st.randoms(use_true_random=False))
def test_the_order_of_the_attempts_does_not_matter(name: str, attempts: _Attempts, draw: Any) -> None:
    order = list(range(len(attempts)))
    draw.shuffle(order)
    shuffled = _ours(name, [attempts[i] for i in order])
    np.testing.assert_allclose(shuffled, _ours(name, attempts)[order], rtol=1e-8, atol=1e-9)


@_BY_NAME
@_PATIENT
@given(_ATTEMPTS, st.integers(-3, 3))
def test_a_constant_added_to_all_rewards_changes_nothing(name: str, attempts: _Attempts, shift: int) -> None:
    if name.startswith("pass@"):
        shift = 0  # it asks which rewards are above the threshold
    shifted = [(reward + shift, group, length) for reward, group, length in attempts]
    np.testing.assert_allclose(_ours(name, shifted), _ours(name, attempts), rtol=1e-8, atol=1e-9)


@_ALONE_IN_THE_GROUP
@_PATIENT
@given(_ATTEMPTS)
def test_a_group_does_not_feel_its_neighbours(name: str, attempts: _Attempts) -> None:
    together = _ours(name, attempts)
    for group in {group for _, group, _ in attempts}:
        rows = [i for i, attempt in enumerate(attempts) if attempt[1] == group]
        np.testing.assert_allclose(_ours(name, [attempts[i] for i in rows]), together[rows], rtol=1e-8, atol=1e-9)


@_BY_NAME
@_PATIENT
@given(_ATTEMPTS)
def test_a_null_reward_gets_0_and_is_as_good_as_absent(name: str, attempts: _Attempts) -> None:
    advantages = _ours(name, attempts)
    present = [i for i, attempt in enumerate(attempts) if not math.isnan(attempt[0])]
    assert not advantages[[i for i in range(len(attempts)) if i not in present]].any()
    if present:
        expected = _ours(name, [attempts[i] for i in present])
        np.testing.assert_allclose(advantages[present], expected, rtol=1e-8, atol=1e-9)


@_RELATIVE_TO_THE_GROUP
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_are_exactly_0_whatever_their_mean_rounds_to(name: str, dtype: torch.dtype) -> None:
    for size, reward in itertools.product([1, 2, 3, 7, 12], [0.0, 1.0, 0.1, 0.3, 0.1 + 0.2, 1 / 3, 1e6 + 0.1]):
        rewards = torch.tensor([reward] * size + [0.0, 1.0], dtype=dtype)
        groups, lengths = torch.tensor([0] * size + [1, 1]), torch.arange(1, size + 3)
        advantages = _ESTIMATORS[name][0](rewards, groups, lengths)
        assert advantages.dtype == dtype
        assert not advantages[:size].any(), (size, reward)


@_BY_NAME
def test_a_batch_of_equal_rewards_is_exactly_0(name: str) -> None:
    for reward in (0.1 + 0.2, 1 / 3, 0.1, 1e6 + 0.1):
        assert not _ours(name, [(reward, group, length) for group, length in [(0, 3), (0, 1), (0, 1), (1, 7)]]).any()


@_BY_NAME
def test_rewards_that_differ_by_rounding_only_never_explode(name: str) -> None:
    advantages = _ours(name, [(0.1 + 0.2, 0, 1), (0.3, 0, 2), (0.3, 0, 2), (0.3, 1, 1), (1.3, 1, 1)])
    assert np.abs(advantages).max() < 2.5


@_BY_NAME
def test_nothing_in_nothing_out(name: str) -> None:
    nothing, none = torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.int64)
    assert _ESTIMATORS[name][0](nothing, none, none).tolist() == []


@pytest.mark.parametrize("name", [name for name in _ESTIMATORS if "opo" not in name and "reinforce" not in name])
@_PATIENT
@given(_ATTEMPTS)
def test_every_group_sums_to_0(name: str, attempts: _Attempts) -> None:
    if name == "leave one out std":
        attempts = [(reward, group, 1) for reward, group, _ in attempts[:2]]  # in pairs it is not scaled
    advantages = _ours(name, attempts)
    for group in {group for _, group, _ in attempts}:
        assert sum(a for a, (_, g, _) in zip(advantages, attempts, strict=True) if g == group) == pytest.approx(
            0, abs=1e-9
        )


@_PATIENT
@given(_ATTEMPTS)
def test_opo_sums_to_0_over_the_tokens_of_every_group(attempts: _Attempts) -> None:
    advantages, (_, groups, lengths) = _ours("opo", attempts), _columns(attempts)
    for group in np.unique(groups):
        rows = np.flatnonzero((groups == group) & (advantages != 0))
        assert (advantages * lengths)[rows].sum() == pytest.approx(0, abs=1e-9)


def test_pass_at_1_is_grpo_of_the_population() -> None:
    rewards, groups = _tensor([1, 0, 0, 1, 0, 0, 0]), torch.tensor([0, 0, 0, 1, 1, 1, 1])
    expected = group_advantages(rewards, groups, scale="std", ddof=0, eps=1e-6)
    torch.testing.assert_close(pass_at_k_advantages(rewards, groups, k=1), expected, rtol=1e-12, atol=0)


# GDPO, and TRL

_PARTS = st.lists(st.tuples(_REWARDS, _REWARDS), min_size=8, max_size=8)


def _gdpo(parts: np.ndarray, weights: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """`parts` has shape [B, K], NaN where null."""
    sums, silent = np.zeros(len(parts)), np.isnan(parts).all(axis=1)
    for rows in (np.flatnonzero(groups == group) for group in np.unique(groups)):
        for rewards, weight in zip(parts[rows].T, weights, strict=True):
            known = ~np.isnan(rewards)
            if known.sum() > 1 and np.ptp(rewards[known]):
                normal = (rewards[known] - rewards[known].mean()) / (rewards[known].std(ddof=1) + 1e-4)
                sums[rows[known]] += weight * normal
        silent[rows] |= not sums[rows].any()
    scored = sums[~np.isnan(parts).all(axis=1)]
    if not np.ptp(np.append(scored, 0)):
        return np.zeros(len(parts))
    return np.where(silent, 0.0, (sums - scored.mean()) / (scored.std(ddof=1) + 1e-4))


def _trl_normalize_then_sum(parts: torch.Tensor, weights: torch.Tensor, groups: int) -> torch.Tensor:
    """What trl.GRPOTrainer does under `multi_objective_aggregation="normalize_then_sum"`, by its own `nanstd`."""
    from trl.trainer.utils import nanstd

    grouped = parts.unflatten(0, (groups, -1))
    normal = (grouped - grouped.nanmean(dim=1, keepdim=True)) / (nanstd(grouped, dim=1, keepdim=True) + 1e-4)
    sums = torch.where(parts.isnan().all(dim=1), torch.nan, (normal.flatten(0, 1) * weights).nansum(dim=1))
    return ((sums - sums.nanmean()) / (nanstd(sums) + 1e-4)).nan_to_num(nan=0.0)


@_PATIENT
@given(_PARTS, st.lists(st.integers(0, 2), min_size=8, max_size=8))
def test_gdpo_equals_its_formula(parts: list[tuple[float, float]], groups: list[int]) -> None:
    both = np.array(parts)
    ours = gdpo_advantages(
        torch.where(_tensor(both).isnan().all(dim=1), torch.nan, _tensor(both).nansum(dim=1)),
        torch.tensor(groups),
        reward_parts_B={"right": _tensor(both[:, 0]), "short": _tensor(both[:, 1])},
        reward_weights={"short": 0.5},
    )
    np.testing.assert_allclose(ours, _gdpo(both, np.array([1.0, 0.5]), np.array(groups)), rtol=1e-8, atol=1e-9)


@_PATIENT
@given(_PARTS)
def test_gdpo_equals_trls_normalize_then_sum(parts: list[tuple[float, float]]) -> None:
    pytest.importorskip("trl")
    both = _tensor(parts)
    weights = {"right": 1.0, "short": 0.5}
    rewards = torch.where(both.isnan().all(dim=1), torch.nan, both.nansum(dim=1))
    ours = gdpo_advantages(
        rewards,
        torch.arange(2).repeat_interleave(4),
        reward_parts_B={"right": both[:, 0], "short": both[:, 1]},
        reward_weights=weights,
    )
    theirs = _trl_normalize_then_sum(both, _tensor([1.0, 0.5]), 2)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_gdpo_leaves_null_parts_and_parts_of_weight_0_out() -> None:
    rewards, groups = _tensor([1, 0, 1, NULL]), torch.tensor([0, 0, 0, 0])
    parts = {"right": _tensor([1, 0, 1, 1]), "style": _tensor([NULL, NULL, NULL, NULL])}
    alone = gdpo_advantages(rewards, groups, reward_parts_B={"right": parts["right"]}, reward_weights={})
    assert gdpo_advantages(rewards, groups, reward_parts_B=parts, reward_weights={}).tolist() == alone.tolist()
    assert alone[3] == 0
    parts["style"] = _tensor([5, 1, 2, 3])
    weightless = gdpo_advantages(rewards, groups, reward_parts_B=parts, reward_weights={"style": 0.0})
    assert weightless.tolist() == alone.tolist()


def test_gdpo_is_silent_where_no_part_differs() -> None:
    parts = {"right": _tensor([1, 0, 0.3, 0.3]), "short": _tensor([0, 1, 0.1, 0.1])}
    advantages = gdpo_advantages(
        _tensor([1, 1, 0.4, 0.4]), torch.tensor([0, 0, 1, 1]), reward_parts_B=parts, reward_weights={"short": 3.0}
    )
    assert advantages[:2].all()
    assert not advantages[2:].any()


def test_gdpo_does_not_let_the_batch_mean_move_a_group_without_a_difference() -> None:
    # The lone reward of group 2 stands for itself, and so the batch mean is not 0.
    parts = {"right": _tensor([1, 0, 0.3, 0.3, 9])}
    groups = torch.tensor([0, 0, 1, 1, 2])
    advantages = gdpo_advantages(
        parts["right"], groups, reward_parts_B=parts, reward_weights={}, scale="none", eps=0.0, singleton="reward"
    )
    # Sums 0.5, −0.5, 0, 0, 9: mean 1.8.
    deviation = math.sqrt((1.3**2 + 2.3**2 + 1.8**2 * 2 + 7.2**2) / 4)
    expected = [-1.3 / deviation, -2.3 / deviation, 0, 0, 7.2 / deviation]
    assert advantages.tolist() == pytest.approx(expected, rel=1e-12)
    assert advantages[2:4].tolist() == [0.0, 0.0]


def test_trl_and_we_agree_on_grpo_and_rloo() -> None:
    nanstd = pytest.importorskip("trl.trainer.utils").nanstd
    rewards = _tensor([[1, 0, 0, NULL], [0.25, 0.5, 1, 2], [NULL, NULL, 3, NULL], [1, 1, 1, 1]])
    groups = torch.arange(4).repeat_interleave(4)
    centred = rewards - rewards.nanmean(dim=1, keepdim=True)
    for scale, spread in (("std", nanstd(rewards, dim=1, keepdim=True)), ("batch", nanstd(rewards))):
        theirs = (centred / (spread + 1e-4)).nan_to_num(nan=0.0).flatten()
        ours = group_advantages(rewards.flatten(), groups, scale=scale)
        # Their Bessel correction is a float32 quotient of counts.
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)
    counts = (~rewards.isnan()).sum(dim=1, keepdim=True)
    baselines = (rewards.nansum(dim=1, keepdim=True) - rewards) / (counts - 1)
    theirs = (rewards - baselines).nan_to_num(nan=0.0).flatten()
    ours = leave_one_out_advantages(rewards.flatten(), groups, scale="none")
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


# Generalised advantage estimation


def test_gae_golden_vector() -> None:
    # γ = 0.9, λ = 0.5; V = 1, 2, 3; r = 0, 0, 4.
    # δ = 0 + 0.9·2 − 1 = 0.8; 0 + 0.9·3 − 2 = 0.7; 4 − 3 = 1. A_3 = 1; A_2 = 0.7 + 0.45 = 1.15; A_1 = 0.8 + 0.5175.
    advantages, returns = gae(
        np.array([0.0, 0, 4]), np.array([1.0, 2, 3]), np.ones(3, bool), np.array([0, 3]), gamma=0.9, lam=0.5
    )
    np.testing.assert_allclose(advantages, [1.3175, 1.15, 1.0], rtol=1e-12)
    np.testing.assert_allclose(returns, [2.3175, 3.15, 4.0], rtol=1e-12)


def test_gae_goes_from_sampled_token_to_sampled_token_and_stops_at_the_row() -> None:
    # Row 1: prompt, sampled, tool, tool, sampled. Row 2: prompt, sampled. What stands at the others is not looked at.
    junk = 77.0
    rewards = np.array([junk, 0, junk, junk, 1, junk, 2])
    values = np.array([junk, 0.5, junk, junk, 0.25, junk, 1])
    mask = np.array([0, 1, 0, 0, 1, 0, 1], bool)
    advantages, returns = gae(rewards, values, mask, np.array([0, 5, 7]), gamma=1.0, lam=0.5)
    # Row 1: δ = 0.25 − 0.5, 1 − 0.25; A = −0.25 + 0.5 · 0.75, 0.75. Row 2: 2 − 1.
    np.testing.assert_allclose(advantages, [0, 0.125, 0, 0, 0.75, 0, 1], rtol=1e-12)
    np.testing.assert_allclose(returns, [0, 0.625, 0, 0, 1, 0, 2], rtol=1e-12)


def _gae_by_the_sum(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, offsets: np.ndarray, gamma: float, lam: float
) -> np.ndarray:
    """Eq. 16 of the paper as it stands: A_t = Σ_l (γλ)^l δ_{t+l}, row by row."""
    advantages = np.zeros(len(mask))
    for start, stop in itertools.pairwise(offsets):
        tokens = start + np.flatnonzero(mask[start:stop])
        after = np.append(values[tokens[1:]], 0.0)[: len(tokens)]
        deltas = rewards[tokens] + gamma * after - values[tokens]
        for t, token in enumerate(tokens):
            advantages[token] = sum((gamma * lam) ** i * delta for i, delta in enumerate(deltas[t:]))
    return advantages


@_PATIENT
@given(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=6),
    st.integers(0, 2**31),
    st.sampled_from([1.0, 0.9]),
    st.sampled_from([0.0, 0.95, 1.0]),
)
def test_gae_equals_the_sum_it_is_defined_by(rows: list[list[bool]], seed: int, gamma: float, lam: float) -> None:
    draw = np.random.default_rng(seed)
    mask = np.array([token for row in rows for token in row])
    offsets = np.cumsum([0, *map(len, rows)])
    rewards, values = draw.normal(size=len(mask)), draw.normal(size=len(mask))
    advantages, returns = gae(rewards, values, mask, offsets, gamma=gamma, lam=lam)
    expected = _gae_by_the_sum(rewards, values, mask, offsets, gamma, lam)
    np.testing.assert_allclose(advantages, expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(returns, np.where(mask, expected + values, 0), rtol=1e-10, atol=1e-12)


def test_with_lambda_and_gamma_1_the_return_is_the_reward() -> None:
    mask, offsets = np.array([0, 1, 1, 0, 1, 1, 1], bool), np.array([0, 5, 7])
    rewards = rewards_at_end(np.array([0.5, 3.0]), mask, offsets)
    _, returns = gae(rewards, np.random.default_rng(0).normal(size=7), mask, offsets, gamma=1.0, lam=1.0)
    np.testing.assert_allclose(returns, [0, 0.5, 0.5, 0, 0.5, 3, 3], rtol=1e-12)


def test_the_reward_stands_at_the_last_sampled_token() -> None:
    mask = np.array([0, 1, 1, 0, 0, 0, 1, 1], bool)
    rewards = rewards_at_end(np.array([2.0, 5.0, 3.0]), mask, np.array([0, 4, 6, 8]))
    assert rewards.tolist() == [0, 0, 2, 0, 0, 0, 0, 3]


def test_gae_of_nothing_is_nothing() -> None:
    advantages, returns = gae(np.ones(3), np.ones(3), np.zeros(3, bool), np.array([0, 3]), gamma=1.0, lam=1.0)
    assert not advantages.any() and not returns.any()


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_gae_names_the_row_whose_reward_or_value_is_broken(broken: float) -> None:
    fine, mask, offsets = np.zeros(4), np.ones(4, bool), np.array([0, 2, 4])
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        gae(np.array([0, 0, 0, broken]), fine, mask, offsets, gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match=r"rows \[0\]"):
        gae(fine, np.array([broken, 0, 0, 0]), mask, offsets, gamma=1.0, lam=1.0)


def test_whitening_is_over_the_trained_tokens_alone() -> None:
    values, mask = np.array([1.0, 99, 2, 3, -50]), np.array([1, 0, 1, 1, 0], bool)
    expected = np.array([-1, 0, 0, 1, 0]) / math.sqrt(1 + 1e-8)
    np.testing.assert_allclose(whitened(values, mask), expected, rtol=1e-12)


@pytest.mark.parametrize("values", [[0.3, 0.3, 0.1 + 0.2], [5.0, 5, 5], [7.0]])
def test_whitening_invents_no_difference(values: list[float]) -> None:
    assert np.abs(whitened(np.array(values), np.ones(len(values), bool))).max() < 1e-9


# Distillation


def test_distillation_goes_to_where_the_teacher_is_surer() -> None:
    teacher, sampled = np.log([0.5, 0.1, 1e-9, 0.3]), np.log([0.25, 0.2, 0.5, 0.9])
    mask = np.array([1, 1, 1, 0], bool)
    advantages = distillation_advantages(teacher, sampled, mask, scale=2.0, clip=5.0)
    np.testing.assert_allclose(advantages, [2 * math.log(2), -2 * math.log(2), -10, 0], rtol=1e-12)
    unbounded = distillation_advantages(teacher, sampled, mask)
    np.testing.assert_allclose(unbounded, [math.log(2), -math.log(2), math.log(2e-9), 0], rtol=1e-12)


# By settings


def _of(settings: Any, rewards: list[float], groups: list[int], **named: Any) -> Any:
    given_parts = named.get("parts", {})
    return advantages_of(
        settings,
        _tensor(rewards),
        torch.tensor(groups),
        lengths_B=_tensor(named.get("lengths", [1] * len(rewards))),
        reward_parts_B={name: _tensor(part) for name, part in given_parts.items()},
        reward_weights=named.get("weights", {}),
    )


def test_each_kind_of_settings_reaches_its_formula_with_all_its_values() -> None:
    rewards, groups, lengths = [1.0, 0.0, 0.5, 2.0, 0.0, 9.0], [0, 0, 0, 1, 1, 2], [1, 2, 3, 4, 5, 6]
    r, g, n = _tensor(rewards), torch.tensor(groups), _tensor(lengths)
    parts = {"a": [1, 0, 0.5, 1, 0, 9], "b": [0, 0, 0, 1, 0, 0]}
    tensors, weights = {name: _tensor(part) for name, part in parts.items()}, {"b": 2.0}
    grpo: dict[str, Any] = {"scale": "batch", "ddof": 0, "eps": 0.5, "singleton": "reward"}
    cases = [
        (GrpoAdvantage(**grpo), group_advantages(r, g, **grpo)),
        (
            GrpoAdvantage(**grpo, per_reward=True),
            gdpo_advantages(r, g, reward_parts_B=tensors, reward_weights=weights, **grpo),
        ),
        (LeaveOneOutAdvantage(scale="std", eps=0.5), leave_one_out_advantages(r, g, scale="std", eps=0.5)),
        (
            ReinforceAdvantage(baseline=True, eps=0.5),
            reinforce_advantages(r, g, lengths_B=n, baseline=True, eps=0.5),
        ),
        (RemaxAdvantage(baseline_part="b"), remax_advantages(r, tensors["b"])),
        (OpoAdvantage(), opo_advantages(r, g, lengths_B=n)),
        (
            PassAtKAdvantage(k=2, threshold=0.7, eps=0.5),
            pass_at_k_advantages(r, g, k=2, threshold=0.7, eps=0.5),
        ),
    ]
    for settings, expected in cases:
        found = _of(settings, rewards, groups, lengths=lengths, parts=parts, weights=weights)
        assert found.any(), settings
        assert found.tolist() == expected.tolist(), settings


def test_every_option_of_the_settings_is_an_argument_of_its_formula() -> None:
    for settings, function in (
        (GrpoAdvantage, group_advantages),
        (LeaveOneOutAdvantage, leave_one_out_advantages),
        (ReinforceAdvantage, reinforce_advantages),
        (PassAtKAdvantage, pass_at_k_advantages),
        (GaeAdvantage, gae),
        (DistillAdvantage, distillation_advantages),
    ):
        options = set(settings.model_fields) - {"kind", "per_reward", "whiten"}
        assert options <= set(inspect.signature(function).parameters)


@pytest.mark.parametrize("settings", [GaeAdvantage(), DistillAdvantage()])
def test_kinds_with_an_advantage_per_token_give_none_per_attempt(settings: Any) -> None:
    assert _of(settings, [1, 0], [0, 0]).isnan().all()


@pytest.mark.parametrize("settings", [GrpoAdvantage(), GaeAdvantage(), OpoAdvantage(), RemaxAdvantage()])
def test_a_batch_without_any_reward_is_refused_with_what_to_change(settings: Any) -> None:
    with pytest.raises(ValueError, match="all 2 rewards are null.*a number.*millrace rollout once"):
        _of(settings, [NULL, NULL], [0, 0])


def test_distillation_needs_no_reward() -> None:
    assert _of(DistillAdvantage(), [NULL, NULL], [0, 0]).isnan().all()


def test_a_missing_part_is_named_with_those_that_are_there() -> None:
    with pytest.raises(ValueError, match=r'baseline_part = "greedy".*parts here: right, short'):
        _of(RemaxAdvantage(baseline_part="greedy"), [1, 0], [0, 0], parts={"right": [1, 0], "short": [0, 0]})
    with pytest.raises(ValueError, match=r"per_reward needs named rewards.*parts here: none"):
        _of(GrpoAdvantage(per_reward=True), [1, 0], [0, 0])


def test_reward_metrics_are_over_what_is_known() -> None:
    metrics = reward_metrics(
        torch.tensor([1.0, 0.0, NULL, 2.0, 2.0, 5.0, NULL]),
        torch.tensor([0, 0, 0, 1, 1, 2, 3]),
        reward_parts_B={"right": _tensor([1, 0, 1, NULL, 1, 1, NULL]), "style": _tensor([NULL] * 7)},
    )
    # Rewards 1, 0, 2, 2, 5: mean 2, Σ(r − 2)² = 14. Of four groups only the first has two rewards that differ.
    assert metrics == pytest.approx(
        {
            "reward": 2.0,
            "reward_std": math.sqrt(14 / 4),
            "null_reward_fraction": 2 / 7,
            "fraction_groups_without_signal": 0.75,
            "reward/right": 0.8,
        }
    )


def test_one_reward_has_no_spread() -> None:
    assert reward_metrics(_tensor([3]), torch.tensor([0]), reward_parts_B={})["reward_std"] == 0.0
