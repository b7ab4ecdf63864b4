"""`[sampling]`: how the policy draws its tokens."""

from __future__ import annotations

from pydantic import Field

from settings.block import Block


class SamplingSettings(Block):
    """How the policy draws its tokens."""

    temperature: float = Field(default=1.0, gt=0)
    """Softmax temperature during training rollouts; evaluation has its own. Every token stays possible: a nucleus
    or top-k cut would renormalise the engine's logprobs and bias every probability ratio."""
    max_tokens: int = Field(default=256, ge=1)
    """Longest reply of one turn, in tokens."""
