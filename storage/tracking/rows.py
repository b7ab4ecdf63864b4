"""What is sent to the places beside MLflow: rows of metrics, of one run.

In: nothing. Out: the records that `trackers` and the modules of the places have in common.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from storage.log.entries import Outcome

PROJECT = "millrace"
"""What a run belongs to where the user names nothing else; MLflow's experiment has the same name."""


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run as such a place knows it."""

    name: str
    id: str
    """Made from the birth id: a run that is removed and made anew has another one, a run that is moved keeps it."""
    config: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """The metrics of one log entry."""

    number: int
    """Counts from 0, in the order of the log."""
    step: int
    """Number of a training step, or policy version of an evaluation."""
    at: float
    """Unix time of the entry."""
    metrics: Mapping[str, float]


class Place(Protocol):
    """One run in one of these places, opened for writing. Any method may raise what its library raises."""

    num_rows: int
    """How many rows the run had there when it was opened."""

    def add(self, rows: Sequence[Row]) -> None:
        """Add some rows, which follow those that are there."""

    def close(self, outcome: Outcome | Literal["vanished"]) -> None:
        """End the run there; opened again, it goes on."""
