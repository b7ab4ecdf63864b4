"""The research agent in a world small enough for a tiny model. The base model learnt from careless researchers; RL
teaches it to follow both hops.

In: nothing, the world is made here; or `dataset`, a folder written by `examples.search_agent.world --style notes`,
which needs `corpus.jsonl` for the demonstrations, even if `services.toml` names servers to search.
Out: questions of two hops, 200 held out, reward 1 for the right name.

    home of boss of kim?  ─▶  [search(query='boss of kim')]  ─▶  [012] boss of kim: tal
                          ─▶  [search(query='home of tal')]  ─▶  [101] home of tal: rud
                          ─▶  Answer: rud

The demonstrations do not cite, because ids of digits are the hardest thing to copy for a model this small.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Generator, Iterator, Sequence

from examples.search_agent.agent import Episode, SearchAgent, show, task_of
from examples.search_agent.dataset import CORPUS
from examples.search_agent.retrieval.local_search import LocalSearch
from examples.search_agent.retrieval.passages import read_passages
from examples.search_agent.services import Services
from examples.search_agent.world import Question, World, split_questions
from millrace import InvalidInput, Message, Task, Tool

ENTITIES, QUESTIONS, HELD_OUT = 300, 1200, 200
MISTAKES = {"stops": 0.25, "confuses": 0.15, "repeats": 0.15, "guesses": 0.1}
"""Shares of demonstrations in which the researcher answers after the first hop, looks up the last relation of the first
entity, makes the first search again, or answers without a search. The others do it right."""
_NOTE = re.compile(r"\[(\w+)\] (\w+ of \w+): (\w+)")


class WorldAgent(SearchAgent):
    """`home of boss of kim?` is to be answered by `rud`."""

    instructions = ""
    num_passages = 1  # the model's context is short

    def tasks(self, split: str) -> Sequence[Task]:
        if self.dataset is not None:
            return super().tasks(split)
        return [
            task_of(question.id, question.text, question.answer, question.supporting) for question in _made()[1][split]
        ]

    def tools(self, episode: Episode) -> list[Tool]:
        return [episode.search]  # a note is never longer than what a search shows of it

    def services(self) -> Services:
        return super().services() if self.dataset is not None else Services(self._notes)

    def reference_reply(self, task: Task, messages: Sequence[Message]) -> str:
        """The search for the next fact; after the last fact, the answer."""
        steps = [message.content for message in messages if message.role == "tool"]
        start, path = _path(task.prompt)
        name, cited = start, []
        for relation, notes in zip(path, steps, strict=False):
            identity, name = _stated(f"{relation} of {name}", notes)
            cited.append(identity)
        return _call(path[len(steps)], name) if len(steps) < len(path) else _answer(name, *cited)

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:
        draw, tasks = random.Random(seed), self.tasks("train")
        names = sorted({task.answer for task in tasks})
        return [list(self._research(task, names, draw)) for task in draw.choices(tasks, k=count)]

    def _research(self, task: Task, names: Sequence[str], draw: random.Random) -> Iterator[Message]:
        """One researcher's messages; guesses are drawn from `names`."""
        yield Message(role="user", content=task.prompt)
        (start, path), reply = _path(task.prompt), functools.partial(Message, role="assistant")
        right = 1 - sum(MISTAKES.values())
        match draw.choices(["none", *MISTAKES], weights=[right, *MISTAKES.values()])[0]:
            case "guesses":
                yield reply(content=_answer(draw.choice(names)))
            case "stops":
                name = yield from self._look_up(path[0], start)
                yield reply(content=_answer(name))
            case "confuses":
                name = yield from self._look_up(path[-1], start)
                yield reply(content=_answer(name))
            case "repeats":
                yield from self._look_up(path[0], start)
                yield reply(content=_call(path[0], start))
            case _:
                name = start
                for relation in path:
                    name = yield from self._look_up(relation, name)
                yield reply(content=_answer(name))

    def _look_up(self, relation: str, name: str) -> Generator[Message, None, str]:
        """A search and what it finds; returns the object of the note that fits, or of the first one."""
        notes = show(self._notes.best(f"{relation} of {name}", self.num_passages), most=self.shown)
        yield Message(role="assistant", content=_call(relation, name))
        yield Message(role="tool", content=notes)
        return _stated(f"{relation} of {name}", notes)[1]

    @functools.cached_property
    def _notes(self) -> LocalSearch:
        is_made_here = self.dataset is None
        return LocalSearch(_made()[0].passages if is_made_here else list(read_passages(self.folder() / CORPUS)))


@functools.cache
def _made() -> tuple[World, dict[str, list[Question]]]:
    world = World(entities=ENTITIES, distractors=0.3)
    return world, split_questions(world, questions=QUESTIONS, held_out=HELD_OUT, hops=[2])


def _path(question: str) -> tuple[str, list[str]]:
    """`home of boss of kim?` → kim, [boss, home]."""
    *relations, start = question.removesuffix("?").split(" of ")
    if not relations:
        raise InvalidInput(
            f"this agent asks questions like 'home of boss of kim?', not {question!r}: make a data set with "
            "`python -m examples.search_agent.world --style notes`, or take examples.search_agent.agent:SearchAgent"
        )
    return start, relations[::-1]


def _stated(fact: str, notes: str) -> tuple[str, str]:
    """Id and object of the note about `boss of kim`, else of the first note; empty strings if there is no note."""
    stated = _NOTE.findall(notes)
    fitting = [note for note in stated if note[1] == fact] or stated or [("", "", "")]
    return fitting[0][0], fitting[0][2]


def _call(relation: str, name: str) -> str:
    return f"[search(query='{relation} of {name}')]"


def _answer(name: str, *cited: str) -> str:
    return " ".join([f"Answer: {name}", *(f"[{identity}]" for identity in cited)])
