"""Advantages are what the papers say, per group, whatever the order, and 0 where there is nothing to learn.

The references are written group by group and token by token, in numpy and float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import settings as patience
from hypothesis import strategies as st

from settings.advantage import (
    Advantage,
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
    reward_metrics,
    rewards_at_end,
    whitened,
)

NULL = math.nan
_PATIENT = patience(deadline=None, max_examples=60)


def _tensor(values: Any) -> torch.Tensor:
    return torch.tensor(np.asarray(values, dtype=np.float64))


def _of(settings: Advantage, rewards: Any, groups: Any, **named: Any) -> np.ndarray:
    """The advantages by settings; named are `lengths`, `parts`, `weights` and the `dtype` of the rewards."""
    return advantages_of(
        settings,
        _tensor(rewards).to(named.get("dtype", torch.float64)),
        torch.tensor(groups),
        lengths_B=_tensor(named.get("lengths", [1] * len(rewards))),
        reward_parts_B={name: _tensor(part) for name, part in named.get("parts", {}).items()},
        reward_weights=named.get("weights", {}),
    ).numpy()


# One advantage per attempt, against references written from the papers


def _known(rewards: np.ndarray, groups: np.ndarray) -> list[np.ndarray]:
    """The rows of each group that have a reward; groups without one are left out."""
    rows = [np.flatnonzero((groups == group) & ~np.isnan(rewards)) for group in np.unique(groups)]
    return [each for each in rows if len(each)]


def _grpo(
    rewards: np.ndarray, groups: np.ndarray, lengths: np.ndarray, *, scale: str, ddof: int, eps: float, singleton: str
) -> np.ndarray:
    advantages = np.zeros(len(rewards))
    for rows in _known(rewards, groups):
        values = rewards[rows]
        over = rewards[~np.isnan(rewards)] if scale == "batch" else values
        deviation = over.std(ddof=ddof) if np.ptp(over) else 1.0
        spread = 1.0 if scale == "none" else deviation + eps
        if np.ptp(values):
            advantages[rows] = (values - values.mean()) / spread
        elif len(rows) == 1 and singleton == "reward":
            advantages[rows] = values / spread
    return advantages


def _rloo(rewards: np.ndarray, groups: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """As verl writes it: r · n / (n − 1) − mean · n / (n − 1)."""
    advantages = np.zeros(len(rewards))
    for rows in _known(rewards, groups):
        if (n := len(rows)) > 1:
            advantages[rows] = rewards[rows] * n / (n - 1) - rewards[rows].mean() * n / (n - 1)
    return advantages


def _leave_one_out_std(rewards: np.ndarray, groups: np.ndarray, lengths: np.ndarray, *, eps: float) -> np.ndarray:
    advantages = np.zeros(len(rewards))
    for rows in _known(rewards, groups):
        for row in rows if len(rows) > 1 else ():
            others = rewards[rows[rows != row]]
            scale = np.std(others, ddof=1) + eps if len(others) > 1 and np.ptp(others) else 1.0
            advantages[row] = (rewards[row] - others.mean()) / scale
    return advantages


def _reinforce(
    rewards: np.ndarray, groups: np.ndarray, lengths: np.ndarray, *, baseline: bool, eps: float
) -> np.ndarray:
    """One entry per sampled token, whitened over all of them."""
    centred, silent = rewards.copy(), np.isnan(rewards)
    for rows in _known(rewards, groups) if baseline else ():
        if np.ptp(rewards[rows]):
            centred[rows] -= rewards[rows].mean()
        else:
            centred[rows], silent[rows] = 0.0, True
    tokens = np.repeat(centred, lengths)
    tokens = tokens[~np.isnan(tokens)]
    if not np.ptp(tokens):
        return np.zeros(len(rewards))
    return np.where(silent, 0.0, (centred - tokens.mean()) / (tokens.std() + eps))


def _opo(rewards: np.ndarray, groups: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    advantages = np.zeros(len(rewards))
    for rows in _known(rewards, groups):
        if np.ptp(rewards[rows]):
            advantages[rows] = rewards[rows] - (lengths[rows] * rewards[rows]).sum() / lengths[rows].sum()
    return advantages


def _pass_at_k(
    rewards: np.ndarray, groups: np.ndarray, lengths: np.ndarray, *, k: int, threshold: float, eps: float
) -> np.ndarray:
    """By counting: each k-subset is a draw that passes or fails; normalised over draws, averaged over an attempt's."""
    advantages = np.zeros(len(rewards))
    for rows in _known(rewards, groups):
        subsets = list(itertools.combinations(rows, k))
        passes = np.array([max(rewards[row] > threshold for row in subset) for subset in subsets], dtype=np.float64)
        for row in rows if len(subsets) and np.ptp(passes) else ():
            mine = [row in subset for subset in subsets]
            advantages[row] = (passes[mine].mean() - passes.mean()) / (passes.std() + eps)
    return advantages


