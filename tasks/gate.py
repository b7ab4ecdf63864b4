"""The gate between an evaluation and the alias `champion`: one decision, by code, for whoever evaluates.

In: a session and an evaluation. Out: the alias moved in the log; or a warning and an event that say why not, and a
notification of that event where somebody has asked for one (`tasks/prefect/notifications.py`).
"""

from __future__ import annotations

import logging

from storage.log.entries import Evaluation
from storage.log.promotion import CHAMPION, NotPromoted, pass_gate
from tasks.prefect.announcements import announce
from tasks.session import RunSession

logger = logging.getLogger("millrace.gate")


def try_gate(
    session: RunSession, evaluation: Evaluation, *, min_score: float | None, max_gap: float
) -> list[str] | None:
    """Make the policy the champion if its evaluation passes; returns what speaks against it, nothing where it passed,
    and null where `min_score` is null: then there is no gate."""
    if min_score is None:
        return None
    log, version = session.log, evaluation.version
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
