"""Which prompt stands where in the endless prompt order: a pure function of the seed.

In: the tasks of a split and a seed. Out: the prompt at a position. Every epoch shuffles the tasks anew. Which positions
are free is a fold of the run's log (`RunState.free_positions`), so a resumed run asks exactly what the log lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from settings.errors import InvalidInput
from storage.records import Task


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A problem, and which pass over the data set asks it."""

    position: int
    """Place in the prompt order: epoch × len(tasks) + index."""
    epoch: int
    """Pass over the data set, from 0."""
    task: Task
    """The problem."""
    retry: int = 0
    """How often it came to nothing before."""

    @property
    def group_id(self) -> str:
        """What the group of its attempts is called."""
        return f"{self.epoch}.{self.task.id}" + (f".retry{self.retry}" if self.retry else "")


def epoch_order(seed: int, epoch: int, num_tasks: int) -> np.ndarray:
    """Permutation of task indices in one epoch, shape [num_tasks]; every task exactly once."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_tasks)


class PromptOrder:
    """The endless sequence of a data set's prompts."""

    def __init__(self, tasks: Sequence[Task], *, seed: int) -> None:
        if not tasks:
            raise InvalidInput("the workflow's train split is empty; give it at least one task")
        ids = {task.id for task in tasks}
        if len(ids) != len(tasks):
            raise InvalidInput(f"task ids are not unique: {len(tasks)} tasks, {len(ids)} ids")
        self._tasks = tasks
        self._seed = seed
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def at(self, position: int, *, retry: int = 0) -> Prompt:
        """The prompt at a position, from 0; `retry` says how often it has run before."""
        epoch, index = divmod(position, len(self._tasks))
        if self._order[0] != epoch:
            self._order = (epoch, epoch_order(self._seed, epoch, len(self._tasks)))
        return Prompt(position=position, epoch=epoch, task=self._tasks[int(self._order[1][index])], retry=retry)
