"""`[traces]`: which attempts MLflow shows turn by turn."""

from __future__ import annotations

from pydantic import Field

from settings.block import Block


class TraceSettings(Block):
    """Which attempts MLflow shows turn by turn, as traces; every attempt is in the shards."""

    per_evaluation: int = Field(default=2, ge=0)
    """Attempts per evaluation, from the lowest reward to the highest. 0: none."""
    per_step: int = Field(default=2, ge=0)
    """The same of a training step that is traced. 0: none."""
    every: int = Field(default=10, ge=1)
    """Steps from one that is traced to the next."""
