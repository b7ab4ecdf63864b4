"""Rewards of the research agent, by hand where a formula is a line, and for any text where it is a rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.search_agent.rewards import Answer, answer_parts, citation_f1, normalised, parse_answer, token_f1

_ids = st.sets(st.sampled_from(["1", "2", "3", "4"]))


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("Answer: rud [12] [40]", Answer(text="rud", citations=("12", "40"))),
        ("I think it is Rud.\n\nanswer:Rud[12]", Answer(text="Rud", citations=("12",))),
        ("**Answer:** New York", Answer(text="New York", citations=())),
        ("Answer: tal\nNo, wait.\nAnswer: rud [1] [1]", Answer(text="rud", citations=("1",))),
        ("Answer: rud [1] of [a b/2]", Answer(text="rud of", citations=("1", "a b/2"))),
        *(
            (reply, None)
            for reply in ("", "rud", "The answer is rud", "Answer:", "Answer: [12]", "[search(query='a')]")
        ),
    ],
)
def test_the_last_answer_line_counts(reply: str, answer: Answer | None):
    assert parse_answer(reply) == answer


def test_normalisation_is_that_of_squad():
    assert normalised("  The  Beatles' AN (1st) album, a ") == "beatles 1st album"
    assert normalised("theatre an-a") == "theatre ana"  # punctuation goes before articles


@pytest.mark.parametrize(
    ("text", "reference", "f1"),
    [
        ("new new york", "new york new jersey", 6 / 7),  # 3 of 3 words found, 3 of 4 expected: P = 1, R = 3/4
        ("new york york", "new york city hall", 4 / 7),
        ("rud", "tal", 0),
        *[("the", "a", 1), ("", "rud", 0)],
        *[("yes", "Yes.", 1), ("yes it is", "yes", 0), ("no", "no way", 0)],  # all or nothing
    ],
)
def test_f1_counts_repeated_words(text: str, reference: str, f1: float):
    assert token_f1(text, reference) == token_f1(reference, text) == pytest.approx(f1)


@given(_ids, _ids, _ids)
def test_citations_are_right_only_if_they_were_seen_and_support(cited: set[str], known: set[str], seen: set[str]):
    value = citation_f1(cited, known, seen)
    assert 0.0 <= value <= 1.0
    assert (value == 1.0) == (cited == known and bool(known) and known <= seen)
    assert (value > 0.0) == bool(cited & known & seen)
    assert citation_f1(cited, known, seen | {"9"}) == value


@pytest.mark.parametrize(
    ("reply", "supporting", "parts"),
    [
        ("Answer: New York City [1] [7]", ["1", "2"], [0.0, 0.8, 0.5, 0.5, 1.0]),
        ("Answer: new york", [], [1.0, 1.0, None, None, 1.0]),  # what supports it is unknown
        ("I give up", ["1"], [0.0, 0.0, 0.0, 1.0, 0.0]),
    ],
)
def test_the_parts_of_a_score(reply: str, supporting: list[str], parts: list[float | None]):
    expected = dict(zip(["exact", "f1", "cited", "found", "format"], parts, strict=True))
    assert answer_parts(reply, "New York", supporting=supporting, seen=["1", "7"]) == expected


@given(st.text(max_size=300), st.text(max_size=30))
def test_no_text_raises(reply: str, reference: str):
    parts = answer_parts(reply, reference, supporting=["1"], seen=["1"])
    assert all(value is not None and 0.0 <= value <= 1.0 for value in parts.values())
