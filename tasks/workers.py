"""Prefect tasks around the fleet of rollout workers: start one, replace a dead one, publish a policy to all of them.

In: a session. Out: workers in `session.workers`, and entries in the log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.fleet import WorkerDied
from rollouts.engine import WeightUpdate
from storage.log_entries import Alias, Policy, Release
from tasks.session import REPLACEMENTS, RunSession

logger = logging.getLogger("millrace.workers")

ROLLOUT_ALIAS = "rollout"


@task(name="start-rollout-worker", task_run_name="start-{name}", cache_policy=NO_CACHE, persist_result=False)
async def start_rollout_worker(
    session: RunSession, *, name: str, arguments: dict[str, Any], version: int | None = None
) -> str:
    """Load a policy, the live one by default, into an engine; returns the checksum of its weights, empty where it
    serves an older one for now because the live one is damaged.

    Nothing is produced before the worker joins.
    """
    logger.info("starting the inference engine of %s", name)
    worker = await session.host(name, "rollouts.worker:RolloutWorker", arguments={**arguments, "name": name})
    checksum: str = await worker.call("start", version)
    return checksum


def mark_served(session: RunSession, *, checksums: list[str]) -> None:
    """Put the alias `rollout` on the live policy; warn where an engine holds other weights under the same version."""
    live = session.log.refresh().live
    assert live is not None, "the base policy comes first"
    serving = [checksum for checksum in checksums if checksum]
    if not serving:
        return  # each of them goes on to the live policy as soon as it can, or says why it cannot
    recorded = session.log.state.aliases.get(ROLLOUT_ALIAS)
    expected = recorded.checksum if recorded is not None and recorded.version == live.version else serving[0]
    if set(serving) != {expected}:
        logger.warning("an engine's checksum of policy %d differs from another's", live.version)
    session.log.append(Alias(name=ROLLOUT_ALIAS, version=live.version, checksum=serving[0]))
    logger.info("%d engine(s) serve policy %d", len(serving), live.version)


@task(
    name="publish",
    task_run_name="publish-{policy.version}",
    retries=2,
    retry_delay_seconds=1,
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def publish_policy(session: RunSession, *, policy: Policy) -> None:
    """Swap every engine's weights under its running requests and move the alias `rollout`.

    A worker that dies meanwhile is its producer's business.
    """
    started = time.perf_counter()
    answers = await asyncio.gather(
        *(worker.call("publish", policy) for worker in session.workers.values()), return_exceptions=True
    )
    _raise_all_but_deaths(answers)
    updates: list[WeightUpdate] = [answer for answer in answers if isinstance(answer, WeightUpdate)]
    if updates:
        session.log.append(
            Alias(
                name=ROLLOUT_ALIAS,
                version=policy.version,
                checksum=updates[0].checksum,
                update_mode=updates[0].mode,
                cache_cleared=updates[0].cache_cleared,
                paused_seconds=max(update.paused_seconds for update in updates),
            )
        )
    session.publish_seconds = time.perf_counter() - started


async def refresh_workers(session: RunSession, *, but: str = "") -> None:
    """Let the workers look at the log again: it may leave room for more. The dead are their producers' business."""
    others = [worker for name, worker in session.workers.items() if name != but]
    _raise_all_but_deaths(await asyncio.gather(*(w.call("refresh") for w in others), return_exceptions=True))


async def wait_for_stragglers(session: RunSession, *, version: int) -> None:
    """Let groups finish that the step on policy `version` would push over the bound, while their engines are busy."""
    workers = list(session.workers.values())
    answers = await asyncio.gather(*(w.call("wait_for_stragglers", version) for w in workers), return_exceptions=True)
    _raise_all_but_deaths(answers)


async def join(session: RunSession, name: str) -> None:
    """A started worker takes part from now on, with the newest policy that engines serve."""
    session.workers[name] = session.hosted[name]
    served = session.log.refresh().aliases.get(ROLLOUT_ALIAS)
    if served is not None:  # one may have been published while it was starting
        await session.workers[name].call("publish", session.log.state.policies[served.version])


async def leave(session: RunSession, name: str, *, death: WorkerDied) -> bool:
    """Take a dead worker out: its prompts are free for the others. True when another may be started in its place.

    Raises `death` where no worker is left and too many have died in a row.
    """
    session.workers.pop(name, None)
    session.log.append(Release(holder=name, reason=str(death)))
    await refresh_workers(session)
    session.replacements_left -= 1
    if session.replacements_left >= 0:
        logger.warning("%s; its prompts run elsewhere, another worker takes its place", death)
        return True
    if not session.workers:
        raise death
    logger.warning("%s; %d in a row: the run goes on with %d workers", death, REPLACEMENTS, len(session.workers))
    return False


def _raise_all_but_deaths(answers: Sequence[Any]) -> None:
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, WorkerDied):
            raise answer
