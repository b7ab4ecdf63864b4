"""The endless order of prompts: a pure function of the tasks of a split and the seed. Every epoch shuffles them anew.

Which positions are free is a fold of the run's log (`RunState.free_positions`), so a resumed run continues exactly.
"""

from __future__ import annotations

import functools
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
    retry: int = 0
    """Number of earlier groups of this prompt that came to nothing."""

    @property
    def group_id(self) -> str:
        return f"{self.epoch}.{self.task.id}" + (f".retry{self.retry}" if self.retry else "")


@functools.lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, num_tasks: int) -> np.ndarray:
    """Permutation of task indices in one epoch, shape [num_tasks]; every task exactly once."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_tasks)


class PromptOrder:
    def __init__(self, tasks: Sequence[Task], *, seed: int) -> None:
        if not tasks:
            raise InvalidInput("the workflow's train split is empty; give it at least one task")
        num_ids = len({task.id for task in tasks})
        if num_ids != len(tasks):
            raise InvalidInput(f"task ids are not unique: {len(tasks)} tasks, {num_ids} ids")
        self._tasks = tasks
        self._seed = seed

    def at(self, position: int, *, retry: int = 0) -> Prompt:
        """The prompt at a position, from 0."""
        epoch, index = divmod(position, len(self._tasks))
        order = epoch_order(self._seed, epoch, len(self._tasks))
        return Prompt(position=position, epoch=epoch, task=self._tasks[int(order[index])], retry=retry)
