"""What a user may set about the views of a run. Each field's text is its help, here and in the Prefect form."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class TraceSettings(BaseModel):
    """Which attempts MLflow shows turn by turn, as traces; every attempt is in the shards."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    per_evaluation: int = Field(default=2, ge=0)
    """Attempts per evaluation, from the lowest reward to the highest. 0: none."""
    per_step: int = Field(default=2, ge=0)
    """The same of a training step that is traced. 0: none."""
    every: int = Field(default=10, ge=1)
    """Steps from one that is traced to the next."""
