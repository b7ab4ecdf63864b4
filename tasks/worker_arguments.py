"""What a rollout worker of a run is built with.

In: the parts of a run's configuration that rollouts depend on, and its log. Out: plain arguments that travel to
another process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infra.user_code import absolute_path
from rollouts.production.attempts import AttemptLimits
from rollouts.production.executor import Limits
from settings.engine import EngineSettings
from settings.reward import RewardSettings
from settings.rollout import RolloutSettings
from settings.sampling import SamplingSettings
from settings.train import TrainSettings
from storage.log.run_log import RunLog
from storage.log.runs import run_config
from storage.objects.digests import sha256_of_json
from storage.records import Sampling
from tasks.session import code_version
from tasks.train import claim_rules


def worker_arguments(
    log: RunLog,
    *,
    cache: Path,
    workflow: str,
    dataset: str,
    engine: EngineSettings,
    rollout: RolloutSettings,
    reward: RewardSettings,
    sampling: SamplingSettings,
    train: TrainSettings,
    n_samples: int,
    batch_size: int,
    max_staleness: float,
    steps: int,
    seed: int,
) -> dict[str, Any]:
    """The arguments of `rollouts.production.worker.RolloutWorker`, all but its name."""
    limits = Limits(
        n_samples=n_samples,
        batch_size=batch_size,
        max_staleness=max_staleness,
        steps_per_update=train.steps_per_update,
        dynamic_batch=rollout.dynamic_batch,
        total_groups=steps * batch_size,
        max_concurrent=rollout.max_concurrent,
        min_usable=rollout.min_usable,
        retries=rollout.retries,
        cancel_stale=train.stale_policy == "strict",
        shard_bytes=rollout.shard_bytes,
        shard_seconds=rollout.shard_seconds,
    )
    attempt_limits = AttemptLimits(
        min_usable=rollout.min_usable,
        drop_uniform_groups=rollout.drop_uniform_groups,
        exclude_statuses=rollout.exclude_statuses,
        attempt_timeout=rollout.attempt_timeout,
        max_tool_turns=rollout.max_tool_turns,
        tool_timeout=rollout.tool_timeout,
        tool_output_chars=rollout.tool_output_chars,
    )
    return {
        "store_uri": log.store.uri,
        "run_id": log.run_id,
        "workflow": absolute_path(workflow),
        "dataset": dataset or None,
        "engine": engine,
        "limits": limits,
        "rules": claim_rules(batch_size=batch_size, max_staleness=max_staleness, rollout=rollout, train=train),
        "sampling": Sampling(**sampling.model_dump()),
        "attempt_limits": attempt_limits,
        "reward": reward,
        "seed": seed,
        "code_version": code_version(),
        "config_sha256": sha256_of_json(run_config(log)),
        "cache": str(cache),
        "lease_timeout": rollout.lease_timeout,
        "lora_rank": train.lora.rank if train.lora is not None else 0,
    }
