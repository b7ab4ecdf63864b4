"""`[tracking]`: where MLflow is, what it registers, and who else gets metrics; `[traces]`: attempts turn by turn."""

from __future__ import annotations

import warnings
from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from settings.block import Block

with warnings.catch_warnings():  # the metaclass has a method of that name, which settings do not need
    warnings.filterwarnings("ignore", message='Field name "register"')

    class TrackingSettings(Block):
        """MLflow; a string is short for its `uri`."""

        uri: str = ""
        """MLflow tracking URI. Empty: `$MILLRACE_TRACKING`, or a SQLite database in `.millrace`."""
        register: Literal["all", "evaluated"] | PositiveInt = "evaluated"
        """Which policies are versions of the registered model: `evaluated`, those with a held-out score and the
        champion; a number N, every N-th too; `all` of them. `rollout` is an alias there while its policy is one."""

        also: list[Literal["tensorboard", "trackio", "wandb"]] = []
        """Where metrics go beside MLflow: `["tensorboard", "wandb"]`. Each is a package, and an extra, of that name."""

        @model_validator(mode="before")
        @classmethod
        def _short(cls, value: Any) -> Any:
            value = {"uri": value} if isinstance(value, str) else value
            if isinstance(value, dict) and isinstance(value.get("also"), str):
                value = {**value, "also": [value["also"]]}
            return value


class TraceSettings(Block):
    """Which attempts MLflow shows turn by turn, as traces; every attempt is in the shards."""

    per_evaluation: int = Field(default=2, ge=0)
    """Attempts per evaluation, from the lowest reward to the highest. 0: none."""
    per_step: int = Field(default=2, ge=0)
    """The same of a training step that is traced. 0: none."""
    every: int = Field(default=10, ge=1)
    """Steps from one that is traced to the next."""
