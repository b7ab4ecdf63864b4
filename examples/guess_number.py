"""Guess a number in several turns. The base model learnt from a player who mostly ignores the hints; RL teaches it to
use them.

In: nothing, the games are made here. Out: 800 games to train on, 200 held out, reward 1 for a number found in time.

    42_  ─▶  427  ─▶  <  ─▶  421  ─▶  >  ─▶  424  ─▶  <  ─▶  423      the secret is 423
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from millrace import Environment, EnvironmentWorkflow, Message, Observation, Task

HELD_OUT = 200
CARELESS = 0.7
"""Share of demonstrated guesses whose last digit is any digit, whatever the hints said; the others are the middle of
what is left."""


class NumberGame(Environment):
    """`42_` asks for a number from 420 to 429; then `>` says that the secret is higher, `<` lower."""

    async def reset(self, task: Task) -> str:
        self.secret = int(task.answer)
        return task.prompt

    async def step(self, reply: str) -> Observation:
        if not reply.isdecimal():
            self.is_done = True
            return Observation(reward=0.0)
        self.is_done = int(reply) == self.secret
        return Observation(text=_hint(int(reply), self.secret), reward=float(self.is_done))


class GuessNumber(EnvironmentWorkflow):
    """Four guesses: enough for a player who always guesses the middle of what is left."""

    max_turns = 4

    def tasks(self, split: str) -> Sequence[Task]:
        secrets = list(range(1000))
        random.Random(1).shuffle(secrets)
        chosen = {"test": secrets[:HELD_OUT], "train": secrets[HELD_OUT:]}[split]
        return [Task(id=str(n), prompt=f"{n // 10:02d}_", answer=f"{n:03d}") for n in chosen]

    def make_environment(self) -> Environment:
        return NumberGame()

    def reference_reply(self, task: Task, messages: Sequence[Message]) -> str:
        return _middle(messages)

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:
        draw = random.Random(seed)
        return [self._careless_game(task, draw) for task in draw.choices(self.tasks("train"), k=count)]

    def _careless_game(self, task: Task, draw: random.Random) -> list[Message]:
        messages = [Message(role="user", content=task.prompt)]
        for _ in range(self.max_turns):
            careless = draw.random() < CARELESS
            guess = f"{draw.randint(*_left(messages[:1])):03d}" if careless else _middle(messages)
            messages.append(Message(role="assistant", content=guess))
            if guess == task.answer:
                break
            messages.append(Message(role="user", content=_hint(int(guess), int(task.answer))))
        return messages


def _hint(guess: int, secret: int) -> str:
    return ">" if secret > guess else "<"


def _middle(messages: Sequence[Message]) -> str:
    low, high = _left(messages)
    return f"{(low + high) // 2:03d}"


def _left(messages: Sequence[Message]) -> tuple[int, int]:
    """The lowest and the highest number that a game's messages leave open."""
    low = 10 * int(messages[0].content.rstrip("_"))
    high = low + 9
    for guess, hint in zip(messages[1::2], messages[2::2], strict=False):
        if hint.content == ">":
            low = max(low, int(guess.content) + 1)
        else:
            high = min(high, int(guess.content) - 1)
    return low, high
