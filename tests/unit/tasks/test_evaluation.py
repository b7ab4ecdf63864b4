"""The gate: an evaluation that passes makes a champion, one that does not says why and leaves it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from storage.log.entries import Evaluation
from storage.log.promotion import CHAMPION, promote
from storage.log.run_log import RunLog
from tasks.evaluation import score_fell, try_gate
from tests.builders import a_log, a_shard, a_step, a_summary


@pytest.fixture
def log() -> RunLog:
    """A run of two steps."""
    log = a_log()
    for number in (1, 2):
        log.append(a_shard(f"s{number}", [a_summary(number)]))
        log.append(replace(a_step(log.state, trained=[f"0.task{number}"]), metrics={"engine_gap": 0.1 * number}))
    return log


def _evaluated(version: int, score: float) -> Evaluation:
    fields: dict[str, Any] = {"num_tasks": 10, "num_failed": 0, "n_samples": 1, "seconds": 1.0}
    return Evaluation(version=version, split="test", score=score, shard_id=f"e{version}-{score}", **fields)


def _try(log: RunLog, evaluation: Evaluation, **bar: Any) -> Any:
    log.append(evaluation)
    return try_gate(log, evaluation, **{"min_score": 0.5, "max_gap": 1.0, **bar})


def test_a_score_that_reaches_the_gate_makes_a_champion_and_without_a_gate_none_does(log: RunLog) -> None:
    assert _try(log, _evaluated(1, 1.0), min_score=None) is None
    assert CHAMPION not in log.state.aliases
    assert _try(log, _evaluated(1, 0.5)) == []
    assert log.state.aliases[CHAMPION].version == 1


@pytest.mark.parametrize(
    ("score", "max_gap", "why"),
    [
        (0.49, 1.0, r"it scored 0.490 on split 'test', below 0.5"),
        (float("nan"), 1.0, "it scored nan"),
        (0.9, 0.15, "step 2: engine and trainer differed by 0.2 nats per token"),
    ],
)
def test_what_speaks_against_a_policy_is_said_and_the_champion_stays(
    log: RunLog, caplog: pytest.LogCaptureFixture, score: float, max_gap: float, why: str
) -> None:
    promote(log, 1, max_gap=1.0)
    [problem] = _try(log, _evaluated(2, score), max_gap=max_gap)
    assert why in problem and why in caplog.text and "policy 1 stays the champion" in caplog.text
    assert log.state.aliases[CHAMPION].version == 1


@pytest.mark.parametrize(
    ("scores", "sentence"),
    [
        ([0.5], ""),
        ([0.5, 0.4, 0.5], ""),
        ([0.5, 0.9, 0.6], "fallen from 0.900 (policy 1) to 0.600 (policy 2), by more than 3 standard errors"),
        ([0.5, 0.9, 0.6, 0.5], ""),  # the one before has said so
        ([0.5, 0.9, 0.6, 0.9, 0.6], "fallen from 0.900 (policy 1) to 0.600 (policy 4)"),
    ],
)
def test_a_score_that_falls_by_more_than_noise_is_said_once(scores: list[float], sentence: str) -> None:
    evaluations = [replace(_evaluated(n, score), standard_error=0.05) for n, score in enumerate(scores)]
    said = score_fell(evaluations)
    assert sentence in said and bool(said) == bool(sentence)
