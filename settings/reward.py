"""`[reward]`: how replies are scored, and what becomes of the score."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from settings.block import Block


class RewardSettings(Block):
    """How replies are scored, and what becomes of the score: (weighted sum + bias) · scale, clipped, less overlong."""

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
