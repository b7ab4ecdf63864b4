"""Advantages are what the papers say, per group, whatever the order, and silent where there is nothing to learn.

The references are written group by group and token by token, in numpy and float64.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from functools import partial
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


_HALF, _EPS, _THIRD = math.sqrt(0.5), 1e-4, 1 / 3
_Case = tuple[Callable[..., torch.Tensor], list[float], list[int], list[float]]
_GRPO_BY_HAND: dict[str, _Case] = {
    # One of n right: mean 1/n, variance 1/n. (1, 0): ±0.5 / (√0.5 + eps). (1, 0, 0, 0): std 0.5.
    "two groups": (
        group_advantages,
        [1, 1, 0, 0, 0, 0],
        [5, 9, 5, 9, 9, 9],
        [0.5 / (_HALF + _EPS), 0.75 / (0.5 + _EPS), -0.5 / (_HALF + _EPS), *[-0.25 / (0.5 + _EPS)] * 3],
    ),
    # mean 2; std with ddof 1 of (1, 2, 3) is 1.
    "unbiased std plus eps": (group_advantages, [1, 2, 3], [7, 7, 7], [-1 / 1.0001, 0, 1 / 1.0001]),
    # Population variance of (0, 2) is 1.
    "ddof 0": (partial(group_advantages, ddof=0, eps=1.0), [0, 2], [0, 0], [-0.5, 0.5]),
    "eps 0": (partial(group_advantages, ddof=1, eps=0.0), [0, 2], [0, 0], [-_HALF, _HALF]),
    "dr. grpo": (partial(group_advantages, scale="none"), [1, 0, 0, 0], [0] * 4, [0.75, *[-0.25] * 3]),
    # Rewards 0, 1, 2, 5: mean 2, Σ(r − 2)² = 14; group means 0.5 and 3.5.
    "by the batch": (
        partial(group_advantages, scale="batch"),
        [0, 1, 2, 5],
        [0, 0, 1, 1],
        [x / (math.sqrt(14 / 3) + _EPS) for x in (-0.5, 0.5, -1.5, 1.5)],
    ),
    "a lone reward is never divided by eps alone": (
        partial(group_advantages, scale="batch", singleton="reward"),
        [3, 3],
        [0, 1],
        [3 / 1.0001] * 2,
    ),
}
# A group of one beside another. The deviation of 1, 2, 3 is 1, as it is for one reward by verl's convention.
for _scale, _half, _lone in (("std", _HALF, 1.0), ("none", 1.0, 1.0), ("batch", 1.0, 1.0)):
    for _singleton in ("zero", "reward"):
        _eps = 0 if _scale == "none" else _EPS
        _pair, _last = 0.5 / (_half + _eps), 3 / (_lone + _eps) if _singleton == "reward" else 0
        _formula = partial(group_advantages, scale=_scale, singleton=_singleton)
        _GRPO_BY_HAND[f"a group of one, by {_scale}, {_singleton}"] = (
            _formula,
            [1, 2, 3],
            [0, 0, 1],
            [-_pair, _pair, _last],
        )
_BY_HAND: dict[str, _Case] = {
    "rloo": (partial(leave_one_out_advantages, scale="none"), [3, 0, 1, 8], [0, 0, 0, 1], [2.5, -2, -0.5, 0]),
    # Others of the 1: all 0, nothing to scale by. Others of a 0: (1, 0, 0), mean 1/3, std √(1/3).
    "leave one out, scaled where the others differ": (
        partial(leave_one_out_advantages, scale="std"),
        [1, 0, 0, 0],
        [0] * 4,
        [1, *[-_THIRD / (math.sqrt(_THIRD) + 1e-6)] * 3],
    ),
    "no deviation to leave out": (partial(leave_one_out_advantages, scale="std"), [1, 0], [0, 0], [1, -1]),
    # Three tokens of reward 1 and one of reward 0: mean 0.75, variance 3/16.
    "reinforce++ weighs attempts by their tokens": (
        partial(reinforce_advantages, lengths_B=_tensor([3, 1]), baseline=False, eps=0.0),
        [1, 0],
        [0, 1],
        [0.25 / math.sqrt(3 / 16), -0.75 / math.sqrt(3 / 16)],
    ),
    # Centred: ±1 (lengths 3 and 1), 0, 0 (lengths 2 and 2): mean 2/8, variance 4/8 − 1/16. A group that agrees: 0.
    "reinforce++ with a baseline": (
        partial(reinforce_advantages, lengths_B=_tensor([3, 1, 2, 2]), baseline=True, eps=0.0),
        [2, 0, 5, 5],
        [0, 0, 1, 1],
        [0.75 / math.sqrt(0.5 - 1 / 16), -1.25 / math.sqrt(0.5 - 1 / 16), 0, 0],
    ),
    # (1 · 1 + 3 · 0) / 4 = 0.25.
    "opo": (partial(opo_advantages, lengths_B=_tensor([1, 3, 9])), [1, 0, 7], [0, 0, 1], [0.75, -0.25, 0]),
    # 3 of 6 pairs pass: R = 0.5, σ = 0.5. Of a wrong attempt's 3 pairs, 2 fail: 0.5 − 2/3.
    "pass@2 of 4": (
        partial(pass_at_k_advantages, k=2, eps=0.0),
        [0, 1, 0, 0],
        [0] * 4,
        [-_THIRD, 1, -_THIRD, -_THIRD],
    ),
}
for _rewards in ([0, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]):  # every pair is alike
    _BY_HAND[f"pass@2 of {_rewards}"] = (partial(pass_at_k_advantages, k=2, eps=0.0), _rewards, [0] * 4, [0] * 4)
for _k in (2, 3, 7):  # a group of at most k attempts teaches nothing
    _BY_HAND[f"pass@{_k} of 2"] = (
        partial(pass_at_k_advantages, k=_k),
        [1, 0, NULL, NULL, 1],
        [0, 0, 0, 0, 1],
        [0] * 5,
    )


@pytest.mark.parametrize("case", {**_GRPO_BY_HAND, **_BY_HAND}.values(), ids=[*_GRPO_BY_HAND, *_BY_HAND])
def test_advantages_by_hand(case: _Case) -> None:
    formula, rewards, groups, expected = case
    advantages = formula(_tensor(rewards), torch.tensor(groups)).tolist()
    assert advantages == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert [a for a, e in zip(advantages, expected, strict=True) if e == 0] == [0] * expected.count(0), "exactly"


def test_remax_subtracts_the_greedy_reward_and_needs_both() -> None:
    advantages = remax_advantages(_tensor([1, 0.5, NULL, 1]), _tensor([0.25, 1, 0, NULL]))
    assert advantages.tolist() == [0.75, -0.5, 0.0, 0.0]


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
    "rloo": (lambda r, g, _: leave_one_out_advantages(r, g, scale="none"), _rloo),
    "leave one out std": (lambda r, g, _: leave_one_out_advantages(r, g, scale="std"), _leave_one_out_std),
    "opo": (lambda r, g, n: opo_advantages(r, g, lengths_B=n), _opo),
}
for _scale in ("std", "batch", "none"):
    _grpo_of = partial(group_advantages, scale=_scale)
    _ESTIMATORS[f"grpo {_scale}"] = (lambda r, g, _, ours=_grpo_of: ours(r, g), partial(_grpo, scale=_scale))
for _baseline in (False, True):
    _reinforce_of = partial(reinforce_advantages, baseline=_baseline)
    _ESTIMATORS[f"reinforce++ baseline {_baseline}"] = (
        lambda r, g, n, ours=_reinforce_of: ours(r, g, lengths_B=n),
        partial(_reinforce, baseline=_baseline),
    )
for _k in (1, 2, 3):
    _pass_of = partial(pass_at_k_advantages, k=_k)
    _ESTIMATORS[f"pass@{_k}"] = (lambda r, g, _, ours=_pass_of: ours(r, g), partial(_pass_at_k, k=_k))
_BY_NAME = pytest.mark.parametrize("name", _ESTIMATORS)
_RELATIVE_TO_THE_GROUP = pytest.mark.parametrize("name", [name for name in _ESTIMATORS if name[-5:] != "False"])

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
@given(_ATTEMPTS, st.randoms(use_true_random=False), st.integers(-3, 3))
def test_it_equals_the_formula_taken_group_by_group_in_any_order_from_any_zero_and_without_what_is_null(
    name: str, attempts: _Attempts, draw: Any, shift: int
) -> None:
    close = partial(np.testing.assert_allclose, rtol=1e-8, atol=1e-9)
    advantages = _ours(name, attempts)
    close(advantages, _ESTIMATORS[name][1](*_columns(attempts)))
    order = list(range(len(attempts)))
    draw.shuffle(order)
    close(_ours(name, [attempts[i] for i in order]), advantages[order])
    if not name.startswith("pass@"):  # which asks which rewards are above the threshold
        close(_ours(name, [(reward + shift, group, length) for reward, group, length in attempts]), advantages)
    present = [i for i, attempt in enumerate(attempts) if not math.isnan(attempt[0])]
    assert not np.delete(advantages, present).any()
    if present:
        close(_ours(name, [attempts[i] for i in present]), advantages[present])
    if name.startswith(("grpo std", "grpo none", "rloo", "leave", "opo", "pass@")):  # a group feels no neighbours
        for group in {group for _, group, _ in attempts}:
            rows = [i for i, attempt in enumerate(attempts) if attempt[1] == group]
            close(_ours(name, [attempts[i] for i in rows]), advantages[rows])
            weights = _columns(attempts)[2][rows] if name == "opo" else 1  # opo: over the tokens of the group
            if name != "leave one out std":
                kept = advantages[rows] * weights
                assert kept[advantages[rows] != 0].sum() == pytest.approx(0, abs=1e-9)


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


def test_pass_at_1_is_grpo_of_the_population() -> None:
    rewards, groups = _tensor([1, 0, 0, 1, 0, 0, 0]), torch.tensor([0, 0, 0, 1, 1, 1, 1])
    expected = group_advantages(rewards, groups, scale="std", ddof=0, eps=1e-6)
    torch.testing.assert_close(pass_at_k_advantages(rewards, groups, k=1), expected, rtol=1e-12, atol=0)


# GDPO

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


# Generalised advantage estimation


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


def test_the_reward_stands_at_the_last_sampled_token_and_is_the_return_where_lambda_and_gamma_are_1() -> None:
    mask, offsets = np.array([0, 1, 1, 0, 0, 0, 1, 1], bool), np.array([0, 4, 6, 8])
    rewards = rewards_at_end(np.array([2.0, 5.0, 3.0]), mask, offsets)
    assert rewards.tolist() == [0, 0, 2, 0, 0, 0, 0, 3]
    _, returns = gae(rewards, np.random.default_rng(0).normal(size=8), mask, offsets, gamma=1.0, lam=1.0)
    np.testing.assert_allclose(returns, [0, 2, 2, 0, 0, 0, 3, 3], rtol=1e-12)
    for nothing in gae(np.ones(3), np.ones(3), np.zeros(3, bool), np.array([0, 3]), gamma=1.0, lam=1.0):
        assert not nothing.any()


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
