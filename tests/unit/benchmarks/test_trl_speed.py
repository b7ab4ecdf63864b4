"""What `benchmarks.trl_speed` makes of its runs."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.trl_speed import mean_reaches_target


def _run(*scores: tuple[float, float]) -> dict[str, Any]:
    return {"scores": [list(score) for score in scores]}


def test_the_mean_accuracy_is_taken_over_runs_and_drawn_as_a_line_between_evaluations() -> None:
    early, late = _run((1, 0.4), (3, 0.8), (5, 1.0)), _run((1, 0.6), (5, 0.8), (7, 0.9))
    # at 4 s 0.8 on average, at 6 s 0.95
    assert mean_reaches_target([early, late]) == pytest.approx(4 + 2 * 0.1 / 0.15)


@pytest.mark.parametrize("runs", [[_run((1, 0.4), (3, 0.89))], [_run(), _run()]])
def test_an_accuracy_that_is_never_reached_has_no_time(runs: list[dict[str, Any]]) -> None:
    assert mean_reaches_target(runs) is None
