"""What a user may set about rollouts. Each field's text is its help, here and in the Prefect form."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


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

    num_workers: int = Field(default=1, ge=0)
    """Rollout workers that the training run starts, each with an engine of its own; on CPUs they divide all
    threads but one. 0: it only trains, and producers on other machines (`millrace produce`) work for it."""
    max_concurrent: int = Field(default=64, ge=1)
    """Most prompt groups in flight at once, per worker; several workers take at most a fair share each."""
    min_usable: int = Field(default=2, ge=1)
    """A group with fewer usable attempts is counted as failed and not trained."""
    retries: int = Field(default=1, ge=0)
    """How often the prompt of a failed group runs again."""
    exclude_statuses: list[Literal["truncated", "max_turns"]] = []
    """Attempts that end like this are counted and not trained (DAPO's overlong filtering)."""
    drop_uniform_groups: bool = False
    """Reject groups whose attempts all got the same reward (DAPO's dynamic sampling)."""
    dynamic_batch: bool = False
    """Take `batch_size` attempted groups per step and train those that were accepted, instead of waiting for
    `batch_size` accepted ones."""
    max_attempts: int = Field(default=10, ge=1)
    """A step goes with what was accepted after this many batches' worth of groups; if that is nothing, see
    `on_nothing_accepted`."""
    on_nothing_accepted: Literal["fail", "skip_step", "masked"] = "fail"
    """`fail` stops the run with a report; `skip_step` counts the step and keeps the weights; `masked` takes an
    optimizer step without a gradient, so that schedules and moments go on."""
    pace: bool = True
    """Under `train.stale_policy = "strict"`, let a new policy version wait for a running group that it would push over
    the staleness bound, for as long as the engine stays busy."""
    attempt_timeout: float = Field(default=600.0, gt=0)
    """Seconds one attempt may take before it ends with status `timeout`."""
    max_tool_turns: int = Field(default=8, ge=0)
    """Turns of one attempt whose tool calls are executed; an attempt that asks for more ends as `max_turns`."""
    tool_timeout: float = Field(default=30.0, gt=0)
    """Seconds one tool call may take before the policy is told that it timed out."""
    tool_output_chars: int = Field(default=8192, ge=16)
    """Longer tool results are cut, with a note that says so."""
    stall_timeout: float = Field(default=1800.0, gt=0)
    """Seconds without any progress after which the run fails with a report instead of waiting for ever."""
    lease_timeout: float = Field(default=60.0, gt=0)
    """Seconds without a sign of life after which the prompts of a producer on another machine are given to others."""
    shard_bytes: int = Field(default=64 * 2**20, ge=1024)
    """Flush a shard when its tokens reach about this size, even before the batch is full."""
    shard_seconds: float = Field(default=30.0, gt=0)
    """Flush finished groups after this many seconds, even before the batch is full."""


class RewardSettings(BaseModel):
    """How replies are scored, and what becomes of the score: (weighted sum + bias) · scale, clipped, less overlong."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    timeout: float = Field(default=30.0, gt=0)
    """Seconds one reward call may take before its process is killed."""
    on_timeout: Literal["exclude", "zero", "fail"] = "exclude"
    """A reward that took too long: `exclude` the attempt, give it `zero`, or `fail` the run."""
    processes: int = Field(default=1, ge=1)
    """Child processes that compute rewards."""
    memory_gb: float = Field(default=4.0, gt=0)
    """Address space of one reward process; a reward that wants more fails, and only it."""
    weights: dict[str, float] = {}
    """Weight of each named part in the sum; parts that are not named here count 1."""
    bias: float = 0.0
    """Added to the weighted sum."""
    scale: float = 1.0
    """Multiplies the result."""
    clip: float | None = Field(default=None, gt=0)
    """Rewards are clipped to [−clip, clip]."""
    overlong_tokens: int = Field(default=0, ge=0)
    """Width of the zone before `sampling.max_tokens` in which length costs reward (DAPO's soft overlong punishment)."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """What a reply at the very limit loses."""


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
    max_concurrent: int = Field(default=256, ge=1)
    """Most problems in flight at once."""
    own_engine: bool = False
    """Evaluate on an engine of its own, so that a new policy never waits for an evaluation; it costs the memory of
    one more engine."""
    gate_score: float | None = None
    """A policy that is evaluated with this score or more becomes the champion, unless the log speaks against it; null:
    no evaluation makes one."""
    gate_gap: float | None = Field(default=None, ge=0)
    """Largest gap between engine and trainer, in nats per token, of the steps that led to a champion; null:
    `train.max_gap`."""


WeightTransfer = Literal["store", "gloo", "nccl"]


def num_parts(arguments: dict[str, Any]) -> int:
    """Workers of one engine with these arguments of vLLM's: that many devices, where it has any to itself."""
    return int(arguments.get("tensor_parallel_size", 1)) * int(arguments.get("pipeline_parallel_size", 1))


class EngineSettings(BaseModel):
    """The inference engine inside the rollout worker."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    kind: Literal["vllm", "scripted"] = "vllm"
    """`vllm`, on GPU and CPU alike; `scripted` answers at random, for trying a pipeline without a model server."""
    max_model_len: int = Field(default=2048, ge=8)
    """Longest prompt plus replies of one trajectory, in tokens."""
    update_mode: Literal["keep", "wait", "abort"] = "keep"
    """New weights and running requests: `keep` freezes them over the swap, `wait` lets them finish first, `abort`
    stops them and continues each from the tokens it has."""
    clear_cache_on_reload: bool = True
    """Drop every key and value that the old weights computed when new ones are loaded, those of running requests too,
    which are computed anew; false goes on with them."""
    weight_transfer: WeightTransfer = "store"
    """How new weights come to the engines of the training run: read from the `store`, or by a broadcast of the trainer,
    `nccl` between GPUs or `gloo` between CPUs. The store has them in any case, and is read where a broadcast fails."""
    tool_parser: str = "hermes"
    """vLLM's parser for the tool calls of this model family: hermes (Qwen), llama3_json, mistral, …"""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Passed on as vLLM's engine arguments, for example {"tensor_parallel_size": 2}."""

    @field_validator("vllm")
    @classmethod
    def _is_one_engine(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        if "data_parallel_size" in arguments:
            raise ValueError("each worker has one engine; set rollout.num_workers for more of them")
        return arguments

    @property
    def num_gpus(self) -> int:
        """GPUs of one engine, where there are any."""
        return num_parts(self.vllm)
