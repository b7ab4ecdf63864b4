"""`[rollout]`: how attempts are scheduled, grouped, filtered and flushed into shards."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from settings.block import Block

Fallback = Literal["fail", "skip_step", "masked"]
OutOfRoomRule = Literal["exclude", "zero", "score"]


class RolloutSettings(Block):
    """How attempts are scheduled, grouped, filtered and flushed into shards."""

    num_workers: int = Field(default=1, ge=0, le=16384)
    """Rollout workers that the training run starts, each with an engine of its own; on CPUs they divide its
    threads. 0: it only trains, and producers on other machines (`millrace produce`) work for it."""
    max_concurrent: int = Field(default=64, ge=1)
    """Most prompt groups in flight at once, per worker; several workers take at most a fair share each."""
    min_usable: int = Field(default=2, ge=1)
    """A group with fewer usable attempts is counted as failed and not trained."""
    retries: int = Field(default=1, ge=0)
    """How often the prompt of a failed group runs again."""
    exclude_statuses: list[Literal["truncated", "max_turns"]] = []
    """Attempts that end like this are counted and not trained (DAPO's overlong filtering)."""
    on_out_of_room: OutOfRoomRule = "score"
    """What an attempt is worth whose conversation fills `engine.max_model_len`, so that its next reply has no room.
    `score`: what the workflow makes of an empty reply, and 0 if it then asks once more, or if it is an agent that gives
    up; `zero`: 0; `exclude`: it has no reward and is not trained. `score` is the default because a policy that is never
    told that it ran out of room does not learn to stay short, and because only the workflow knows what a failed attempt
    is worth: where wrong replies cost −1, a 0 would reward running out of room. TRL and verl score cut replies too."""
    drop_uniform_groups: bool = False
    """Reject groups whose attempts all got the same score (DAPO's dynamic sampling): the weighted sum of the parts,
    before bias, scale, clip and the overlong penalty, and but for rounding."""
    dynamic_batch: bool = False
    """Take `batch_size` attempted groups per step and train those that were accepted, instead of waiting for
    `batch_size` accepted ones."""
    max_attempts: int = Field(default=10, ge=1)
    """A step goes with what was accepted after this many batches' worth of groups; if that is nothing, see
    `on_nothing_accepted`."""
    on_nothing_accepted: Fallback = "fail"
    """`fail` stops the run with a report; `skip_step` counts the step and keeps the weights; `masked` takes an
    optimizer step without a gradient, so that schedules and moments go on."""
    schedule: Literal["free", "fixed"] = "free"
    """Which policy answers a prompt above `max_staleness = 0`. `free`: the newest at the moment, also inside a reply.
    `fixed`: batch n is sampled whole by the policy of step n − 1 − `max_staleness`, and batches are taken in prompt
    order, so that nothing depends on the moment. Engines then change their weights between two batches."""
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
    require_sandbox: bool = False
    """Refuse to start on a machine that cannot isolate code that a policy wrote; `millrace doctor` tells. Otherwise a
    start only says so, and code rewards and sandboxed tools refuse when they are called, unless `allow_unsandboxed`."""
    stall_timeout: float = Field(default=1800.0, gt=0)
    """Seconds without any progress after which the run fails with a report instead of waiting for ever."""
    lease_timeout: float = Field(default=60.0, gt=0)
    """Seconds without a sign of life after which the prompts of a producer on another machine are given to others."""
    shard_bytes: int = Field(default=64 * 2**20, ge=1024)
    """Flush a shard when its tokens reach about this size, even before the batch is full."""
    shard_seconds: float = Field(default=30.0, gt=0)
    """Flush finished groups after this many seconds, even before the batch is full."""
