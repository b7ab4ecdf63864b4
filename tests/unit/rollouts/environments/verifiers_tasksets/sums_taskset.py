"""A verifiers environment as its users write one: single turn, two weighted rewards and a metric.

Task 9 cannot be prepared, and 19 cannot be scored.
"""

from collections.abc import Iterable

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.idx == 9:
            raise OSError("disk full in setup")

    @vf.reward(weight=2.0)
    async def correct(self, trace: vf.Trace) -> float:
        if self.data.idx == 19:
            raise OSError("disk full in reward")
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def brief(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) <= 2)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> Iterable[SumTask]:
        for a in range(20):
            data = SumData(prompt=f"{a}+1=", system_prompt="add", answer=str(a + 1))
            yield SumTask(data, self.config.task)


__all__ = ["SumTaskset"]
