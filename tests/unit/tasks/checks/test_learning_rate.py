"""A run in which nothing moves says so after its first steps; the rewards are those that runs here have recorded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from storage.log.entries import Step
from tasks.checks.learning_rate import nothing_moves, usual_learning_rates
from tests.builders import a_config, a_log, a_step

_FLAT = [0.25, 0.167, 0.208, 0.25, 0.25, 0.125, 0.083, 0.292, 0.125, 0.083]
"""The tiny model on reversed words at 1e-6."""
_RISING = [0.555, 0.598, 0.582, 0.594, 0.684, 0.742, 0.816, 0.797, 0.797, 0.84]
"""The tutorial's letters at 2e-4."""


def _steps(rewards: list[float], *, grad_norm: float = 0.5) -> list[Step]:
    step = a_step(a_log().state)
    return [replace(step, metrics={"reward": reward, "grad_norm": grad_norm}) for reward in rewards]


@pytest.mark.parametrize(
    ("rewards", "grad_norm", "settings", "sentence"),
    [
        (
            _FLAT,
            0.5,
            {"learning_rate": 1e-6},
            "was 0.225 in their first half and 0.142 in the second. learning_rate = 1e-06; ",
        ),
        (_FLAT, 0.5, {"learning_rate": 1e-6, "lora": {"rank": 4}}, "usual for this model is 0.001 to 0.01"),
        (_FLAT, 0.5, {"learning_rate": 5e-4}, ""),
        (_RISING, 0.5, {"learning_rate": 1e-6}, ""),
        (_FLAT, 0.0, {"learning_rate": 5e-4}, "the gradient is 0, because the attempts at each prompt have the same"),
        (_RISING[:3], 0.5, {"learning_rate": 1e-6}, ""),
        (_FLAT, 0.5, {"learning_rate": 1e-6, "model": "/no/where"}, ""),
    ],
)
def test_what_does_not_move_is_said_with_the_reason(
    rewards: list[float], grad_norm: float, settings: dict[str, Any], sentence: str
) -> None:
    said = nothing_moves(_steps(rewards, grad_norm=grad_norm), a_config(**settings))
    assert sentence in said and bool(said) == bool(sentence)


@pytest.mark.parametrize(
    ("parameters", "is_lora", "usual"),
    [
        (393_216, False, (1e-4, 1e-3)),
        (50_000_000, False, (1e-5, 1e-4)),
        (494_000_000, False, (5e-7, 5e-6)),
        (7_600_000_000, True, (5e-6, 5e-5)),
    ],
)
def test_the_usual_range_falls_with_size_and_is_ten_times_that_for_adapters(
    parameters: int, is_lora: bool, usual: tuple[float, float]
) -> None:
    assert usual_learning_rates(parameters, is_lora=is_lora) == pytest.approx(usual)
