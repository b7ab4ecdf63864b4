"""A workflow on which random replies earn rewards, so that scripted runs have gradients and their weights move."""

from __future__ import annotations

import asyncio

from examples.arithmetic import Arithmetic
from rollouts.chat.chat import Chat
from rollouts.rewards.scoring import score
from rollouts.workflow import Score
from storage.records import Task


def parity(reply: str, answer: str) -> float:
    """1.0 when the reply ends in a digit that is even where the answer is even, and odd where it is odd."""
    return float(reply[-1:].isdigit() and (int(reply[-1]) - int(answer)) % 2 == 0)


class Guesses(Arithmetic):
    """The arithmetic tasks, where half of the right digit is enough."""

    async def run(self, task: Task, chat: Chat) -> Score:
        reply = await chat.ask(task.prompt)
        return await score(parity, reply, task.answer)


class OneIsSlow(Guesses):
    """Every eighth task that begins takes two seconds longer than the others."""

    def __init__(self, dataset: str | None) -> None:
        super().__init__(dataset)
        self._begun: list[str] = []

    async def run(self, task: Task, chat: Chat) -> Score:
        if task.id not in self._begun:
            self._begun.append(task.id)
        if self._begun.index(task.id) % 8 == 0:
            await asyncio.sleep(2)
        return await super().run(task, chat)
