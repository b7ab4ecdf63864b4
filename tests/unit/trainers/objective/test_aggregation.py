"""Weights of tokens are the four means of the papers, and the entropy mask keeps the share it is asked for."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trainers.objective.aggregation import aggregation_weights, top_entropy_mask


def _weights(counts: list[int], aggregation: str, **changes: int) -> np.ndarray:
    totals = {"num_tokens": sum(counts), "num_sequences": len(counts), "max_tokens": 10, **changes}
    return aggregation_weights(np.array(counts), aggregation=aggregation, **totals)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", lambda rows: sum(map(sum, rows)) / sum(map(len, rows))),
        ("sequence_mean", lambda rows: np.mean([np.mean(row) for row in rows])),
        ("sequence_sum", lambda rows: np.mean([np.sum(row) for row in rows])),
        ("constant", lambda rows: np.mean([np.sum(row) for row in rows]) / 10),
    ],
)
def test_weighted_sums_are_the_means_of_the_papers(aggregation: str, expected: object) -> None:
    rows = [np.array([1.0, 5.0, 2.0]), np.array([7.0]), np.array([0.5, -3.0])]
    weights = _weights([3, 1, 2], aggregation)
    total = sum(weight * row.sum() for weight, row in zip(weights, rows, strict=True))
    assert total == pytest.approx(expected(rows), rel=1e-12)
    # Denominators are those of the whole batch, wherever its rows are.
    part = _weights([1, 2], aggregation, num_tokens=6, num_sequences=3)
    np.testing.assert_array_equal(part, weights[1:])
    assert _weights([0, 4], aggregation)[0] == 0 and not _weights([0], aggregation).any()


def test_a_row_without_tokens_counts_as_a_sequence() -> None:
    assert _weights([0, 4], "sequence_mean")[1] == 1 / 8


def test_top_entropy_keeps_the_most_uncertain_tokens_of_those_trained() -> None:
    entropy, mask = np.array([0.1, 2.0, 9.0, 0.5, 0.2, np.nan]), np.array([1, 1, 0, 1, 1, 0])
    assert top_entropy_mask(entropy, mask, fraction=0.5).tolist() == [False, True, False, True, False, False]
    assert top_entropy_mask(entropy, mask, fraction=0.01).tolist() == [False, True] + [False] * 4
    assert top_entropy_mask(entropy, mask, fraction=1.0).tolist() == (mask > 0).tolist()
    assert not top_entropy_mask(entropy, 0 * mask, fraction=0.5).any()


@given(
    st.lists(st.integers(0, 10_000), min_size=1, max_size=60, unique=True),
    st.floats(0.01, 1),
)
@example([0, 1000, 2000, 10_000, 9999, 500], 0.125)
def test_top_entropy_keeps_its_share_to_a_token(thousandths: list[int], fraction: float) -> None:
    entropies = np.array(thousandths) / 1000
    kept = top_entropy_mask(entropies, np.ones(len(entropies)), fraction=fraction)
    assert abs(kept.sum() - fraction * len(entropies)) <= 1
    assert min(entropies[kept]) >= max(entropies[~kept], default=0)


@pytest.mark.parametrize("size", [1.0, 8.0])
def test_entropies_that_differ_by_rounding_are_ties_and_stay_in(size: float) -> None:
    entropies = np.float32(size) * np.array([1, 1 + 1e-7, 1 - 1e-7, 1 + 2e-7, 0.9, 1.1])
    assert top_entropy_mask(entropies, np.ones(6), fraction=0.5).tolist() == [True, True, True, True, False, True]
