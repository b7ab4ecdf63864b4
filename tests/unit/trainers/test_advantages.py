"""Advantages are what the papers say, per group, whatever the order, and silent where there is nothing to learn."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainers.advantages import group_advantages


def _advantages(rewards: list[float], groups: list[int], **options: object) -> list[float]:
    options = {"scale": "std", **options}
    return group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), **options).tolist()


def test_grpo_divides_by_the_unbiased_std_plus_eps() -> None:
    # mean 2; std with ddof 1 of (1, 2, 3) is 1.
    assert _advantages([1, 2, 3], [7, 7, 7]) == pytest.approx([-1 / 1.0001, 0, 1 / 1.0001], abs=1e-12)
    # mean 0.25; variance (3 · 0.0625 + 0.5625) / 3 = 0.25, std 0.5.
    expected = [0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001]
    assert _advantages([1, 0, 0, 0], [0, 0, 0, 0]) == pytest.approx(expected, abs=1e-12)


def test_ddof_and_eps_are_the_callers_choice() -> None:
    # Population variance of (0, 2) is 1.
    assert _advantages([0, 2], [0, 0], ddof=0, eps=1.0) == pytest.approx([-0.5, 0.5])
    assert _advantages([0, 2], [0, 0], ddof=1, eps=0.0) == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)])


def test_dr_grpo_only_centres() -> None:
    assert _advantages([1, 0, 0, 0], [0, 0, 0, 0], scale="none") == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize(("scale", "half"), [("std", 0.5 / (math.sqrt(0.5) + 1e-4)), ("none", 0.5)])
def test_a_partial_group_neither_shifts_its_neighbour_nor_learns(scale: str, half: float) -> None:
    assert _advantages([1, 2, 3], [0, 0, 1], scale=scale) == pytest.approx([-half, half, 0], abs=1e-12)


@pytest.mark.parametrize("scale", ["std", "none"])
def test_nan_enters_neither_mean_nor_std_and_gets_0(scale: str) -> None:
    with_nan = _advantages([1, math.nan, 2, math.nan], [0, 0, 0, 1], scale=scale)
    assert [with_nan[0], with_nan[2]] == _advantages([1, 2], [0, 0], scale=scale)
    assert with_nan[1] == with_nan[3] == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 0.3, 0.1 + 0.2, 1 / 3, 1e6 + 0.1])
@pytest.mark.parametrize("size", [2, 3, 7, 49])
def test_equal_rewards_are_exactly_0_whatever_their_mean_rounds_to(
    size: int, reward: float, scale: str, dtype: torch.dtype
) -> None:
    rewards = torch.full((size,), reward, dtype=dtype)
    assert not group_advantages(rewards, torch.zeros(size, dtype=torch.int64), scale=scale).any()


def test_rewards_that_differ_by_rounding_only_give_next_to_nothing() -> None:
    assert _advantages([0.1 + 0.2, 0.3], [0, 0]) == pytest.approx([0, 0], abs=1e-9)


def test_nothing_in_nothing_out() -> None:
    assert _advantages([], []) == []


_REWARDS = st.floats(-10, 10, allow_nan=False).map(lambda value: round(value, 3)) | st.just(math.nan)
_ATTEMPTS = st.lists(st.tuples(_REWARDS, st.integers(-2, 4)), min_size=1, max_size=24)


def _reference(rewards: np.ndarray, groups: np.ndarray, scale: str) -> np.ndarray:
    """The formula group by group, in numpy and float64."""
    advantages = np.zeros(len(rewards))
    for group in np.unique(groups):
        rows = np.flatnonzero((groups == group) & ~np.isnan(rewards))
        if len(rows) > 1:
            spread = np.std(rewards[rows], ddof=1) + 1e-4 if scale == "std" else 1.0
            advantages[rows] = (rewards[rows] - np.mean(rewards[rows])) / spread
    return advantages


@pytest.mark.parametrize("scale", ["std", "none"])
@given(_ATTEMPTS)
def test_it_equals_the_formula_taken_group_by_group(scale: str, attempts: list[tuple[float, int]]) -> None:
    rewards, groups = [r for r, _ in attempts], [g for _, g in attempts]
    expected = _reference(np.array(rewards), np.array(groups), scale)
    assert _advantages(rewards, groups, scale=scale) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("scale", ["std", "none"])
@given(_ATTEMPTS, st.randoms(use_true_random=False))
def test_the_order_of_the_attempts_does_not_matter(scale: str, attempts: list[tuple[float, int]], draw: object) -> None:
    order = list(range(len(attempts)))
    draw.shuffle(order)  # type: ignore[attr-defined]
    rewards, groups = [r for r, _ in attempts], [g for _, g in attempts]
    shuffled = _advantages([rewards[i] for i in order], [groups[i] for i in order], scale=scale)
    in_order = _advantages(rewards, groups, scale=scale)
    assert shuffled == pytest.approx([in_order[i] for i in order], abs=1e-9)


@pytest.mark.parametrize("scale", ["std", "none"])
@given(_ATTEMPTS)
def test_every_group_sums_to_0(scale: str, attempts: list[tuple[float, int]]) -> None:
    groups = [g for _, g in attempts]
    advantages = _advantages([r for r, _ in attempts], groups, scale=scale)
    for group in set(groups):
        assert sum(a for a, g in zip(advantages, groups, strict=True) if g == group) == pytest.approx(0, abs=1e-9)
