"""What a run will take of the disk, from sizes, before it starts.

In: a run's configuration. Out: bytes of the store and of the databases, at the end of the run. Weights and moments are
counted as the trainer writes them; a delta as the largest that is written; a row of a shard as one of a single turn
with `max_tokens` tokens (docs/shard_format.md: 11 bytes per token).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from settings.run_file import RunConfig
from storage.policies.model_config import stored_dtype
from storage.policies.policies import LARGEST_DELTA
from storage.retention.rules import NEWEST_STATES
from storage.tracking.registry import ALL_POINTS
from tasks.checks.learning_rate import num_parameters
from tasks.checks.memory_demand import ADAPTER_SHARE
from tasks.checks.preflight import about_model

_TOKEN_BYTES, _ROW_BYTES = 11, 500
_TASK_RUN_BYTES, _POINT_BYTES = 15_000, 18_000
"""What one step adds to Prefect's database, and to MLflow's if it has the step's metrics."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """Bytes at the end of a run."""

    store: int
    everything: int
    """Bytes of the store, if nothing were removed."""
    databases: int


def expected_space(config: RunConfig, *, removes: bool) -> Space | None:
    """None for a model that is not on this machine; `removes` is False for a run that keeps everything."""
    parameters = num_parameters(config)
    if parameters is None:
        return None
    train, kept, steps = config.train, config.retention, config.steps
    width = 4 if stored_dtype(about_model(config)) == "float32" else 2
    trained = parameters * (ADAPTER_SHARE if train.lora is not None else 1)
    state = trained * (12 + 4 * (train.ema is not None)) + 12 * parameters * (train.advantage.kind == "gae")
    row = config.sampling.max_tokens * _TOKEN_BYTES + _ROW_BYTES
    num_evaluations = steps // config.evaluation.every + 1 if config.evaluation.every else 0
    fixed = parameters * width + num_evaluations * config.evaluation.num_tasks * config.evaluation.n_samples * row

    def size(*, policies: int, anchors: int, states: int, shards: int) -> int:
        in_policies = anchors + (policies - anchors) * (LARGEST_DELTA if train.anchor_every > 1 else 1)
        rows = shards * config.batch_size * config.n_samples
        return int(fixed + in_policies * trained * width + states * state + rows * row)

    num_anchors, num_states = math.ceil(steps / train.anchor_every), steps // train.checkpoint_every
    everything = size(policies=steps, anchors=num_anchors, states=num_states, shards=steps)
    store = everything
    if removes:
        evaluated = num_evaluations if kept.keep_evaluated == "all" else min(num_evaluations, kept.keep_evaluated)
        policies = min(steps, kept.keep_last + evaluated + kept.every)
        newest = math.ceil((kept.keep_last + kept.every) / train.anchor_every) + 1
        store = size(
            policies=policies,
            anchors=min(policies, num_anchors, newest + evaluated),
            states=min(num_states, 4 + NEWEST_STATES + kept.every // train.checkpoint_every),
            shards=min(steps, 2 * kept.replay_steps + train.checkpoint_every + kept.every),
        )
    points = steps if steps <= ALL_POINTS else int(ALL_POINTS * (1 + math.log(steps / ALL_POINTS)))
    databases = steps * _TASK_RUN_BYTES + points * _POINT_BYTES
    return Space(store=store, everything=everything, databases=databases)
