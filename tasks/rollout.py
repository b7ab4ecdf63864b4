"""Prefect tasks around the rollout worker: start it, let it produce a shard, evaluate, publish a policy to it.

In: a session. Out: small records; trajectories themselves go from the worker to the store.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from rollouts.attempts import AttemptLimits
from rollouts.config import EngineSettings, EvaluationSettings, RewardSettings, RolloutSettings, SamplingSettings
from rollouts.executor import Limits
from rollouts.loading import absolute_path
from storage.digests import sha256_of_json
from storage.log_entries import Alias, Evaluation, Policy, Shard
from storage.records import Sampling
from storage.runs import run_config
from tasks.session import ROLLOUT, RunSession

logger = logging.getLogger("millrace.rollout")

ROLLOUT_ALIAS = "rollout"


@task(name="start-rollout-worker", cache_policy=NO_CACHE, persist_result=False)
async def start_rollout_worker(
    session: RunSession,
    *,
    workflow: str,
    dataset: str,
    engine: EngineSettings,
    rollout: RolloutSettings,
    reward: RewardSettings,
    sampling: SamplingSettings,
    n_samples: int,
    batch_size: int,
    max_staleness: float,
    steps: int,
    seed: int,
    name: str = "rollout-0",
    version: int | None = None,
) -> str:
    """Load a policy, the live one by default, into an engine; returns the checksum of the weights it holds.

    Nothing is produced before the worker is told to look at the log.
    """
    logger.info("starting the inference engine")
    limits = Limits(
        n_samples=n_samples,
        batch_size=batch_size,
        max_staleness=max_staleness,
        total_groups=steps * batch_size,
        **rollout.model_dump(include={f.name for f in dataclasses.fields(Limits)}),
    )
    arguments = {
        "store_uri": session.log.store.uri,
        "run_id": session.log.run_id,
        "name": name,
        "workflow": absolute_path(workflow),
        "dataset": dataset or None,
        "engine": engine,
        "limits": limits,
        "sampling": Sampling(**sampling.model_dump()),
        "attempt_limits": AttemptLimits(
            **rollout.model_dump(include={f.name for f in dataclasses.fields(AttemptLimits)})
        ),
        "reward": reward,
        "seed": seed,
        "code_version": session.log.state.sessions[-1].code_version,
        "config_sha256": sha256_of_json(run_config(session.log)),
        "cache": str(session.cache),
    }
    worker = await session.host(ROLLOUT, "rollouts.worker:RolloutWorker", name=name, arguments=arguments)
    checksum: str = await worker.call("start", version)
    return checksum


def mark_served(session: RunSession, *, checksum: str) -> None:
    """Put the alias `rollout` on the live policy; warn where an engine held other weights under the same version."""
    live = session.log.refresh().live
    assert live is not None, "the base policy comes first"
    recorded = session.log.state.aliases.get(ROLLOUT_ALIAS)
    if recorded is not None and recorded.version == live.version and recorded.checksum != checksum:
        logger.warning("the engine's checksum of policy %d differs from the one recorded before", live.version)
    session.log.append(Alias(name=ROLLOUT_ALIAS, version=live.version, checksum=checksum))
    logger.info("the engine serves policy %d", live.version)


@task(name="collect", task_run_name="collect-{number}", cache_policy=NO_CACHE, persist_result=False)
async def collect_shard(session: RunSession, *, number: int) -> dict[str, Any] | None:
    """One committed shard: its id, rows and tokens; null when nothing could run."""
    shard: Shard | None = await session.rollout.call("collect")
    session.arrivals.set()
    if shard is None:
        return None
    return {
        "shard": shard.id,
        "rows": shard.num_rows,
        "tokens": shard.num_tokens,
        "groups": len(shard.groups),
    }


@task(
    name="evaluate",
    task_run_name="evaluate-{version}",
    retries=1,
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def evaluate_policy(session: RunSession, *, version: int | None, settings: EvaluationSettings) -> Evaluation:
    """Held-out score of the version that is loaded; a later publication waits for it, training does not."""
    evaluation: Evaluation = await session.rollout.call("evaluate", **settings.model_dump(exclude={"every"}))
    return evaluation


@task(
    name="publish",
    task_run_name="publish-{policy.version}",
    retries=2,
    retry_delay_seconds=1,
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def publish_policy(session: RunSession, *, policy: Policy) -> None:
    """Swap the engine's weights under its running requests and move the alias `rollout`."""
    started = time.perf_counter()
    checksum = await session.rollout.call("publish", policy)
    session.log.append(Alias(name=ROLLOUT_ALIAS, version=policy.version, checksum=checksum))
    session.publish_seconds = time.perf_counter() - started