_Reference = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def _with_reference(settings: Any, reference: Callable[..., np.ndarray]) -> tuple[Advantage, _Reference]:
    """Settings beside the reference that has all their options."""
    return settings, partial(reference, **settings.model_dump(exclude={"kind", "per_reward"}))


_ESTIMATORS: dict[str, tuple[Advantage, _Reference]] = {
    "rloo": (LeaveOneOutAdvantage(), _rloo),
    "leave one out std": (LeaveOneOutAdvantage(scale="std"), partial(_leave_one_out_std, eps=1e-6)),
    "opo": (OpoAdvantage(), _opo),
    **{f"grpo {scale}": _with_reference(GrpoAdvantage(scale=scale), _grpo) for scale in ("std", "batch", "none")},
    **{f"pass@{k}": _with_reference(PassAtKAdvantage(k=k), _pass_at_k) for k in (1, 2, 3)},
    "reinforce++ of a group": _with_reference(ReinforceAdvantage(baseline=True), _reinforce),
    "reinforce++": _with_reference(ReinforceAdvantage(), _reinforce),
}
_OPTIONS: dict[str, tuple[Advantage, _Reference]] = {
    **{
        f"grpo {scale}, {ddof}": _with_reference(
            GrpoAdvantage(scale=scale, ddof=ddof, eps=0.5, singleton="reward"), _grpo
        )
        for scale in ("std", "batch", "none")
        for ddof in (0, 1)
    },
    "leave one out std": (LeaveOneOutAdvantage(scale="std", eps=0.5), partial(_leave_one_out_std, eps=0.5)),
    "reinforce++": _with_reference(ReinforceAdvantage(eps=0.5), _reinforce),
    "pass@2": _with_reference(PassAtKAdvantage(k=2, threshold=0.7, eps=0.5), _pass_at_k),
}
_REWARDS = st.integers(-8, 8).map(lambda eighths: eighths / 8) | st.sampled_from([0.0, 1.0, NULL])
_Attempts = list[tuple[float, int, int]]
_ATTEMPTS = st.lists(st.tuples(_REWARDS, st.integers(-1, 2), st.integers(1, 9)), min_size=1, max_size=14).filter(
    lambda attempts: not all(math.isnan(reward) for reward, *_ in attempts)
)


