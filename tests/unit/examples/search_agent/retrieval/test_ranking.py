"""Picking and comparing, against the same done by sorting everything."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.search_agent.retrieval.ranking import Best, Vectors


def _order(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(count)


@given(num_rows=st.integers(1, 60_000), count=st.integers(1, 100), levels=st.integers(1, 1000), seed=st.integers(0, 99))
def test_the_bound_lets_every_one_of_the_best_through_and_not_many_more(num_rows, count, levels, seed):
    draw, best = np.random.default_rng(seed), Best(_order(num_rows, seed))
    scores = np.full(best.padded, -np.inf, np.float32)
    scores[:num_rows] = draw.integers(0, levels, num_rows)
    rows = np.flatnonzero(scores[:num_rows] >= best.bound(scores, count))
    expected = np.lexsort((_order(num_rows, seed), -scores[:num_rows]))[:count]
    assert best.sorted(rows, scores[rows], count)[0].tolist() == expected.tolist()


def test_of_different_scores_hardly_more_than_the_best_are_looked_at():
    best = Best(np.arange(100_000))
    scores = np.full(best.padded, -np.inf, np.float32)
    scores[:100_000] = np.random.default_rng(0).permutation(100_000)
    assert 100 <= (scores >= best.bound(scores, 100)).sum() < 150


def _has_coarse_product() -> bool:
    try:
        Vectors(np.eye(8, dtype=np.float32), Best(np.arange(8)), coarse=True)
    except (RuntimeError, AttributeError):  # a processor without the instructions, or another torch
        return False
    return True


_NEEDS_COARSE = pytest.mark.skipif(not _has_coarse_product(), reason="this processor does not multiply in bfloat16")


def _unit(draw: np.random.Generator, count: int, size: int) -> np.ndarray:
    vectors = draw.standard_normal((count, size)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize("num_rows", [1, 99, 399, 401, 999, 5003])
@pytest.mark.parametrize("count", [1, 10, 100])
@pytest.mark.parametrize("coarse", [False, pytest.param(True, marks=_NEEDS_COARSE)])
def test_nearest_neighbours_are_exact_also_among_copies(num_rows: int, count: int, coarse: bool):
    draw = np.random.default_rng(num_rows)
    vectors = _unit(draw, num_rows, 48)
    vectors[num_rows // 2 :] = vectors[: num_rows - num_rows // 2]  # each twice, so that ties are everywhere
    queries = np.concatenate([_unit(draw, 5, 48), vectors[:3]])
    order = _order(num_rows, 1)
    found = Vectors(vectors, Best(order), coarse=coarse).rank(queries, count)
    for query, (rows, scores) in zip(queries, found, strict=True):
        exact = (vectors.astype(np.float64) * query.astype(np.float64)).sum(axis=1)
        expected = np.lexsort((order, -exact))[:count]
        assert rows.tolist() == expected.tolist()
        assert scores.tolist() == exact[expected].tolist()
