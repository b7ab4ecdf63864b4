"""Which rows fit a query best: BM25 over postings, cosines over vectors, and the fusion of two rankings. Arrays only.

In: which words each passage has, vectors [N, D]. Out: rows, best first, with their scores.

Everything is exact, and the same for a query alone or among others. A matrix product rounds differently with the
number of its rows, so it only nominates rows, and each nominated pair is scored again on its own. The product may
therefore round coarsely, in bfloat16 if that is faster.

Shapes: N passages, B queries, D numbers a vector, V words, P postings (pairs of a word and a passage that has it).
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

K1, B = 1.2, 0.75
"""Saturation of a word's count and weight of a passage's length, as Lucene sets them."""
_RRF = 60
"""Cormack, Clarke, Büttcher 2009."""
_BLOCKS, _MOST_IN_BLOCK = 400, 128
"""Scores are looked through in at least so many blocks, several times the most passages that are asked for, each of
at most so many."""
_DENSE_SHARE = 1 / 8
"""Words in more than this share of the passages are kept as a number for every passage: adding those is faster."""

_STRIP = 1024
"""Rows of a matrix product; what comes of it stays in the cache until it is turned."""
_USUAL_BATCH = 8
_TRIED_ROWS = 20_000

Ranking = tuple[np.ndarray, np.ndarray]
"""Rows (int64) and scores (float64), best first."""


class Best:
    """Picks the largest of N scores; equal ones in the order of `order_N`, which does not depend on how N is cut."""

    def __init__(self, order_N: np.ndarray) -> None:
        self._order_N = order_N
        self.num_rows = len(order_N)
        self._block = min(max(self.num_rows // _BLOCKS, 1), _MOST_IN_BLOCK)
        self._num_blocks = -(-self.num_rows // self._block)
        self.padded = self._num_blocks * self._block

    def bound(self, scores: np.ndarray, count: int) -> float:
        """A number that at least `count` of the padded scores reach: the count-th largest maximum of a block."""
        if count > self._num_blocks:
            return -np.inf
        maxima = scores.reshape(self._block, self._num_blocks).max(axis=0)
        return float(np.partition(maxima, -count)[-count])

    def sorted(self, rows: np.ndarray, scores: np.ndarray, count: int) -> Ranking:
        """The best `count` of candidate rows."""
        best = np.lexsort((self._order_N[rows], -scores))[:count]
        return rows[best], scores[best].astype(np.float64)


class Postings:
    """BM25 (Robertson and Zaragoza 2009, eq. 3.15) with the idf of Lucene, ln(1 + (N − n + ½)/(n + ½)), never negative.

    A posting's weight does not depend on the query, so it is computed here and a query only adds (Lù 2024, BM25S).
    """

    def __init__(self, words: Sequence[str], word_P: np.ndarray, row_P: np.ndarray, count_P: np.ndarray, best: Best):
        """Each posting's number of its word in `words`, its passage, and how often that has the word."""
        self._best = best
        self._number = {word: number for number, word in enumerate(words)}
        num_rows = best.num_rows
        length_N = np.bincount(row_P, count_P, minlength=num_rows)
        has_V = np.bincount(word_P, minlength=len(words))
        idf_V = np.log1p((num_rows - has_V + 0.5) / (has_V + 0.5))
        norm_N = K1 * (1 - B + B * length_N / max(length_N.mean(), 1e-9))
        weight_P = (idf_V[word_P] * count_P * (K1 + 1) / (count_P + norm_N[row_P])).astype(np.float32)
        by_word = np.argsort(word_P, kind="stable")
        self._rows = row_P[by_word].astype(np.int32)
        self._weights = weight_P[by_word]
        self._starts = np.concatenate([[0], np.cumsum(has_V)])
        self._dense: dict[int, np.ndarray] = {}
        for number in np.flatnonzero(has_V > _DENSE_SHARE * num_rows).tolist():
            self._dense[number] = np.zeros(best.padded, np.float32)
            self._dense[number][self._span(number, self._rows)] = self._span(number, self._weights)
        self._scores = np.zeros(best.padded, np.float32)

    def _span(self, number: int, array_P: np.ndarray) -> np.ndarray:
        return array_P[self._starts[number] : self._starts[number + 1]]

    def rank(self, words: Sequence[str], count: int) -> Ranking:
        """Passages that have any of the words. A word counts once. Not for two threads at a time."""
        # The order of addition is that of the words themselves: floats do not add up the same in another order.
        numbers = [self._number[word] for word in sorted(set(words)) if word in self._number]
        scores = self._scores
        scores[:] = 0
        for number in numbers:
            if (dense := self._dense.get(number)) is not None:
                scores += dense
            else:
                scores[self._span(number, self._rows)] += self._span(number, self._weights)
        bound = self._best.bound(scores, count)
        rows = np.flatnonzero(scores >= bound if bound > 0 else scores > 0)
        return self._best.sorted(rows, scores[rows], count)


def _rounding(size: int) -> float:
    """Most that rounding in float32 changes the product of two unit vectors (Higham 2002, eq. 3.5)."""
    return size * 2.0**-24


class _Product:
    """Queries times a part of the passages, in float32."""

    def __init__(self, vectors_ND: np.ndarray) -> None:
        self._vectors_ND = vectors_ND
        self.doubt = _rounding(vectors_ND.shape[1])

    def __call__(self, queries_BD: np.ndarray, products_BN: np.ndarray) -> None:
        queries_DB = np.ascontiguousarray(queries_BD.T)
        # Passages by queries, a strip at a time: up to a third less CPU than queries by passages if B is small.
        for start in range(0, len(self._vectors_ND), _STRIP):
            rows = slice(start, start + _STRIP)
            products_BN[:, rows] = (self._vectors_ND[rows] @ queries_DB).T


