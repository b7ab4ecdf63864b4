"""Follow one rule of form in one sentence about a thing. SmolLM2-135M-Instruct can be asked, and seldom does it.

In: nothing, the tasks are made here. Out: 8 kinds of rules × 150 things to train on, and × 25 others held out; reward 1
if code says that the rule was followed and the thing is named. Rules that code can check are IFEval's idea
(Zhou et al. 2023, https://arxiv.org/abs/2311.07911).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from millrace import Chat, Message, Score, Task, Workflow, score

HELD_OUT = 25
RULES: dict[str, tuple[str, Callable[[str], bool], str]] = {
    "capitals": ("Write in capital letters only.", str.isupper, "HERE IS THE {}."),
    "small": ("Write in small letters only, without a capital.", str.islower, "here is the {}."),
    "short": ("Use fewer than six words.", lambda reply: len(reply.split()) < 6, "Here is the {}."),
    "long": (
        "Use at least eight words and no comma.",
        lambda reply: len(reply.split()) >= 8 and "," not in reply,
        "The {} is here and stays until the evening.",
    ),
    "question": ("Ask a question.", lambda reply: reply.endswith("?"), "Where is the {}?"),
    "quoted": (
        "Put the whole sentence between double quotes.",
        lambda reply: re.fullmatch('"[^"]+"', reply) is not None,
        '"Here is the {}."',
    ),
    "beginning": ("Begin with the word: Surely", lambda reply: reply.startswith("Surely"), "Surely the {} is here."),
    "ending": (
        "End with the words: that is all",
        lambda reply: reply.rstrip(".").lower().endswith("that is all"),
        "Here is the {} and that is all.",
    ),
}
"""What is asked, whether a reply does it, and one that does."""
THINGS = Path(__file__).with_name("things.txt").read_text().split()


class Rules(Workflow):
    """`Write one sentence about a fox. Ask a question.`"""

    def tasks(self, split: str) -> Sequence[Task]:
        things = THINGS.copy()
        random.Random(1).shuffle(things)
        chosen = {"test": things[:HELD_OUT], "train": things[HELD_OUT : HELD_OUT + 150]}[split]
        return [
            Task(id=f"{rule}: {thing}", prompt=f"Write one sentence about: {thing}. {text}", answer=rule)
            for thing in chosen
            for rule, (text, _, _) in RULES.items()
        ]

    async def run(self, task: Task, chat: Chat) -> Score:
        reply = await chat.ask(task.prompt)
        return await score(follows, reply, task.answer, _thing(task))

    def reference_reply(self, task: Task, messages: Sequence[Message]) -> str:
        _, _, reply = RULES[task.answer]
        return reply.format(_thing(task).upper() if task.answer == "capitals" else _thing(task))


def _thing(task: Task) -> str:
    return task.id.partition(": ")[2]


def follows(reply: str, rule: str, thing: str) -> float:
    """1 if `reply` names the thing and keeps the rule."""
    _, holds, _ = RULES[rule]
    return float(thing in reply.lower() and holds(reply.strip()))
