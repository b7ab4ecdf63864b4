"""The made-up world: one answer per question, nothing leaked, every fact written down, the same bytes again."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.search_agent.retrieval.passages import Passage, read_passages
from examples.search_agent.world import DISTRACTIONS, RELATIONS, World, main, split_questions
from rollouts.environments.rows import read_rows


def _graph(passages: list[Passage]) -> dict[tuple[str, str], set[str]]:
    """All facts that the notes state, read from their text alone: (relation, subject) → objects."""
    graph = defaultdict(set)
    for passage in passages:
        relation, subject, objective = re.fullmatch(r"(\w+) of (\w+): (\w+)", passage.text).groups()
        graph[relation, subject].add(objective)
    return graph


def _answers(question: str, graph: dict[tuple[str, str], set[str]]) -> set[str]:
    """Everything that a question, read as text, could mean."""
    *relations, start = question.removesuffix("?").split(" of ")
    reached = {start}
    for relation in reversed(relations):
        reached = set().union(*(graph.get((relation, name), set()) for name in reached))
    return reached


@settings(max_examples=15, deadline=None)
@given(
    entities=st.integers(60, 300),
    distractors=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 10**6),
    hops=st.sampled_from([[1], [2], [1, 2, 3, 4]]),
)
def test_every_question_has_exactly_the_answer_given(entities: int, distractors: float, seed: int, hops: list[int]):
    world = World(entities=entities, distractors=distractors, seed=seed)
    graph = _graph(world.passages)
    texts = {passage.id: passage.text for passage in world.passages}
    for question in world.questions(40, hops=hops, seed=seed):
        assert _answers(question.text, graph) == {question.answer}
        # The supporting passages alone lead there, and none of them can be spared.
        supporting = [Passage(id=i, title="", text=texts[i]) for i in question.supporting]
        assert _answers(question.text, _graph(supporting)) == {question.answer}
        assert len(set(question.supporting)) == len(question.path)
        for left_out in supporting:
            assert not _answers(question.text, _graph([each for each in supporting if each is not left_out]))


def test_articles_state_what_their_questions_need_and_every_length_is_equally_frequent():
    world = World(entities=200, style="articles", seed=3)
    texts = {passage.id: passage.text for passage in world.passages}
    questions = world.questions(60, hops=[1, 2, 3, 4])
    assert [sum(len(q.path) == hops for q in questions) for hops in (1, 2, 3, 4)] == [15] * 4
    for question in questions:
        met = world.follow(question.start, question.path)
        for subject, relation, name, identity in zip(met, question.path, met[1:], question.supporting, strict=False):
            ways = [way.format(subject=subject, object=name) for way in RELATIONS[relation].sentences]
            assert any(way in texts[identity] for way in ways)


def test_no_composition_is_in_both_splits():
    world = World(entities=100, seed=1)
    splits = split_questions(world, questions=150, held_out=50, hops=[2])
    train, test = ({(q.start, q.path) for q in splits[split]} for split in ("train", "test"))
    assert (len(train), len(test), train & test) == (150, 50, set())


def test_distractors_are_about_what_no_question_asks():
    world = World(entities=100, distractors=0.4, seed=1)
    said = [passage.text.split(" of ")[0] for passage in world.passages]
    assert sum(word in DISTRACTIONS for word in said) == round(0.4 * len(world.facts))
    assert set(said) <= {*DISTRACTIONS, *RELATIONS}
    assert not any(relation in DISTRACTIONS for q in world.questions(100, hops=[2]) for relation in q.path)


@pytest.mark.parametrize("style", ["notes", "articles"])
def test_the_same_arguments_write_the_same_bytes_which_the_agent_and_the_index_read(tmp_path: Path, style: str):
    def written(name: str, seed: int) -> dict[str, bytes]:
        sizes = ["--entities", "80", "--questions", "40", "--held-out", "8"]
        main([str(tmp_path / name), *sizes, "--style", style, "--seed", str(seed)])
        return {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}

    once = written("once", 0)
    assert set(once) == {"corpus.jsonl", "train.jsonl", "test.jsonl"}
    assert written("again", 0) == once
    assert written("other", 1) != once
    assert all(passage.title in passage.text for passage in read_passages(tmp_path / "once" / "corpus.jsonl"))
    rows = read_rows(tmp_path / "once" / "train.jsonl", required=["id", "question", "answer"])
    assert len(rows) == 40 and all(len(row["supporting"]) == row["hops"] for row in rows)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--entities", "5"], "5 entities are too few"),
        (["--entities", "20", "--questions", "5000"], "make the world larger"),
        (["--distractors", "50"], "lower `distractors`"),
        (["--distractors", "-1"], "below 0"),
        (["--hops", "5"], "has 1 to 4"),
        (["--questions", "0"], "at least one"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "world"), *arguments])
    assert named in capsys.readouterr().err
    assert not (tmp_path / "world").exists()
