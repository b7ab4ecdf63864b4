"""Workers that are made in one place and started in another, where their engine or model is to live.

In: a class whose `start` sets what everything else needs. Out: an error that says so where something came first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn


class NotStarted(AttributeError):
    """A worker was used before its `start` had ended."""


class Startable:
    """Base of a class with a `start`: what only `start` sets cannot be read before."""

    if not TYPE_CHECKING:  # a type checker is to find what no class has

        def __getattr__(self, name: str) -> NoReturn:
            """Called for what is not there."""
            if name.startswith("__"):
                raise AttributeError(f"{type(self).__name__} has no {name}")
            raise NotStarted(
                f"{type(self).__name__} has no {name!r} yet: call start() first, and wait for it to end; it connects "
                "the worker with its run"
            )
