"""Which evaluations are a run's own: what "before" and "after" mean of it; and what an evaluation without a score says.

In: the fold of a run's log, and the run's configuration. Out: evaluations, or a sentence.
"""

from __future__ import annotations

from typing import Any

from settings.errors import all_of
from storage.log.entries import Evaluation
from storage.log.run_log import RunLog
from storage.log.run_state import RunState


def own_evaluations(state: RunState, settings: dict[str, Any]) -> list[Evaluation]:
    """Evaluations on the run's own split and its present tasks, asked as the run asks them, in the log's order.

    `settings` are the run's `evaluation`.
    """
    return [each for each in state.evaluations_of(settings.get("split", "test")) if is_asked_by(each, settings)]


def own_scores(log: RunLog, config: dict[str, Any]) -> list[Evaluation]:
    """`scores_of` the run's own split: what "before" and "after" mean of a run. `config` is its configuration, see
    `run_config`."""
    settings = config.get("evaluation", {})
    return scores_of(log.state, settings, settings.get("split", "test"))


def scores_of(state: RunState, settings: dict[str, Any], split: str) -> list[Evaluation]:
    """Evaluations of a split that have a score and can be compared, by policy version: those that were asked as the run
    asks, or else as the newest. One that a user starts with fewer problems, say, is not among them.

    `settings` are the run's `evaluation`.
    """
    scores = [each for each in state.evaluations_of(split) if not each.failed]
    own = [each for each in scores if is_asked_by(each, settings)]
    alike = own or [each for each in scores if _how_asked(each) == _how_asked(scores[-1])]
    return sorted(alike, key=lambda evaluation: evaluation.version)


def scores_by_split(state: RunState, settings: dict[str, Any]) -> dict[str, list[Evaluation]]:
    """`scores_of` every split that has any."""
    splits = sorted({each.split for each in state.evaluations if not each.failed})
    return {split: scores for split in splits if (scores := scores_of(state, settings, split))}


def is_asked_by(evaluation: Evaluation, settings: dict[str, Any]) -> bool:
    """True for as many problems, attempts and the temperature as these settings ask, as far as the log says."""
    most = settings.get("num_tasks", evaluation.num_tasks)
    num_tasks = evaluation.num_tasks if evaluation.tasks is None else evaluation.tasks.count
    return (
        evaluation.num_tasks == min(most, num_tasks)
        and evaluation.n_samples in (0, settings.get("n_samples", evaluation.n_samples))
        and evaluation.temperature in (None, settings.get("temperature", evaluation.temperature))
    )


def _how_asked(evaluation: Evaluation) -> tuple[int, int, float | None]:
    return evaluation.num_tasks, evaluation.n_samples, evaluation.temperature


def failure_of(evaluation: Evaluation) -> str:
    """A sentence if every attempt of an evaluation failed, otherwise ""."""
    if not evaluation.failed:
        return ""
    counts = ", ".join(f"{status} {count}" for status, count in evaluation.failures.items())
    sentence = (
        f"the evaluation of policy {evaluation.version} on split {evaluation.split!r} failed: "
        f"{all_of(evaluation.num_failed, 'attempt')} did ({counts}), so its score of 0 says nothing about the policy"
    )
    return f"{sentence}; one error: {evaluation.last_error}" if evaluation.last_error else sentence
