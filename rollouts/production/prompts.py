"""The endless order of prompts: a pure function of the tasks of a split and the seed. Every epoch shuffles them anew.

Which positions are free is a fold of the run's log (`RunState.free_positions`), so a resumed run continues exactly, if
its tasks are the same. The log holds their digest; other tasks begin an epoch of their own, if a person says so.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from settings.errors import InvalidInput
from storage.log.entries import TaskSet
from storage.log.run_state import RunState
from storage.objects.digests import sha256_of_json
from storage.records import Task


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A problem, and which pass over the data set asks it."""

    position: int
    """Place in the prompt order: epoch × len(tasks) + index, counted from where the tasks were adopted."""
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


def task_set(state: RunState, tasks: Sequence[Task], *, run: str, split: str = "train", adopt: bool = False) -> TaskSet:
    """The tasks of a split as the run records them from now on.

    Raises `InvalidInput` if they are other than those of the run, unless `adopt`: then those of `train` begin a new
    epoch behind everything that was asked.
    """
    given = TaskSet(
        count=len(tasks),
        sha256=sha256_of_json([[task.id, task.prompt, task.answer, task.metadata] for task in tasks]),
        ids_sha256=sha256_of_json([task.id for task in tasks]),
    )
    recorded = state.task_set(split)
    if recorded is None or recorded.sha256 == given.sha256:
        return recorded or given
    if not adopt:
        if recorded.ids_sha256 == given.ids_sha256:
            change = "their ids are the same, and a prompt, an answer or metadata is another"
        elif recorded.count != given.count:
            change = f"there were {recorded.count:,}, and now there are {given.count:,}"
        else:
            change = "there are as many, with other ids or in another order"
        reasons = ("its prompt order would name others", " from a new epoch")
        why, how = reasons if split == "train" else ("scores would be of other problems than before", "")
        raise InvalidInput(
            f"the tasks of split {split!r} are not those that run {run!r} has had: {change}; {why}. Put the data back, "
            f"or go on with these{how}: --adopt-tasks"
        )
    if split != "train":
        return given
    first_free = max(state.positions, default=-1) + 1
    last_epoch = recorded.first_epoch + (first_free - recorded.first_position) // recorded.count
    # Epochs are left out for the positions before `first_free` that came to nothing: no group's id occurs twice.
    left_out = math.ceil(first_free / given.count)
    return dataclasses.replace(given, first_position=first_free, first_epoch=last_epoch + 1 + left_out)


class PromptOrder:
    """The prompts of `tasks`; with `since`, from its position and epoch on."""

    def __init__(self, tasks: Sequence[Task], *, seed: int, since: TaskSet | None = None) -> None:
        if not tasks:
            raise InvalidInput("the workflow's train split is empty; give it at least one task")
        num_ids = len({task.id for task in tasks})
        if num_ids != len(tasks):
            raise InvalidInput(f"task ids are not unique: {len(tasks)} tasks, {num_ids} ids")
        self._tasks = tasks
        self._seed = seed
        self._first_position, self._first_epoch = (since.first_position, since.first_epoch) if since else (0, 0)

    def at(self, position: int, *, retry: int = 0) -> Prompt:
        """The prompt at a position, from 0."""
        epoch, index = divmod(position - self._first_position, len(self._tasks))
        epoch += self._first_epoch
        order = epoch_order(self._seed, epoch, len(self._tasks))
        return Prompt(position=position, epoch=epoch, task=self._tasks[int(order[index])], retry=retry)
