"""Which attempts may be trained on."""

from __future__ import annotations

import pytest

from storage.records import TRAINABLE_STATUSES, Trajectory
from tests.builders import a_trajectory


@pytest.mark.parametrize(
    ("attempt", "usable"),
    [
        (a_trajectory(1.0), True),
        (a_trajectory(0.0), True),
        (a_trajectory(0.5, status="truncated"), True),
        (a_trajectory(0.5, status="max_turns"), True),
        (a_trajectory(None), False),
        (a_trajectory(1.0, status="timeout"), False),
        (a_trajectory(1.0, turns=[]), False),
    ],
)
def test_an_attempt_is_usable_with_a_reward_a_trainable_status_and_tokens(attempt: Trajectory, usable: bool):
    assert attempt.usable is usable


def test_failures_are_no_trainable_statuses():
    assert TRAINABLE_STATUSES.isdisjoint({"env_error", "reward_error", "timeout", "engine_error", "cancelled"})
