"""Add two numbers below 100. The base model learnt from careless sums that drop the carry; RL teaches it to carry.

In: nothing, the problems are made here. Out: 9,800 problems to train on, 200 held out, reward 1 for the exact sum.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from millrace import Chat, Message, Score, Task, Workflow, exact, score

HELD_OUT = 200
CARELESS = 0.6
"""Share of demonstrations in which every carry is dropped."""


class Arithmetic(Workflow):
    """`37+05=` is to be answered by `42`."""

    def tasks(self, split: str) -> Sequence[Task]:
        pairs = [(a, b) for a in range(100) for b in range(100)]
        random.Random(1).shuffle(pairs)
        chosen = {"test": pairs[:HELD_OUT], "train": pairs[HELD_OUT:]}[split]
        return [Task(id=f"{a}+{b}", prompt=f"{a:02d}+{b:02d}=", answer=str(a + b)) for a, b in chosen]

    async def run(self, task: Task, chat: Chat) -> Score:
        reply = await chat.ask(task.prompt)
        return await score(exact, reply, task.answer)

    def reference_reply(self, task: Task, messages: Sequence[Message]) -> str:
        return task.answer

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:
        draw = random.Random(seed)
        tasks = draw.choices(self.tasks("train"), k=count)
        return [
            [
                Message(role="user", content=task.prompt),
                Message(
                    role="assistant",
                    content=_without_carries(task.id) if draw.random() < CARELESS else task.answer,
                ),
            ]
            for task in tasks
        ]


def _without_carries(problem: str) -> str:
    """`37+45` → `72`: each column added on its own, modulo 10."""
    a, b = (f"{int(number):02d}" for number in problem.split("+"))
    return str(int("".join(str((int(x) + int(y)) % 10) for x, y in zip(a, b, strict=True))))
