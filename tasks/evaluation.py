"""What stands around an evaluation: checks before an engine starts, and what becomes of the score.

    look_up_policy, check_split ─▶ evaluate ─▶ try_gate: the alias `champion`, or an event that says why not
                                            └▶ raise_if_failed

In: a run, a version, a split; later the `Evaluation`. Out: the run's configuration, or one sentence with the fix; an
alias in the log. `tasks/prefect/notifications.py` may make a notification of the event.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from infra.user_code import load_object
from rollouts.production.prompts import task_set
from settings.errors import InvalidInput, UserError
from settings.evaluation import EvaluationSettings
from storage.log.entries import Evaluation
from storage.log.promotion import CHAMPION, NotPromoted, pass_gate
from storage.log.run_log import RunLog
from storage.log.run_state import RunState
from storage.log.runs import find_policy, local_config
from storage.log.scores import failure_of, own_evaluations, own_scores
from tasks.prefect.run_page import announce
from tasks.session import run_log

logger = logging.getLogger("millrace.evaluation")

_STANDARD_ERRORS = 3
"""A score that falls by more than this is no noise."""


class EvaluationFailed(UserError):
    """Every attempt of an evaluation failed."""


def look_up_policy(*, store: str, run: str, version: int | None) -> tuple[RunLog, dict[str, Any], int]:
    """A run's log, configuration and a policy version, by default the newest. Raises `NotFound` and `InvalidInput`."""
    log = run_log(store=store, run=run)
    return log, local_config(log), find_policy(log, version).version


def check_split(log: RunLog, *, workflow: str, dataset: str, split: str, adopt_tasks: bool) -> None:
    """Raise `InvalidInput` if the workflow does not know the split, has no tasks in it, or others than before."""
    loaded = load_object(workflow)(dataset or None)
    try:
        tasks = loaded.tasks(split)
    except KeyError as error:
        if error.args != (split,):
            raise
        tasks = []
    if not tasks:
        raise InvalidInput(f"{workflow} has no tasks in split {split!r}; name another split")
    task_set(log.state, tasks, run=log.run_id, split=split, adopt=adopt_tasks)


def warn_of_greedy_attempts(settings: EvaluationSettings) -> None:
    """Warn that several attempts per problem tell no more than one at temperature 0."""
    if settings.n_samples > 1 and settings.temperature == 0:
        logger.warning(
            "%d attempts per problem at temperature 0 are all alike unless the environment draws: set a temperature",
            settings.n_samples,
        )


def raise_if_failed(evaluation: Evaluation) -> None:
    """Raise `EvaluationFailed` if every attempt failed. The entry stays in the log, and nothing takes its score."""
    if problem := failure_of(evaluation):
        raise EvaluationFailed(problem)


def is_evaluated(state: RunState, settings: EvaluationSettings) -> bool:
    """Whether the live policy has an evaluation of the run's own, which has these settings."""
    return state.newest_version in {each.version for each in own_evaluations(state, settings.model_dump())}


def warn_of_a_fall(log: RunLog, settings: EvaluationSettings) -> None:
    """Warn if the run's newest score has fallen, see `score_fell`."""
    if problem := score_fell(own_scores(log, {"evaluation": settings.model_dump()})):
        logger.warning(problem)


def score_fell(scores: Sequence[Evaluation]) -> str:
    """A sentence if the newest score is more than three standard errors of the difference below the best before it,
    and the one before was not; else nothing. `scores` are by policy version."""

    def best_above(scores: Sequence[Evaluation]) -> Evaluation | None:
        *before, newest = scores
        best = max(before, key=lambda each: each.score, default=newest)
        noise = math.hypot(best.standard_error or 0.0, newest.standard_error or 0.0)
        return best if best.score - newest.score > _STANDARD_ERRORS * noise else None

    if len(scores) < 2 or (best := best_above(scores)) is None or best_above(scores[:-1]) is not None:
        return ""
    newest = scores[-1]
    return (
        f"the held-out score has fallen from {best.score:.3f} (policy {best.version}) to {newest.score:.3f} (policy "
        f"{newest.version}), by more than {_STANDARD_ERRORS} standard errors: a lower learning_rate or train.kl may "
        "hold the policy; the worst attempts tell more"
    )


def try_gate(log: RunLog, evaluation: Evaluation, *, min_score: float | None, max_gap: float) -> list[str] | None:
    """Make the policy the champion if its evaluation passes; returns what speaks against it, None without a gate."""
    if min_score is None:
        return None
    version = evaluation.version
    try:
        pass_gate(log, evaluation, min_score=min_score, max_gap=max_gap)
    except NotPromoted as refused:
        champion = log.state.aliases.get(CHAMPION)
        stays = f"policy {champion.version} stays the champion" if champion is not None else "there is no champion"
        logger.warning("%s\n  %s", refused, stays)
        scored = {"score": evaluation.score, "split": evaluation.split, "min_score": min_score}
        announce(log, "gate.failed", version=version, **scored, problems=refused.problems, outcome=stays)
        return refused.problems
    logger.info("policy %d is the champion: it scored %.3f on %r", version, evaluation.score, evaluation.split)
    announce(log, "gate.passed", version=version, score=evaluation.score)
    return []
