"""Which prompt comes next: a pure function of the seed and of what is committed.

In: the tasks of a split, a seed, the committed positions. Out: (position, epoch, task), smallest position first.
Position p is the p-th prompt of an endless sequence that shuffles the tasks anew in every epoch, so a resumed run
asks exactly the prompts the log lacks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from storage.records import RolloutTask


def epoch_order(seed: int, epoch: int, num_tasks: int) -> np.ndarray:
    """Permutation of task indices in one epoch, shape [num_tasks]; every task exactly once."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_tasks)


class PromptStream:
    """Hands out the positions nobody has yet. `give_back` returns one whose group came to nothing."""

    def __init__(self, tasks: Sequence[RolloutTask], *, seed: int, committed: Collection[int]) -> None:
        if not tasks:
            raise ValueError("the workflow's train split is empty; give it at least one task")
        ids = {task.id for task in tasks}
        if len(ids) != len(tasks):
            raise ValueError(f"task ids are not unique: {len(tasks)} tasks, {len(ids)} ids")
        self._tasks = tasks
        self._seed = seed
        self._taken = set(committed)
        self._lowest = 0
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def next(self) -> tuple[int, int, RolloutTask]:
        """Take the smallest free position."""
        while self._lowest in self._taken:
            self._lowest += 1
        position = self._lowest
        self._taken.add(position)
        epoch, index = divmod(position, len(self._tasks))
        if self._order[0] != epoch:
            self._order = (epoch, epoch_order(self._seed, epoch, len(self._tasks)))
        return position, epoch, self._tasks[int(self._order[1][index])]

    def give_back(self, position: int) -> None:
        """Free a position that was taken and not committed, or whose shard was lost."""
        self._taken.discard(position)
        self._lowest = min(self._lowest, position)
