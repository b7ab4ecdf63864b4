"""A verifiers environment as its users write one: a tool server, one for all attempts."""

from collections.abc import Iterable

import verifiers.v1 as vf

PRICES = {"tea": 3, "salt": 1}


class Lookup(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    @vf.tool
    def price(self, name: str) -> str:
        """The price of something."""
        return str(PRICES[name])


class PriceData(vf.TaskData):
    answer: str


class PriceTask(vf.Task[PriceData]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class PriceTaskset(vf.Taskset[PriceTask, vf.TasksetConfig]):
    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [Lookup(vf.SharedToolsetConfig())]

    def load(self) -> Iterable[PriceTask]:
        for name, price in PRICES.items():
            yield PriceTask(PriceData(prompt=f"price of {name}?", answer=str(price)), self.config.task)


__all__ = ["PriceTaskset"]

if __name__ == "__main__":
    Lookup.run()
