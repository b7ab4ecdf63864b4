"""What each token of a batch counts."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from settings.train import TrainSettings
from tests.unit.trainers.builders import Row, samples_of
from trainers.data.samples import Samples
from trainers.model.batches import build_pack
from trainers.objective.aggregation import Aggregation
from trainers.objective.objective import loss_inputs, objective
from trainers.step_batch import StepBatch


def _batch(samples: Samples) -> StepBatch:
    mask_T, moving_B = samples.mask_T, np.ones(samples.num_rows, bool)
    return StepBatch(samples=samples, sampled_T=mask_T, trained_T=mask_T, moving_B=moving_B, values={}, base_version=0)


def _row(attempt: int, length: int) -> Row:
    sampled = {"logprobs": [-1.0] * length, "versions": [0] * length}
    return Row(prompt=[1], reply=[2] * length, reward=0.0, group=0, attempt=attempt, **sampled)


@pytest.mark.parametrize(
    ("aggregation", "forked", "alone"),
    [
        *(("token_mean", 1 / 8, 1 / 8), ("sequence_mean", 1 / 12, 1 / 4)),
        *(("sequence_sum", 1 / 2, 1 / 2), ("constant", 1 / 20, 1 / 20)),
    ],
)
def test_a_forked_attempt_is_one_sequence(aggregation: Aggregation, forked: float, alone: float) -> None:
    samples = samples_of([_row(0, 4), _row(0, 2), _row(1, 2)])
    mask_T = samples.mask_T
    batch = _batch(samples)
    weights_T = batch.weights_T(np.arange(3), aggregation, max_tokens=10)[mask_T]
    assert weights_T == pytest.approx([forked] * 6 + [alone] * 2, rel=1e-6)
    older = dataclasses.replace(batch, samples=dataclasses.replace(samples, by_attempt=False))
    rows = {"token_mean": [1 / 8] * 3, "sequence_mean": [1 / 12, 1 / 6, 1 / 6], "sequence_sum": [1 / 3] * 3}
    expected = np.repeat(rows.get(aggregation, [1 / 30] * 3), [4, 2, 2])
    assert older.weights_T(np.arange(3), aggregation, max_tokens=10)[mask_T] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "loss"),
    [
        ({"loss": {"kind": "gspo", "clip_low": 1, "clip_high": 9}}, 4 * 2 + 2 * 0.25),
        ({"loss": {"kind": "gspo", "clip_low": 0.1, "clip_high": 9}}, 4 * 2 + 2 * 0.25),  # min(s A, clip(s) A), A = 1
        ({"reject": [{"over": "sequence_mean", "low": 0.5}], "loss": {"kind": "clip", "clip_high": 9}}, 4 * 2),
        ({"reject": [{"over": "sequence_sum", "high": 15}], "loss": {"kind": "clip", "clip_high": 9}}, 2 * 0.25),
    ],
)
def test_a_ratio_is_that_of_a_branch_and_its_weight_that_of_the_attempt(settings: dict[str, Any], loss: float) -> None:
    samples = samples_of([_row(0, 4), _row(0, 2)])
    mask_T = samples.mask_T
    batch = _batch(samples)
    weights_T = batch.weights_T(np.arange(2), "sequence_mean", max_tokens=10)
    values = {"sampled_logprobs": samples.logprobs_T, "weights": weights_T, "advantages": np.ones_like(weights_T)}
    pack = build_pack(samples, np.arange(2), mask_T=mask_T, values=values, device=torch.device("cpu"))
    ratios_T = torch.where(pack.sequences == 0, 2.0, 0.25)  # together, their geometric mean is 1
    logprobs_T = pack.values["sampled_logprobs"] + ratios_T.log()
    train = TrainSettings.model_validate(settings)
    inputs, _ = loss_inputs(pack, logprobs_T, torch.zeros_like(logprobs_T), train, base_version=0, version=0)
    assert float(objective(inputs, train).loss) == pytest.approx(-loss / 6, rel=1e-6)
