"""A made-up world to ask about: people, firms, towns and lakes, passages that describe them, questions of 1 to 4 hops.

In: a seed and sizes. Out: `corpus.jsonl`, `train.jsonl` and `test.jsonl` in one folder. Equal arguments write equal
bytes.

    python -m examples.search_agent.world OUT --entities 2000 --questions 5000 --held-out 500

    facts (kim, boss) → tal, (tal, home) → rud  ─▶ passages  "boss of kim: tal"  "home of tal: rud"  "mate of kim: bex"
    start kim, path boss, home                  ─▶ question  "home of boss of kim?"   answer rud, supported by two

Every relation is a function of its subject, so a path has one end: an answer is unique. Distractors are passages of
the same form about relations that no question asks for.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from examples.search_agent.dataset import Problem, write_dataset
from examples.search_agent.retrieval.passages import Passage

Style = Literal["notes", "articles"]
"""`notes`: one terse passage per fact, for tiny models; `articles`: one per entity, in sentences."""


class Relation(NamedTuple):
    """A function from one kind of entity to another."""

    subject: str
    object: str
    sentences: tuple[str, ...]
    """Ways to say it in an article, with {subject} and {object}."""


RELATIONS = {
    "boss": Relation("person", "person", ("{subject} works for {object}.", "The boss of {subject} is {object}.")),
    "home": Relation("person", "town", ("{subject} lives in {object}.", "The home of {subject} is in {object}.")),
    "firm": Relation(
        "person", "firm", ("{subject} is employed at {object}.", "The firm of {subject} is called {object}.")
    ),
    "seat": Relation(
        "firm", "town", ("{subject} has its seat in {object}.", "The offices of {subject} stand in {object}.")
    ),
    "head": Relation("firm", "person", ("{subject} is led by {object}.", "The head of {subject} is {object}.")),
    "lake": Relation(
        "town", "lake", ("{subject} lies on the lake {object}.", "The lake of {subject} is named {object}.")
    ),
    "lord": Relation("town", "person", ("{subject} belongs to {object}.", "The lord of {subject} is {object}.")),
    "port": Relation("lake", "town", ("Boats on {subject} land in {object}.", "The port of {subject} is {object}.")),
}
_SHARES = {"person": 0.5, "town": 0.2, "firm": 0.2, "lake": 0.1}
"""Of all entities, by kind."""
DISTRACTIONS = {
    "mate": "{subject} went to school with {object}.",
    "foe": "{subject} once quarrelled with {object}.",
    "fan": "{subject} is often praised by {object}.",
}
"""What distractors say; no question asks for it."""
_CONSONANTS, _VOWELS = "bcdfghjklmnprstvwxz", "aeiou"
_LEAST_ENTITIES = 20


@dataclass(frozen=True, kw_only=True)
class Question:
    """A path through the world, asked for its end."""

    id: str
    """`kim.boss.home`: the composition, so equal ids are equal questions."""
    text: str
    """What is asked."""
    start: str
    path: tuple[str, ...]
    """Names of relations, the first one to follow first."""
    answer: str
    supporting: tuple[str, ...]
    """Ids of the passages that state its facts, one per hop."""


class World:
    """Entities, facts and passages. Equal arguments make equal worlds."""

    def __init__(self, *, entities: int, distractors: float = 0.5, style: Style = "notes", seed: int = 0) -> None:
        """`distractors` is their number as a share of the facts. Raises `ValueError` for sizes that cannot be."""
        if entities < _LEAST_ENTITIES:
            raise ValueError(f"{entities} entities are too few for a world; use {_LEAST_ENTITIES} or more")
        if distractors < 0:
            raise ValueError(f"distractors = {distractors:g} is below 0; it is their number as a share of the facts")
        self.style = style
        draw = random.Random(f"{seed}/world")
        names = iter(_names(entities + len(_SHARES) * 2, draw))
        if style == "articles":
            names = map(str.capitalize, names)
        self.kinds: dict[str, str] = {}
        """Name of every entity → person, firm, town or lake."""
        for kind, share in _SHARES.items():
            self.kinds |= dict.fromkeys(itertools.islice(names, max(2, round(share * entities))), kind)
        self._members = {kind: [name for name in self.kinds if self.kinds[name] == kind] for kind in _SHARES}
        self.facts: dict[tuple[str, str], str] = {
            (name, what): _other(self._members[relation.object], name, draw)
            for name, kind in self.kinds.items()
            for what, relation in RELATIONS.items()
            if relation.subject == kind
        }
        """(subject, relation) → object."""
        self.passages: list[Passage] = []
        """In an order that says nothing."""
        self.states: dict[tuple[str, str], str] = {}
        """(subject, relation) → id of the passage that states it."""
        self._write_passages(self._distractions(round(distractors * len(self.facts)), draw), draw)

    def follow(self, start: str, path: Sequence[str]) -> list[str]:
        """The entities on a path, `start` included. Raises `KeyError` for a step that the world does not have."""
        names = [start]
        for relation in path:
            names.append(self.facts[names[-1], relation])
        return names

    def questions(self, count: int, *, hops: Sequence[int], seed: int = 0) -> list[Question]:
        """`count` different questions, as many of each number of hops as of any other, as far as that comes out even.

        No question comes past an entity twice. Raises `ValueError` if the world has too few of some length.
        """
        draw = random.Random(f"{seed}/questions")
        wanted = Counter(itertools.islice(itertools.cycle(hops), count))
        chosen = [
            question for length, number in sorted(wanted.items()) for question in self._drawn(length, number, draw)
        ]
        draw.shuffle(chosen)
        return chosen

    def _drawn(self, length: int, number: int, draw: random.Random) -> list[Question]:
        """Rejection sampling: a world of thousands of entities has more paths than anyone wants to list."""
        drawn: dict[str, Question] = {}
        starts = list(self.kinds)
        for _ in range(50 * number + 1000):
            if len(drawn) == number:
                return list(drawn.values())
            start = draw.choice(starts)
            kind, path = self.kinds[start], []
            for _ in range(length):
                path.append(draw.choice([name for name, each in RELATIONS.items() if each.subject == kind]))
                kind = RELATIONS[path[-1]].object
            met = self.follow(start, path)
            if len(set(met)) < len(met):
                continue
            question = Question(
                id=".".join([start, *path]),
                text=self._asked(start, path),
                start=start,
                path=tuple(path),
                answer=met[-1],
                supporting=tuple(self.states[step] for step in zip(met, path, strict=False)),
            )
            drawn[question.id] = question
        raise ValueError(
            f"{number} questions of {length} hops were asked for, and only {len(drawn)} different ones were found in "
            f"a world of {len(self.kinds)} entities; ask for fewer, or make the world larger"
        )

    def _asked(self, start: str, path: Sequence[str]) -> str:
        """`home of boss of kim?`, or in sentences `What is the home of the boss of Kim?`"""
        parts = [*reversed(path), start]
        if self.style == "notes":
            return " of ".join(parts) + "?"
        return f"What is the {' of the '.join(parts[:-1])} of {start}?"

    def _distractions(self, count: int, draw: random.Random) -> dict[tuple[str, str], str]:
        most = len(self.kinds) * len(DISTRACTIONS)
        if count > most:
            raise ValueError(f"{count} distractors are more than the {most} that this world has; lower `distractors`")
        chosen = draw.sample(list(itertools.product(self.kinds, DISTRACTIONS)), count)
        return {key: _other(self._members["person"], key[0], draw) for key in chosen}

    def _write_passages(self, distractions: dict[tuple[str, str], str], draw: random.Random) -> None:
        everything = [*self.facts.items(), *distractions.items()]
        match self.style:
            case "notes":
                pieces = [(key[0], f"{key[1]} of {key[0]}: {value}", [key]) for key, value in everything]
            case "articles":
                stated: dict[str, list[tuple[str, str]]] = {name: [] for name in self.kinds}
                sentences: dict[str, list[str]] = {name: [] for name in self.kinds}
                draw.shuffle(everything)
                for key, value in everything:
                    subject, what = key
                    ways = RELATIONS[what].sentences if what in RELATIONS else (DISTRACTIONS[what],)
                    stated[subject].append(key)
                    sentences[subject].append(draw.choice(ways).format(subject=subject, object=value))
                pieces = [
                    (name, " ".join([f"{name} is a {self.kinds[name]}.", *sentences[name]]), stated[name])
                    for name in self.kinds
                ]
        draw.shuffle(pieces)
        width = len(str(len(pieces) - 1))
        for number, (title, text, keys) in enumerate(pieces):
            passage = Passage(id=f"{number:0{width}}", title=title, text=text)
            self.passages.append(passage)
            self.states |= dict.fromkeys(keys, passage.id)


def split_questions(
    world: World, *, questions: int, held_out: int, hops: Sequence[int], seed: int = 0
) -> dict[str, list[Question]]:
    """`train` and `test`: no composition of a start and a path is in both.

    Raises `ValueError` for a number of hops outside 1 to 4, and if the world is too small.
    """
    if not hops or not set(hops) <= {1, 2, 3, 4}:
        raise ValueError(f"hops = {list(hops)}: a question has 1 to 4")
    if questions < 1 or held_out < 1:
        raise ValueError(f"{questions} questions and {held_out} held out: there must be at least one of each")
    chosen = world.questions(questions + held_out, hops=hops, seed=seed)
    return {"test": chosen[:held_out], "train": chosen[held_out:]}


def _problem(question: Question) -> Problem:
    """The question as a line of a file."""
    return Problem(
        id=question.id,
        question=question.text,
        answer=question.answer,
        supporting=question.supporting,
        hops=len(question.path),
    )


def _other(names: Sequence[str], name: str, draw: random.Random) -> str:
    """Any of `names`, of which there are at least two, but `name`."""
    while (chosen := draw.choice(names)) == name:
        pass
    return chosen


def _names(count: int, draw: random.Random) -> list[str]:
    """Different names that can be spoken: `kim`, and `kimar` if more than some hundred are needed."""
    syllables = [a + b for a in _CONSONANTS for b in _VOWELS]
    for length in itertools.count(1):
        # At most every second name of its length, so that names look alike without crowding out any.
        if len(syllables) ** length * len(_CONSONANTS) >= 2 * count:
            break
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(draw.choice(syllables) for _ in range(length)) + draw.choice(_CONSONANTS)] = None
    return list(names)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line, see the top of this file."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.search_agent.world",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, help="folder to write corpus.jsonl, train.jsonl and test.jsonl to")
    parser.add_argument("--entities", type=int, default=2000)
    parser.add_argument("--questions", type=int, default=5000, help="to train on")
    parser.add_argument("--held-out", type=int, default=500, help="questions that are never trained on")
    parser.add_argument("--hops", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--distractors", type=float, default=0.5, help="their number as a share of the facts")
    parser.add_argument("--style", choices=["notes", "articles"], default="articles")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    try:
        world = World(entities=given.entities, distractors=given.distractors, style=given.style, seed=given.seed)
        splits = split_questions(
            world, questions=given.questions, held_out=given.held_out, hops=given.hops, seed=given.seed
        )
        lines = {split: list(map(_problem, questions)) for split, questions in splits.items()}
        print(write_dataset(given.out, world.passages, lines))
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
