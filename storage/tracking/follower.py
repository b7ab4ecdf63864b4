"""What MLflow's registry and every other view of a run's log have in common.

In: a run's log. Out: the same content elsewhere. `tasks/mirror.py` calls each follower in turn, in a thread; an outage
of one is a warning, and its next call sends the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from settings.errors import UserError
from storage.log.entries import Registration


class FollowerUnavailable(UserError):
    """A view of the log did not take everything; the next `sync` sends the rest."""


class Follower(Protocol):
    """One run's log in one other place. It is made anew after an outage, so what it has sent is recorded there."""

    name: str
    """What messages call the service: MLflow at http://127.0.0.1:5000."""
    num_entries: int
    """How many entries of the log the place has for sure."""

    def sync(self) -> Sequence[Registration]:
        """Bring the place up to the log as it is folded now, and to the run's end (`storage.log.runs.outcome`).

        Returns what the log is to be told of it. Raises `FollowerUnavailable`; nothing else is an outage.
        """
