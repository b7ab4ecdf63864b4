"""What a user may set about rollouts. Each field's text is its help, here and in the Prefect form."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class SamplingSettings(BaseModel):
    """How the policy draws its tokens."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    temperature: float = Field(default=1.0, gt=0)
    """Softmax temperature during training rollouts; evaluation has its own. Every token stays possible: a nucleus
    or top-k cut would renormalise the engine's logprobs and bias every probability ratio."""
    max_tokens: int = Field(default=256, ge=1)
    """Longest reply of one turn, in tokens."""


class RolloutSettings(BaseModel):
    """How attempts are scheduled, grouped, filtered and flushed into shards."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    max_concurrent: int = Field(default=64, ge=1)
    """Most prompt groups in flight at once."""
    min_usable: int = Field(default=2, ge=1)
    """A group with fewer usable attempts is counted as failed and not trained."""
    drop_uniform_groups: bool = False
    """Reject groups whose attempts all got the same reward (DAPO's dynamic sampling)."""
    max_attempts: int = Field(default=10, ge=1)
    """Stop with a report after this many batches' worth of groups in a row without one accepted."""
    attempt_timeout: float = Field(default=600.0, gt=0)
    """Seconds one attempt may take before it ends with status `timeout`."""
    stall_timeout: float = Field(default=1800.0, gt=0)
    """Seconds without any progress after which the run fails with a report instead of waiting for ever."""
    reward_timeout: float = Field(default=30.0, gt=0)
    """Seconds one reward call may take before its process is killed."""
    reward_processes: int = Field(default=1, ge=1)
    """Child processes that compute rewards."""
    shard_bytes: int = Field(default=64 * 2**20, ge=1024)
    """Flush a shard when its tokens reach about this size, even before the batch is full."""
    shard_seconds: float = Field(default=30.0, gt=0)
    """Flush finished groups after this many seconds, even before the batch is full."""


class EvaluationSettings(BaseModel):
    """Held-out evaluation during training."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    every: int = Field(default=10, ge=0)
    """Evaluate after this many steps, and before the first and after the last one; 0 never."""
    split: str = "test"
    """Which split of the workflow to ask."""
    num_tasks: int = Field(default=200, ge=1)
    """At most this many problems, the first ones of the split."""
    n_samples: int = Field(default=1, ge=1)
    """Attempts per problem; the score is their mean (avg@n)."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy decoding."""


class EngineSettings(BaseModel):
    """The inference engine inside the rollout worker."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    kind: Literal["vllm", "scripted"] = "vllm"
    """`vllm`, on GPU and CPU alike; `scripted` answers at random, for trying a pipeline without a model server."""
    max_model_len: int = Field(default=2048, ge=8)
    """Longest prompt plus replies of one trajectory, in tokens."""
    clear_cache_on_reload: bool = True
    """Drop prefix-cache blocks computed by the old weights when new ones are loaded."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Passed unread to vLLM's engine arguments, for example {"tensor_parallel_size": 2}."""
