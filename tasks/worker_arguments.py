"""What a rollout worker of a run is built with.

In: the parts of a run's configuration that rollouts depend on, and its log. Out: plain arguments that travel to
another process.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rollouts.attempts import AttemptLimits
from rollouts.config import EngineSettings, RewardSettings, RolloutSettings, SamplingSettings
from rollouts.executor import Limits
from storage.digests import sha256_of_json
from storage.loading import absolute_path
from storage.records import Sampling
from storage.run_log import RunLog
from storage.runs import run_config
from tasks.session import code_version
from tasks.train import claim_rules
from trainers.config import TrainSettings


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
    """The arguments of `rollouts.worker.RolloutWorker`, all but its name."""
    values = rollout.model_dump()
    limits = Limits(
        n_samples=n_samples,
        batch_size=batch_size,
        max_staleness=max_staleness,
        steps_per_update=train.steps_per_update,
        total_groups=steps * batch_size,
        cancel_stale=train.stale_policy == "strict",
        **_those_of(Limits, values),
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
        "attempt_limits": AttemptLimits(**_those_of(AttemptLimits, values)),
        "reward": reward,
        "seed": seed,
        "code_version": code_version(),
        "config_sha256": sha256_of_json(run_config(log)),
        "cache": str(cache),
        "lease_timeout": rollout.lease_timeout,
        "lora_rank": train.lora.rank if train.lora is not None else 0,
    }


def _those_of(record: type, values: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(record)}
    return {name: value for name, value in values.items() if name in names}
