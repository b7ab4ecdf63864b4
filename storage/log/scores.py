"""Which evaluations are a run's own: what "before" and "after" mean of it; and what an evaluation without a score says.

In: the fold of a run's log, and the run's configuration. Out: evaluations, or a sentence.
"""

from __future__ import annotations

from typing import Any

from storage.log.entries import Evaluation
from storage.log.run_log import RunLog
from storage.log.run_state import RunState


def own_evaluations(state: RunState, settings: dict[str, Any]) -> list[Evaluation]:
    """Evaluations on the run's own split and its present tasks, asked as the run asks them, in the log's order.

    `settings` are the run's `evaluation`.
    """
    return [each for each in state.evaluations_of(settings.get("split", "test")) if _is_asked_by(each, settings)]


def own_scores(log: RunLog, config: dict[str, Any]) -> list[Evaluation]:
    """The run's own evaluations that have a score, by policy version: what "before" and "after" mean of a run. If there
    are none, those of its split that were asked as the newest.

    `config` is the run's configuration, see `run_config`.
    """
    settings = config.get("evaluation", {})
    scores = [each for each in log.state.evaluations_of(settings.get("split", "test")) if not each.failed]
    own = [each for each in own_evaluations(log.state, settings) if not each.failed]
    alike = own or [each for each in scores if _how_asked(each) == _how_asked(scores[-1])]
    return sorted(alike, key=lambda evaluation: evaluation.version)


def _is_asked_by(evaluation: Evaluation, settings: dict[str, Any]) -> bool:
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
        f"the evaluation of policy {evaluation.version} on split {evaluation.split!r} failed: all "
        f"{evaluation.num_failed} attempts did ({counts}), so its score of 0 says nothing about the policy"
    )
    return f"{sentence}; one error: {evaluation.last_error}" if evaluation.last_error else sentence
