"""`[evaluation]`: held-out evaluation during training."""

from __future__ import annotations

from pydantic import Field

from settings.block import Block


class EvaluationSettings(Block):
    """Held-out evaluation during training."""

    every: int = Field(default=10, ge=0)
    """Evaluate after this many steps, and before the first and after the last one; 0 never."""
    split: str = "test"
    """Which split of the workflow to ask."""
    num_tasks: int = Field(default=200, ge=1)
    """At most this many problems, the first ones of the split."""
    n_samples: int = Field(default=1, ge=1, le=65536)
    """Attempts per problem; the score is their mean (avg@n)."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy decoding."""
    max_concurrent: int = Field(default=256, ge=1)
    """Most problems in flight at once."""
    own_engine: bool = False
    """Evaluate on an engine of its own, so that a new policy never waits for an evaluation; it costs the memory of
    one more engine."""
    gate_score: float | None = None
    """A policy that is evaluated with this score or more becomes the champion, unless the log speaks against it; unset:
    no evaluation makes one."""
    gate_gap: float | None = Field(default=None, ge=0, allow_inf_nan=True)
    """Largest gap between engine and trainer, in nats per token, of the steps that led to a champion; unset:
    `train.max_gap`."""
