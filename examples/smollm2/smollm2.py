"""One sentence about a thing, by a rule of form. SmolLM2-135M-Instruct hardly reads the rule.

In: nothing, the tasks are made here. Out: 8 rules for each of 193 things to train on, and of 25 others held out; reward
1 if code says that the rule was followed and the thing is named. Each rule has its opposite: habit earns half at most.
Rules that code can check are IFEval's idea (Zhou et al. 2023, https://arxiv.org/abs/2311.07911).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from millrace import Chat, Message, Score, Task, Workflow, score

HELD_OUT = 25
RULES: dict[str, tuple[str, Callable[[str], bool], str]] = {
    "the": ("Begin with the word The.", lambda reply: reply.startswith("The "), "The {} is here."),
    "a": ("Begin with the word A.", lambda reply: reply.startswith(("A ", "An ")), "A {} is here."),
    "short": ("Use fewer than ten words.", lambda reply: len(reply.split()) < 10, "Here is the {}."),
    "long": (
        "Use more than fifteen words.",
        lambda reply: len(reply.split()) > 15,
        "This is the {} that my friend and I found near the old bridge on a rainy Sunday.",
    ),
    "comma": ("Use a comma.", lambda reply: "," in reply, "Here, at last, is the {}."),
    "plain": ("Use no comma.", lambda reply: "," not in reply, "Here is the {}."),
    "question": ("Ask a question.", lambda reply: reply.endswith("?"), "Where is the {}?"),
    "excited": ("End with an exclamation mark.", lambda reply: reply.endswith("!"), "Here is the {}!"),
}
"""What is asked, whether a reply does it, and a reply that does."""
THINGS = Path(__file__).with_name("things.txt").read_text().split()


class Rules(Workflow):
    """`Write one sentence about the fox. Use no comma.`"""

    def tasks(self, split: str) -> Sequence[Task]:
        things = random.Random(1).sample(THINGS, len(THINGS))
        chosen = {"test": things[:HELD_OUT], "train": things[HELD_OUT:]}[split]
        return [
            Task(id=f"{rule}: {thing}", prompt=f"Write one sentence about the {thing}. {text}", answer=rule)
            for thing in chosen
            for rule, (text, _, _) in RULES.items()
        ]

    async def run(self, task: Task, chat: Chat) -> Score:
        reply = await chat.ask(task.prompt)
        return await score(follows, reply, task.answer, _thing(task))

    def reference_reply(self, task: Task, messages: Sequence[Message]) -> str:
        _, _, reply = RULES[task.answer]
        return reply.format(_thing(task))


def _thing(task: Task) -> str:
    return task.id.partition(": ")[2]


def follows(reply: str, rule: str, thing: str) -> float:
    """1 if `reply` names the thing and keeps the rule."""
    _, holds, _ = RULES[rule]
    return float(thing in reply.lower() and holds(reply.strip()))