def _columns(attempts: _Attempts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rewards, groups, lengths = zip(*attempts, strict=True)
    return np.array(rewards), np.array(groups), np.array(lengths)


def _ours(name: str, attempts: _Attempts) -> np.ndarray:
    rewards, groups, lengths = _columns(attempts)
    return _of(_ESTIMATORS[name][0], rewards, groups, lengths=lengths)


_close = partial(np.testing.assert_allclose, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", _ESTIMATORS)
@_PATIENT
@given(_ATTEMPTS, st.randoms(use_true_random=False), st.integers(-3, 3))
def test_it_equals_the_formula_taken_group_by_group_in_any_order_from_any_zero_and_without_what_is_null(
    name: str, attempts: _Attempts, draw: Any, shift: int
) -> None:
    advantages = _ours(name, attempts)
    _close(advantages, _ESTIMATORS[name][1](*_columns(attempts)))
    order = list(range(len(attempts)))
    draw.shuffle(order)
    _close(_ours(name, [attempts[i] for i in order]), advantages[order])
    if not name.startswith("pass@"):  # which asks which rewards are above the threshold
        _close(_ours(name, [(reward + shift, group, length) for reward, group, length in attempts]), advantages)
    present = [i for i, attempt in enumerate(attempts) if not math.isnan(attempt[0])]
    assert not np.delete(advantages, present).any()
    _close(_ours(name, [attempts[i] for i in present]), advantages[present])
    if name.startswith(("grpo std", "grpo none", "rloo", "leave", "opo", "pass@")):  # a group feels no neighbours
        for group in {attempts[i][1] for i in present}:
            rows = [i for i, attempt in enumerate(attempts) if attempt[1] == group]
            _close(_ours(name, [attempts[i] for i in rows]), advantages[rows])
            weights = _columns(attempts)[2][rows] if name == "opo" else 1  # opo: over the tokens of the group
            if name != "leave one out std":
                kept = advantages[rows] * weights
                assert kept[advantages[rows] != 0].sum() == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("name", _OPTIONS)
@_PATIENT
@given(_ATTEMPTS)
def test_every_option_of_the_settings_is_in_the_formula(name: str, attempts: _Attempts) -> None:
    settings, reference = _OPTIONS[name]
    rewards, groups, lengths = _columns(attempts)
    _close(_of(settings, rewards, groups, lengths=lengths), reference(rewards, groups, lengths))


@pytest.mark.parametrize("name", _ESTIMATORS)
def test_equal_rewards_are_exactly_0_and_nearly_equal_ones_never_explode(name: str) -> None:
    settings, _ = _ESTIMATORS[name]
    for reward in (0.0, 1.0, 0.1, 0.3, 0.1 + 0.2, 1 / 3, 1e6 + 0.1):
        assert not _ours(name, [(reward, group, length) for group, length in [(0, 3), (0, 1), (0, 1), (1, 7)]]).any()
        for size, dtype in itertools.product([1, 2, 3, 7, 12], [torch.float32, torch.float64]):
            groups, lengths = [0] * size + [1, 1], range(1, size + 3)
            advantages = _of(settings, [reward] * size + [0.0, 1.0], groups, lengths=lengths, dtype=dtype)
            assert torch.from_numpy(advantages).dtype == dtype
            assert name == "reinforce++" or not advantages[:size].any(), (size, reward)  # which has no groups
    assert np.abs(_ours(name, [(0.1 + 0.2, 0, 1), (0.3, 0, 2), (0.3, 0, 2), (0.3, 1, 1), (1.3, 1, 1)])).max() < 2.5


def test_divided_by_the_mean_it_is_maxrl() -> None:
    """prime-rl 0.9's max_rl.py: (r − mean) / mean, 0 where the mean is not above 0. A rare success counts most."""
    rewards, groups = [1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0.5, 1.5, NULL, 3], [0] * 4 + [1] * 4 + [2] * 2 + [3] * 3 + [4]
    found = _of(GrpoAdvantage(scale="mean"), rewards, groups)
    expected = [3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, 0, 0, -0.5, 0.5, 0, 0]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    with pytest.raises(ValueError, match='scale = "mean" is for rewards of at least 0 .* one of -1'):
        _of(GrpoAdvantage(scale="mean"), [1, -1, 3], [0, 0, 0])


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_maxrl_follows_the_gradient_of_the_truncated_likelihood(chance: float) -> None:
    """Over all draws of n attempts, right with this chance, the mean of Σ A ∇log π / n is Σ_{k < n} ∇pass@k / k: the
    likelihood's, log p = −Σ_k (1 − p)^k / k, truncated. https://arxiv.org/abs/2602.02710"""
    n, slopes = 4, {1: 1 - chance, 0: -chance}  # of log p and log(1 − p) by the logit of p
    mean = 0.0
    for draw in itertools.product([0, 1], repeat=n):
        advantages = _of(GrpoAdvantage(scale="mean"), draw, [0] * n)
        weight = math.prod(chance if right else 1 - chance for right in draw)
        mean += weight * sum(a * slopes[right] for a, right in zip(advantages, draw, strict=True)) / n
    by_logit = chance * (1 - chance)
    expected = sum(k * (1 - chance) ** (k - 1) * by_logit / k for k in range(1, n))
    assert mean == pytest.approx(expected, rel=1e-12)


def test_advantages_by_hand() -> None:
    # One of n right: mean 1/n, variance 1/n. (1, 0): ±0.5 / (√0.5 + eps). (1, 0, 0, 0): std 0.5.
    pair, four = 0.5 / (math.sqrt(0.5) + 1e-4), 0.25 / (0.5 + 1e-4)
    advantages = _of(GrpoAdvantage(), [1, 1, 0, 0, 0, 0], [5, 9, 5, 9, 9, 9])
    assert advantages.tolist() == pytest.approx([pair, 3 * four, -pair, -four, -four, -four], rel=1e-12)
    lone = GrpoAdvantage(scale="batch", singleton="reward")
    assert _of(lone, [3, 3], [0, 1]) == pytest.approx(3 / 1.0001), "never divided by eps alone"
    # 3 of 6 pairs pass: R = 0.5, σ = 0.5. Of a wrong attempt's 3 pairs, 2 fail: 0.5 − 2/3.
    advantages = _of(PassAtKAdvantage(k=2, eps=0.0), [0, 1, 0, 0], [0] * 4)
    assert advantages == pytest.approx([-1 / 3, 1, -1 / 3, -1 / 3], rel=1e-12)


def test_remax_subtracts_the_greedy_reward_and_needs_both() -> None:
    parts = {"greedy": [0.25, 1, 0, NULL]}
    advantages = _of(RemaxAdvantage(baseline_part="greedy"), [1, 0.5, NULL, 1], [0, 0, 1, 1], parts=parts)
    assert advantages.tolist() == [0.75, -0.5, 0.0, 0.0]


# GDPO


def _gdpo(parts: np.ndarray, weights: np.ndarray, groups: np.ndarray, ddof: int, eps: float) -> np.ndarray:
    """`parts` has shape [B, K], NaN for None."""
    sums, silent = np.zeros(len(parts)), np.isnan(parts).all(axis=1)
    for rows in (np.flatnonzero(groups == group) for group in np.unique(groups)):
        for rewards, weight in zip(parts[rows].T, weights, strict=True):
            known = ~np.isnan(rewards)
            if known.sum() > 1 and np.ptp(rewards[known]):
                normal = (rewards[known] - rewards[known].mean()) / (rewards[known].std(ddof=ddof) + eps)
                sums[rows[known]] += weight * normal
        silent[rows] |= not sums[rows].any()
    scored = sums[~np.isnan(parts).all(axis=1)]
    if not np.ptp(np.append(scored, 0)):
        return np.zeros(len(parts))
    return np.where(silent, 0.0, (sums - scored.mean()) / (scored.std(ddof=ddof) + eps))


@_PATIENT
@given(
    st.lists(st.tuples(_REWARDS, _REWARDS), min_size=8, max_size=8),
    st.lists(st.integers(0, 2), min_size=8, max_size=8),
    st.sampled_from([(1, 1e-4), (0, 0.5)]),
)
def test_gdpo_equals_its_formula_and_looks_at_no_part_of_weight_0(
    parts: list[tuple[float, float]], groups: list[int], options: tuple[int, float]
) -> None:
    both, (ddof, eps) = np.array(parts), options
    silent = np.isnan(both).all(axis=1)
    assume(not silent.all())
    ours = _of(
        GrpoAdvantage(per_reward=True, ddof=ddof, eps=eps),
        np.where(silent, NULL, np.nansum(both, axis=1)),
        groups,
        parts={"right": both[:, 0], "short": both[:, 1], "style": [5, 1, 2, 3, NULL, 0, 9, 7]},
        weights={"short": 0.5, "style": 0.0},
    )
    _close(ours, _gdpo(both, np.array([1.0, 0.5]), np.array(groups), ddof, eps))


def test_gdpo_does_not_let_the_batch_mean_move_a_group_without_a_difference() -> None:
    # The lone reward of group 2 stands for itself, and so the batch mean is not 0.
    rewards = [1, 0, 0.3, 0.3, 9]
    settings = GrpoAdvantage(per_reward=True, scale="none", eps=0.0, singleton="reward")
    advantages = _of(settings, rewards, [0, 0, 1, 1, 2], parts={"right": rewards})
    # Sums 0.5, −0.5, 0, 0, 9: mean 1.8.
    deviation = math.sqrt((1.3**2 + 2.3**2 + 1.8**2 * 2 + 7.2**2) / 4)
    expected = [-1.3 / deviation, -2.3 / deviation, 0, 0, 7.2 / deviation]
    assert advantages.tolist() == pytest.approx(expected, rel=1e-12)
    assert advantages[2:4].tolist() == [0.0, 0.0]


# Generalised advantage estimation


def _gae_by_the_sum(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, offsets: np.ndarray, gamma: float, lam: float
) -> np.ndarray:
    """Eq. 16 of the paper as it stands: A_t = Σ_l (γλ)^l δ_{t+l}, row by row, from sampled token to sampled token."""
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
    rewards, values = (np.where(mask, draw.normal(size=len(mask)), NULL) for _ in range(2))
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


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_gae_names_the_row_whose_reward_or_value_is_broken(broken: float) -> None:
    fine, mask, offsets = np.zeros(4), np.ones(4, bool), np.array([0, 2, 4])
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        gae(np.array([0, 0, 0, broken]), fine, mask, offsets, gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match=r"rows \[0\]"):
        gae(fine, np.array([broken, 0, 0, 0]), mask, offsets, gamma=1.0, lam=1.0)


def test_whitening_is_over_the_trained_tokens_alone_and_invents_no_difference() -> None:
    values, mask = np.array([1.0, 99, 2, 3, -50]), np.array([1, 0, 1, 1, 0], bool)
    expected = np.array([-1, 0, 0, 1, 0]) / math.sqrt(1 + 1e-8)
    np.testing.assert_allclose(whitened(values, mask), expected, rtol=1e-12)
    for equal in ([0.3, 0.3, 0.1 + 0.2], [5.0, 5, 5], [7.0]):
        assert np.abs(whitened(np.array(equal), np.ones(len(equal), bool))).max() < 1e-9


# The rest


def test_distillation_goes_to_where_the_teacher_is_surer() -> None:
    teacher, sampled = np.log([0.5, 0.1, 1e-9, 0.3]), np.log([0.25, 0.2, 0.5, 0.9])
    mask = np.array([1, 1, 1, 0], bool)
    advantages = distillation_advantages(teacher, sampled, mask, scale=2.0, clip=5.0)
    np.testing.assert_allclose(advantages, [2 * math.log(2), -2 * math.log(2), -10, 0], rtol=1e-12)
    unbounded = distillation_advantages(teacher, sampled, mask)
    np.testing.assert_allclose(unbounded, [math.log(2), -math.log(2), math.log(2e-9), 0], rtol=1e-12)


def test_kinds_with_an_advantage_per_token_give_none_per_attempt_and_distillation_needs_no_reward() -> None:
    assert np.isnan(_of(GaeAdvantage(), [1, 0], [0, 0])).all()
    assert np.isnan(_of(DistillAdvantage(), [NULL, NULL], [0, 0])).all()


@pytest.mark.parametrize("settings", [GrpoAdvantage(), GaeAdvantage(), OpoAdvantage(), RemaxAdvantage()])
def test_a_batch_without_any_reward_is_refused_with_what_to_change(settings: Any) -> None:
    with pytest.raises(ValueError, match="all 2 rewards are None.*a number.*millrace rollout once"):
        _of(settings, [NULL, NULL], [0, 0])


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
    assert reward_metrics(_tensor([3]), torch.tensor([0]), reward_parts_B={})["reward_std"] == 0.0
