"""Shaping is arithmetic: golden numbers, at every edge, and evaluation without what only shapes the gradient."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rollouts.rewards.reward_shaping import check_weights, overlong, shaped
from settings.reward import RewardSettings
from storage.records import Trajectory
from tests.builders import a_trajectory, a_turn


def _attempt(reward: float | None = 1.5, *, lengths: tuple[int, ...] = (2,), **parts: float | None) -> Trajectory:
    return a_trajectory(reward, turns=[a_turn([12] * length) for length in lengths], reward_parts=parts)


def _shaped(attempt: Trajectory, *, max_tokens: int = 100, is_eval: bool = False, **settings: Any) -> Trajectory:
    return shaped(attempt, RewardSettings(**settings), max_tokens=max_tokens, is_eval=is_eval)


BOTH: dict[str, float | None] = {"correct": 1.0, "format": 0.5}


def test_parts_stay_raw_and_the_reward_is_weighted_shifted_scaled_and_clipped():
    one_part, clipped = {"correct": 1.0, "style": None}, {"bias": -0.5, "scale": 10.0, "clip": 2.0}
    cases: list[tuple[float | None, dict[str, float | None], dict[str, Any], float | None]] = [
        (1.5, BOTH, {}, 1.5),  # nothing is shaped by default
        (1.5, BOTH, {"weights": {"correct": 2.0, "format": -0.5}}, 1.75),
        (1.5, BOTH, {"weights": {"format": 0.0}}, 1.0),
        (1.0, one_part, {"weights": {"style": 100.0}}, 1.0),  # what does not apply weighs nothing
        (1.0, {"correct": None, "style": None}, {"weights": {"style": 100.0}}, None),
        (0.25, BOTH, {"scale": 2.0}, 0.5),  # without weights the workflow's total counts
        (0.25, {}, {"weights": {"format": 2.0}}, 0.25),  # nothing to weigh
        (1.0, {}, {"bias": -0.5, "scale": 10.0}, 5.0),  # the bias is scaled too
        *((1.0, {}, clipped, 2.0), (0.0, {}, clipped, -2.0), (0.5, {}, clipped, 0.0)),
        (1.0, {}, {"bias": 1.0, "scale": -1.0}, -2.0),
        (None, {"correct": 1.0}, {"weights": {"correct": 2.0}, "bias": 1.0}, None),  # and none is made of parts
        (None, {"correct": 1.0}, {"overlong_tokens": 20}, None),  # and no penalty
    ]
    for reward, parts, settings, result in cases:
        attempt = _attempt(reward, lengths=(100,), **parts)
        assert _shaped(attempt, **settings) == dataclasses.replace(attempt, reward=result), (parts, settings)


def test_the_overlong_penalty_is_the_papers_with_the_papers_numbers():
    """DAPO, section 4.1: expected length 16,384, cache 4,096, so at most 20,480 tokens."""
    penalties = {0: 0.0, 16384: 0.0, 16385: -1 / 4096, 18432: -0.5, 20479: -4095 / 4096, 20480: -1.0, 30000: -1.0}
    assert {length: overlong(length, max_length=20480, zone=4096) for length in penalties} == penalties


def test_the_whole_sum():
    attempt = _attempt(lengths=(5, 95, 7), correct=1.0, format=0.5, style=None)
    settings = {"weights": {"format": 2.0}, "bias": -0.5, "scale": 4.0, "clip": 5.0}
    result = _shaped(attempt, **settings, overlong_tokens=20, overlong_penalty=0.8)
    # (1 + 2 · 0.5 − 0.5) · 4 = 6, clipped to 5; the longest reply is 15 tokens into the zone of 20
    assert result.reward == 5.0 - 0.8 * 0.75
    assert result.reward_parts == {"correct": 1.0, "format": 0.5, "style": None, "overlong": -0.8 * 0.75}


def test_a_part_that_is_called_like_the_penalty_is_an_error():
    with pytest.raises(ValueError, match="'overlong'.*rename"):
        _shaped(_attempt(overlong=0.5), overlong_tokens=20)
    assert _shaped(_attempt(overlong=0.5)).reward == 1.5


def test_weights_wait_for_the_first_group_with_a_reward_and_are_then_checked_for_good():
    unseen = check_weights({"format"}, [_attempt(None), _attempt(None)])
    assert unseen == {"format"}
    unseen = check_weights(unseen, [_attempt(correct=1.0), _attempt(format=None, correct=1.0)])
    assert check_weights(unseen, [_attempt(correct=1.0)]) == set()
    with pytest.raises(ValueError, match=r"names formt, but the reward parts are correct, format\."):
        check_weights({"formt", "correct"}, [_attempt(correct=1.0, format=None), _attempt(None)])
    with pytest.raises(ValueError, match="none at all"):
        check_weights({"correct"}, [_attempt(0.5)])