class _CoarseProduct:
    """The same in bfloat16, over factors packed once as oneDNN wants them: a sixth of the CPU if B is small.

    The operators are those torch.compile uses for linear layers whose weights are frozen.
    """

    def __init__(self, vectors_ND: np.ndarray) -> None:
        """Raises `RuntimeError` or `AttributeError` if torch or the machine does not have it."""
        import torch

        factors_ND = torch.from_numpy(np.array(vectors_ND)).bfloat16()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(factors_ND, _USUAL_BATCH)
        self._linear = torch.ops.mkldnn._linear_pointwise
        # Both factors and the result are rounded to 8 bits.
        self.doubt = (1 + 2.0**-8) ** 3 - 1 + _rounding(vectors_ND.shape[1])

    def __call__(self, queries_BD: np.ndarray, products_BN: np.ndarray) -> None:
        import torch

        given_BD = torch.from_numpy(queries_BD).bfloat16()
        products_BN[:] = self._linear(given_BD, self._packed, None, "none", [], "").float().numpy()


class Vectors:
    """Exact nearest neighbours: all pairs of a batch in one matrix product, cut into a part for each core."""

    def __init__(self, vectors_ND: np.ndarray, best: Best, *, coarse: bool | None = None) -> None:
        """`vectors_ND`: float32 of length 1 or 0. `coarse`: multiply in bfloat16; None: if that is faster here."""
        num_threads = max(1, len(os.sched_getaffinity(0)) - 1)  # words are looked up beside it
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="product", initializer=_one_thread_of_torch)
        edges = np.linspace(0, best.num_rows, num_threads + 1, dtype=int).tolist()
        parts = [slice(*edge) for edge in itertools.pairwise(edges) if edge[0] < edge[1]]
        self._best = best
        self._vectors_ND = vectors_ND
        product = _CoarseProduct if (_coarse_is_faster(vectors_ND) if coarse is None else coarse) else _Product
        self._parts = [(part, product(vectors_ND[part])) for part in parts]
        self._doubt = 2 * self._parts[0][1].doubt  # for the two ends of a comparison
        self._products = np.full((0, best.padded), -np.inf, np.float32)

    def rank(self, queries_BD: np.ndarray, count: int) -> list[Ranking]:
        """The nearest passages of each query; of a query of zeros, none. Not for two threads at a time."""
        if len(queries_BD) > len(self._products):
            self._products = np.full((len(queries_BD), self._best.padded), -np.inf, np.float32)
        products = self._products[: len(queries_BD)]
        multiplied = [self._threads.submit(product, queries_BD, products[:, part]) for part, product in self._parts]
        for part in multiplied:
            part.result()
        return [self._nearest(query_D, row, count) for query_D, row in zip(queries_BD, products, strict=True)]

    def _nearest(self, query_D: np.ndarray, products: np.ndarray, count: int) -> Ranking:
        if not query_D.any():
            return np.zeros(0, np.int64), np.zeros(0)
        bound = self._best.bound(products, count) - self._doubt
        rows = np.flatnonzero(products[: self._best.num_rows] >= bound)
        if len(rows) > 2 * count:  # a coarse product nominates many
            near = self._vectors_ND[rows] @ query_D
            rows = rows[near >= np.partition(near, -count)[-count] - 2 * _rounding(len(query_D))]
        exact = (self._vectors_ND[rows].astype(np.float64) * query_D.astype(np.float64)).sum(axis=1)
        return self._best.sorted(rows, exact, count)


def _one_thread_of_torch() -> None:
    """Products are cut into threads here; those of OpenMP would spin for a while after each."""
    import torch

    torch.set_num_threads(1)


def _coarse_is_faster(vectors_ND: np.ndarray) -> bool:
    """Whether this machine multiplies in bfloat16 by instructions of its own: tried on a usual batch."""
    tried_ND = vectors_ND[:_TRIED_ROWS]
    queries_BD = np.array(tried_ND[:_USUAL_BATCH])
    products_BN = np.empty((len(queries_BD), len(tried_ND)), np.float32)

    def seconds(product: _Product | _CoarseProduct) -> float:
        times = []
        for _ in range(5):
            started = time.perf_counter()
            product(queries_BD, products_BN)
            times.append(time.perf_counter() - started)
        return min(times)

    with ThreadPoolExecutor(1, initializer=_one_thread_of_torch) as thread:
        try:
            return thread.submit(seconds, _CoarseProduct(tried_ND)).result() < seconds(_Product(tried_ND))
        except (RuntimeError, AttributeError):  # another torch, or one without oneDNN
            return False


def fuse(rankings: Sequence[Ranking], best: Best, count: int) -> Ranking:
    """Reciprocal rank fusion: a row's score is the sum of 1/(60 + rank) over the rankings that have it, from rank 1."""
    all_rows = np.concatenate([rows for rows, _ in rankings])
    shares = np.concatenate([1.0 / (_RRF + np.arange(1, len(rows) + 1)) for rows, _ in rankings])
    rows, place = np.unique(all_rows, return_inverse=True)
    return best.sorted(rows, np.bincount(place, shares, minlength=len(rows)), count)
