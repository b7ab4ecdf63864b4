"""What every table of the run file has in common. The text under a field is its help, also in the Prefect form."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Block(BaseModel):
    """A table of the run file; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
