"""A verifiers environment whose first task cannot be prepared and whose second cannot be scored."""

from collections.abc import Iterable

import verifiers.v1 as vf


class BrokenTask(vf.Task[vf.TaskData]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.idx == 0:
            raise OSError("disk full in setup")

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        raise OSError("disk full in reward")


class BrokenTaskset(vf.Taskset[BrokenTask, vf.TasksetConfig]):
    def load(self) -> Iterable[BrokenTask]:
        for _ in range(2):
            yield BrokenTask(vf.TaskData(prompt="1+1="), self.config.task)


__all__ = ["BrokenTaskset"]
