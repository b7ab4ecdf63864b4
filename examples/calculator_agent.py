"""Sums and products, with a calculator at hand. The base model mostly guesses; RL teaches it to look the answer up.

In: nothing, the problems are made here. Out: 16,000 problems to train on, 200 held out, reward 1 for the exact answer.
A tiny model cannot multiply, but it can copy: the problem into a tool call, and the result into its answer.

    47*83=  ─▶  [calculator(of='47*83')]  ─▶  3901  ─▶  3901
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from millrace import Chat, Message, Score, Task, Workflow, exact, score, tool

HELD_OUT = 200
WITH_CALCULATOR = 0.2
"""Share of demonstrations that use it; the others guess all but the first digit."""


@tool
def calculator(of: str) -> int:
    """Work out a sum or a product of two whole numbers, for example 12*34.

    Args:
        of: the two numbers with + or * between them
    """
    numbers = re.fullmatch(r"(\d{1,9})([+*])(\d{1,9})", of)
    if numbers is None:
        raise ValueError(f"cannot read {of!r}")
    a, operator, b = numbers.groups()
    return int(a) + int(b) if operator == "+" else int(a) * int(b)


class CalculatorAgent(Workflow):
    """`47*83=` is to be answered by `3901`."""

    def tasks(self, split: str) -> Sequence[Task]:
        problems = [f"{a}{operator}{b}" for a in range(10, 100) for b in range(10, 100) for operator in "+*"]
        random.Random(1).shuffle(problems)
        chosen = {"test": problems[:HELD_OUT], "train": problems[HELD_OUT:]}[split]
        return [Task(id=each, prompt=f"{each}=", answer=str(calculator(each))) for each in chosen]

    async def run(self, task: Task, chat: Chat) -> Score:
        reply = await chat.ask(task.prompt, tools=[calculator])
        return await score(exact, reply, task.answer)

    def reference_reply(self, task: Task, messages: Sequence[Message]) -> str:
        """The call, then its result."""
        return messages[-1].content if messages[-1].role == "tool" else _call(task)

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:
        draw = random.Random(seed)
        tasks = draw.choices(self.tasks("train"), k=count)
        return [_looked_up(task) if draw.random() < WITH_CALCULATOR else _guessed(task, draw) for task in tasks]


def _call(task: Task) -> str:
    return f"[calculator(of='{task.id}')]"


def _looked_up(task: Task) -> list[Message]:
    return [
        Message(role="user", content=task.prompt),
        Message(role="assistant", content=_call(task)),
        Message(role="tool", content=task.answer),
        Message(role="assistant", content=task.answer),
    ]


def _guessed(task: Task, draw: random.Random) -> list[Message]:
    digits = [task.answer[0], *(str(draw.randrange(10)) for _ in task.answer[1:])]
    return [Message(role="user", content=task.prompt), Message(role="assistant", content="".join(digits))]
