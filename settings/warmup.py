"""`[warmup]`: the tiny base model made when no `model` is given."""

from __future__ import annotations

from pydantic import Field

from settings.block import Block

TINY_POSITIONS = 256
"""Longest sequence of the tiny model, in tokens."""
DEMONSTRATIONS = 50_000
"""Conversations that it learns from."""


class WarmupSettings(Block):
    """The tiny base model made on the spot when no `model` is given."""

    hidden_size: int = Field(default=128, ge=32, multiple_of=32)
    """Width of the model: attention heads of 32."""
    num_layers: int = Field(default=2, ge=1)
    """Depth of the model."""
    target_loss: float = Field(default=0.23, gt=0)
    """Stop when the mean loss of the last 20 updates is below this (nats per token), or has not fallen for 500."""
    num_steps: int = Field(default=2000, ge=1)
    """Stop after this many supervised updates in any case."""
    batch_size: int = Field(default=128, ge=1)
    """Demonstrations per update."""
    learning_rate: float = Field(default=2e-3, gt=0)
    """Peak learning rate of the supervised updates."""
