r"""Rewards for an answer that names its sources: `Answer: Rud [12] [40]`.

In: a reply, the reference answer, ids of the supporting passages and of those the policy has seen. Out: named parts
from 0 to 1. The functions are pure, take linear time and never raise.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

_TAIL_CHARACTERS = 20_000  # the answer comes last; a runaway reply must not cost more than a long one
_ANSWER = re.compile(r"^[ \t*]*answer[ \t*]*:[ \t*]*(.*)$", re.IGNORECASE | re.MULTILINE)
_CITATION = re.compile(r"\[([^\[\]\n]{1,200})\]")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer in a reply."""

    text: str
    """Without the citations."""
    citations: tuple[str, ...]
    """Ids, in the order they were written, each once."""


def parse_answer(reply: str) -> Answer | None:
    """The last line `Answer: … [id] [id]` of a reply; None without such a line, or if it has no text.

    >>> parse_answer("So it is clear.\\nAnswer: New York [12] [a/3]")
    Answer(text='New York', citations=('12', 'a/3'))
    """
    lines = _ANSWER.findall(reply[-_TAIL_CHARACTERS:])
    if not lines:
        return None
    citations = tuple(dict.fromkeys(cited.strip() for cited in _CITATION.findall(lines[-1])))
    text = _CITATION.sub(" ", lines[-1]).strip(" \t*")
    return Answer(text=" ".join(text.split()), citations=citations) if text else None


def normalised(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces: SQuAD's normalisation (Rajpurkar et al. 2016,
    evaluate-v1.1.py).

    >>> normalised("The  Empire-State Building.")
    'empirestate building'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split())


def exact_match(text: str, reference: str) -> float:
    """1.0 when both are equal after SQuAD's normalisation, else 0.0."""
    return float(normalised(text) == normalised(reference))


def token_f1(text: str, reference: str) -> float:
    """Harmonic mean of precision and recall over the words of both, repeated words counted (Rajpurkar et al. 2016).

    Texts that are empty after normalisation are equal only to each other, as in SQuAD 2.0. For `yes`, `no` and
    `noanswer` it is all or nothing, as in HotpotQA's evaluation.

    >>> token_f1("the old Empire State", "Empire State Building")
    0.6666666666666666
    """
    given, expected = normalised(text), normalised(reference)
    if not given or not expected or {given, expected} & {"yes", "no", "noanswer"}:
        return float(given == expected)
    given_words, expected_words = given.split(), expected.split()
    common = (Counter(given_words) & Counter(expected_words)).total()
    return _f1(common, len(given_words), len(expected_words))


def citation_f1(citations: Collection[str], supporting: Collection[str], seen: Collection[str]) -> float:
    """F1 of the cited ids against the supporting ones. An id that the policy was never shown is a wrong one.

    >>> citation_f1(["1", "2"], supporting=["1", "3"], seen=["1", "2"]), citation_f1(["1"], ["1"], seen=[])
    (0.5, 0.0)
    """
    cited = set(citations)
    return _f1(len(cited & set(supporting) & set(seen)), len(cited), len(set(supporting)))


def answer_parts(
    reply: str, reference: str, *, supporting: Collection[str], seen: Collection[str]
) -> dict[str, float | None]:
    """The parts `exact`, `f1`, `cited`, `found` and `format` of a last reply.

    `found` is the share of the supporting passages that the policy was shown. `cited` and `found` are None if the
    supporting passages are unknown. `format` is 1 for an answer that can be read.
    """
    answer = parse_answer(reply)
    proofs = set(supporting)
    return {
        "exact": exact_match(answer.text, reference) if answer else 0.0,
        "f1": token_f1(answer.text, reference) if answer else 0.0,
        "cited": None if not proofs else citation_f1(answer.citations, proofs, seen) if answer else 0.0,
        "found": len(proofs & set(seen)) / len(proofs) if proofs else None,
        "format": float(answer is not None),
    }


def _f1(common: int, given: int, expected: int) -> float:
    return 2 * common / (given + expected) if common else 0.0
