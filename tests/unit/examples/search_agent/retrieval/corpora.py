"""Small corpora for tests, and the rankings that the formulas give by the letter.

In: sizes and seeds. Out: rows, files, and rankings in plain Python floats.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from examples.search_agent.retrieval.embedding import HashingEmbedding, unit_vectors, words_of
from examples.search_agent.retrieval.passages import Passage

_NUM_WORDS = 60
_WORDS = [f"w{number}" for number in range(_NUM_WORDS)]


def random_passages(count: int, *, seed: int = 0) -> list[Passage]:
    """Passages of words w0, w1, … of which the low ones are frequent."""
    draw = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(_NUM_WORDS)]
    return [
        Passage(
            id=f"p{number:04d}",
            title=" ".join(draw.choices(_WORDS, weights, k=2)),
            text=" ".join(draw.choices(_WORDS, weights, k=draw.randint(1, 30))),
        )
        for number in range(count)
    ]


def random_queries(count: int) -> list[str]:
    """Queries of 0 to 6 words, some of which are in no passage."""
    draw = random.Random(1)
    return [" ".join(draw.choices([*_WORDS, "nowhere"], k=draw.randint(0, 6))) for _ in range(count)]


def write_corpus(file: Path, passages: Sequence[Passage]) -> Path:
    """A JSONL corpus."""
    file.write_text("".join(json.dumps({"id": p.id, "title": p.title, "text": p.text}) + "\n" for p in passages))
    return file


def bm25_by_the_letter(passages: Sequence[Passage], query: str) -> list[tuple[str, float]]:
    """Ids and scores of every passage with a word of the query, best first; equal scores in the order of ids."""
    counts = [Counter(words_of(f"{p.title}\n{p.text}")) for p in passages]
    mean = sum(sum(c.values()) for c in counts) / len(counts)
    scores = {}
    for passage, count in zip(passages, counts, strict=True):
        score = 0.0
        for word in set(words_of(query)):
            has = sum(word in other for other in counts)
            idf = math.log(1 + (len(passages) - has + 0.5) / (has + 0.5))
            tf = count[word]
            score += idf * tf * 2.2 / (tf + 1.2 * (0.25 + 0.75 * sum(count.values()) / mean))
        if score:
            scores[passage.id] = score
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))


def cosines_by_the_letter(passages: Sequence[Passage], query: str) -> list[tuple[str, float]]:
    """Ids and cosines of all passages, best first; nothing for a query without words."""
    *vectors, asked = unit_vectors(HashingEmbedding(), [*(f"{p.title}\n{p.text}" for p in passages), query])
    if not asked.any():
        return []
    cosines = {p.id: math.fsum(row.astype(float) * asked) for p, row in zip(passages, vectors, strict=True)}
    return sorted(cosines.items(), key=lambda item: (-item[1], item[0]))


def fused_by_the_letter(*rankings: Sequence[tuple[str, float]], depth: int = 100) -> list[tuple[str, float]]:
    """Reciprocal rank fusion of the first `depth` of each."""
    scores: dict[str, float] = {}
    for ranking in rankings:
        for rank, (name, _) in enumerate(ranking[:depth], 1):
            scores[name] = scores.get(name, 0.0) + 1 / (60 + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))


def same_ranking(found: Sequence[tuple[str, float]], expected: Sequence[tuple[str, float]]) -> None:
    """Equal scores at each rank, and equal passages wherever float32 tells scores apart."""
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], rel=1e-5, abs=1e-7)
    exact = dict(expected)
    for (name, _), (other, score) in zip(found, expected, strict=True):
        assert name == other or exact.get(name, score) == pytest.approx(score, rel=1e-5, abs=1e-7)
