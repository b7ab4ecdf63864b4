"""Prefect tasks that the fleet does: start a worker, swap its policy, produce a shard, evaluate.

In: a session. Out: small records; trajectories themselves go from the worker to the store.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable
from functools import partial
from typing import Any

from prefect import task
from prefect.tasks import exponential_backoff

from infra.ray.hosted import WorkerDied
from settings.evaluation import EvaluationSettings
from storage.log.entries import Evaluation, Policy
from storage.log.scores import failure_of
from tasks.prefect.run_logs import log_evaluation
from tasks.prefect.task_runs import may_pass
from tasks.session import RunSession

logger = logging.getLogger("millrace.rollout")


@task(name="start-rollout-worker", task_run_name="start-{name}", persist_result=False)
async def start_rollout_worker(session: RunSession, *, name: str, version: int | None = None) -> str:
    """Load a policy into the engine of a new worker; see `Fleet.start`."""
    return await session.once(f"start-{name}", lambda: session.fleet.start(name, version=version))


@task(
    name="publish",
    task_run_name="publish-{policy.version}",
    retries=3,
    retry_delay_seconds=exponential_backoff(backoff_factor=1),
    retry_condition_fn=may_pass,
    persist_result=False,
)
async def publish_policy(session: RunSession, *, policy: Policy) -> None:
    """Swap the weights of every engine of this session and move the alias `rollout`, by which those elsewhere go."""
    started = time.perf_counter()
    await session.fleet.publish(policy, session.trainer)
    session.clock.publish_seconds = time.perf_counter() - started


@task(
    name="load",
    task_run_name="load-{policy.version}",
    retries=3,
    retry_delay_seconds=exponential_backoff(backoff_factor=1),
    retry_condition_fn=may_pass,
    persist_result=False,
)
async def load_policy(session: RunSession, *, policy: Policy) -> None:
    """Swap the weights of every engine of this session; another process has published the policy."""
    await session.fleet.swap(policy)


@task(name="collect", task_run_name="collect-{worker}-{number}", persist_result=False)
async def collect_shard(session: RunSession, *, worker: str, number: int) -> dict[str, Any] | None:
    """One committed shard: its id, rows and tokens; None when nothing could run."""
    shard = await session.fleet.collect(worker)
    if shard is None:
        return None
    return {"shard": shard.id, "rows": shard.num_rows, "tokens": shard.num_tokens, "groups": len(shard.groups)}


async def produce(session: RunSession, name: str) -> None:
    """Collect shard after shard with one worker, and with a new one when it dies, perhaps while it starts.

    Ends when it is cancelled, or when no other worker may be started; raises as `Fleet.leave`.
    """
    fleet = session.fleet
    while True:
        try:
            if name not in fleet.workers:
                await start_rollout_worker(session, name=name)
                await fleet.join(name)
            worker, number = fleet.workers[name], session.log.state.entries
            await worker.call("refresh")
            while True:
                await worker.call("wait_for_work")
                await collect_shard(session, worker=name, number=number)
                number += 1
        except WorkerDied as death:
            if not await fleet.leave(name, death=death):
                return
            name = fleet.next_name()


def evaluating(session: RunSession, *, version: int, **how: Any) -> Awaitable[Evaluation]:
    """The work of `evaluate_policy`."""
    return session.once(f"evaluate-{version}", partial(session.fleet.evaluate, version=version, **how))


@task(
    name="evaluate",
    task_run_name="evaluate-{version}",
    retries=2,
    retry_delay_seconds=exponential_backoff(backoff_factor=2),
    retry_condition_fn=may_pass,
    persist_result=False,
)
async def evaluate_policy(
    session: RunSession, *, version: int, settings: EvaluationSettings, adopt_tasks: bool = False
) -> Evaluation:
    """Held-out score of a policy version; see `Fleet.evaluate`. If the worker dies, the next one does it again."""
    evaluation = await evaluating(session, version=version, settings=settings, adopt_tasks=adopt_tasks)
    log_evaluation(evaluation)
    if problem := failure_of(evaluation):
        logger.warning(problem)
    return evaluation
