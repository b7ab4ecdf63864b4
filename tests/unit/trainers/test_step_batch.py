"""What each token of a batch counts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.unit.trainers.builders import Row, samples_of
from trainers.objective.aggregation import Aggregation
from trainers.step_batch import StepBatch


@pytest.mark.parametrize(
    ("aggregation", "forked", "alone"),
    [
        *(("token_mean", 1 / 8, 1 / 8), ("sequence_mean", 1 / 12, 1 / 4)),
        *(("sequence_sum", 1 / 2, 1 / 2), ("constant", 1 / 20, 1 / 20)),
    ],
)
def test_a_forked_attempt_is_one_sequence(aggregation: Aggregation, forked: float, alone: float) -> None:
    def row(attempt: int, length: int) -> Row:
        sampled = {"logprobs": [-1.0] * length, "versions": [0] * length}
        return Row(prompt=[1], reply=[2] * length, reward=0.0, group=0, attempt=attempt, **sampled)

    samples = samples_of([row(0, 4), row(0, 2), row(1, 2)])
    mask_T = samples.mask_T
    batch = StepBatch(samples=samples, sampled_T=mask_T, trained_T=mask_T, values={}, base_version=0)
    weights_T = batch.weights_T(np.arange(3), aggregation, max_tokens=10)[mask_T]
    assert weights_T == pytest.approx([forked] * 6 + [alone] * 2, rel=1e-6)
    older = dataclasses.replace(batch, samples=dataclasses.replace(samples, by_attempt=False))
    rows = {"token_mean": [1 / 8] * 3, "sequence_mean": [1 / 12, 1 / 6, 1 / 6], "sequence_sum": [1 / 3] * 3}
    expected = np.repeat(rows.get(aggregation, [1 / 30] * 3), [4, 2, 2])
    assert older.weights_T(np.arange(3), aggregation, max_tokens=10)[mask_T] == pytest.approx(expected, rel=1e-6)
