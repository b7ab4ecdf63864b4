"""Prefect tasks that a rollout worker does: produce a shard, evaluate a policy.

In: a session. Out: small records; trajectories themselves go from the worker to the store.
"""

from __future__ import annotations

import logging
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.tasks import exponential_backoff

from infra.fleet import WorkerDied
from rollouts.production.evaluation import failure_of
from settings.evaluation import EvaluationSettings
from storage.log.entries import Evaluation, Shard
from tasks.session import REPLACEMENTS, RunSession
from tasks.workers import leave, refresh_workers

logger = logging.getLogger("millrace.rollout")


@task(name="collect", task_run_name="collect-{worker}-{number}", cache_policy=NO_CACHE, persist_result=False)
async def collect_shard(session: RunSession, *, worker: str, number: int) -> dict[str, Any] | None:
    """One committed shard: its id, rows and tokens; null when nothing could run."""
    shard: Shard | None = await session.workers[worker].call("collect")
    session.arrivals.set()
    if shard is None:
        return None
    session.replacements_left = REPLACEMENTS
    await refresh_workers(session, but=worker)  # what was rejected is room for everybody
    return {
        "shard": shard.id,
        "rows": shard.num_rows,
        "tokens": shard.num_tokens,
        "groups": len(shard.groups),
    }


async def produce_until_death(session: RunSession, *, worker: str) -> bool:
    """Collect shard after shard until the worker dies. True when another one may take its place."""
    number = session.log.state.entries
    try:
        await session.workers[worker].call("refresh")
        while True:
            await session.workers[worker].call("wait_for_work")
            await collect_shard(session, worker=worker, number=number)
            number += 1
    except WorkerDied as death:
        return await leave(session, worker, death=death)


@task(
    name="evaluate",
    task_run_name="evaluate-{version}",
    retries=2,
    retry_delay_seconds=exponential_backoff(backoff_factor=2),
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def evaluate_policy(session: RunSession, *, version: int, settings: EvaluationSettings) -> Evaluation:
    """Held-out score of a policy version.

    On an engine of its own where the session has one. Else on a rollout worker's, which serves this version now: a
    later publication waits for it, training does not. Where that worker dies it is done by another one, once there is
    one, on what that serves.
    """
    arguments = settings.model_dump(exclude={"every", "own_engine", "gate_score", "gate_gap"})
    if session.evaluator is not None:
        evaluation: Evaluation = await session.evaluator.call("evaluate_version", version, **arguments)
    else:
        await session.has_workers.wait()
        evaluation = await next(iter(session.workers.values())).call("evaluate", **arguments)
    if problem := failure_of(evaluation):
        logger.warning(problem)
    return evaluation
