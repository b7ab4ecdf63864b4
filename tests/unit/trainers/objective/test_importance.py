"""The proximal policy between two versions, and the four ways to bound its distance from the one that sampled."""

import math

import pytest
import torch

from trainers.objective.importance import importance_weights, loglinear_proximal
from trainers.objective.objective import mean_metrics


@pytest.mark.parametrize("proximal", [4, 1000, 100_000])
def test_loglinear_lies_between_the_sampling_and_the_current_policy_by_version(proximal: int) -> None:
    versions = torch.tensor([proximal, proximal - 1, proximal - 2, proximal - 3], dtype=torch.int32)
    sampled, current = torch.full((4,), -2.0), torch.full((4,), -1.0, requires_grad=True)

    def between(version: float) -> torch.Tensor:
        return loglinear_proximal(current, sampled, versions, proximal_version=proximal, current_version=version)

    # A third of a step later α = 0, 1 / (4/3), 2 / (7/3), 3 / (10/3).
    found = between(proximal + 1 / 3)
    torch.testing.assert_close(found, torch.tensor([-2, -2 + 3 / 4, -2 + 6 / 7, -2 + 9 / 10]), rtol=1e-4, atol=0)
    assert found[0] == -2, "what the proximal policy sampled itself is exact"
    assert torch.equal(between(proximal), current), "before the first update it is the recomputed value"
    assert not found.requires_grad


RATIOS = [0.5, 1.0, 3.0, 4.0, 0.1]  # in sequences of 3 and 2 tokens: products 1.5 and 0.4
GOLDEN = {
    # correction: weights without a floor, tokens out of bounds, weights with floor 0.45, tokens out of bounds
    "token_truncate": ([0.5, 1, 2, 2, 0.1], 2, [0.5, 1, 2, 2, 0.45], 3),
    "token_mask": ([0.5, 1, 0, 0, 0.1], 2, [0.5, 1, 0, 0, 0], 3),
    "sequence_truncate": ([1.5, 1.5, 1.5, 0.4, 0.4], 0, [1.5, 1.5, 1.5, 0.45, 0.45], 2),
    "sequence_mask": ([1.5, 1.5, 1.5, 0.4, 0.4], 0, [1.5, 1.5, 1.5, 0, 0], 2),
}


def _weights(ratios: list[float], **options: object) -> tuple[torch.Tensor, dict[str, float]]:
    sampled = torch.full((len(ratios),), -3.0, dtype=torch.float64)
    options = {
        "mask_T": torch.ones(len(ratios)),
        "sequences_T": torch.tensor([0, 0, 0, 1, 1][: len(ratios)]),
        "cap": 2.0,
        **options,
    }
    return importance_weights(sampled + torch.tensor(ratios, dtype=torch.float64).log(), sampled, **options)


@pytest.mark.parametrize("correction", GOLDEN)
def test_the_four_corrections(correction: str) -> None:
    free, outside, floored, outside_floor = GOLDEN[correction]
    for floor, expected, corrected in ((None, free, outside), (0.45, floored, outside_floor)):
        weights, sums = _weights(RATIOS, correction=correction, floor=floor)
        assert weights.tolist() == pytest.approx(expected)
        assert sums["importance"] == pytest.approx(sum(expected))
        assert sums["importance_squared"] == pytest.approx(sum(w * w for w in expected))
        assert sums["importance_corrected"] == corrected
        assert sums["importance_log_ratio"] == pytest.approx(sum(abs(math.log(r)) for r in RATIOS))
    # Of two sequences the product of the first, 2.4, is over the cap; e^800 overflows float64.
    for ratios in ([1.5, 1.6, 1.0, 1.0, 1.0], [math.exp(700), math.exp(100), 1.0, 1.0, 1.0]):
        weights, sums = _weights(ratios, correction=correction)
        if correction.startswith("sequence"):
            bound = 2.0 if correction == "sequence_truncate" else 0.0
            assert weights.tolist() == [bound, bound, bound, 1, 1]
            assert (sums["importance_corrected"], sums["importance_squared"]) == (3, 3 * bound**2 + 2)


@pytest.mark.parametrize("correction", GOLDEN)
def test_masked_tokens_are_in_no_product_and_no_sum(correction: str) -> None:
    sampled = torch.full((5,), -3.0)
    proximal = sampled + torch.tensor([0.2, math.inf, 0.1, math.nan, 0.3])
    mask = torch.tensor([1.0, 0, 1, 0, 1])
    weights, sums = importance_weights(
        proximal, sampled, mask, torch.tensor([0, 0, 0, 1, 1]), correction=correction, cap=9.0
    )
    kept = [math.exp(0.3)] * 2 if correction.startswith("sequence") else [math.exp(0.2), math.exp(0.1)]
    assert weights.tolist() == pytest.approx([kept[0], 1, kept[1], 1, math.exp(0.3)], rel=1e-6)
    assert sums["importance"] == pytest.approx(sum(kept) + math.exp(0.3), rel=1e-6)


def test_effective_sample_size_is_one_for_equal_weights_and_falls_with_their_spread() -> None:
    _, equal = _weights([1.0] * 5, correction="token_truncate")
    assert mean_metrics(equal, num_tokens=5)["importance_effective_sample_size"] == pytest.approx(1)
    _, one_of_five = _weights([1, 3, 3, 3, 3], correction="token_mask")
    assert mean_metrics(one_of_five, num_tokens=5)["importance_effective_sample_size"] == pytest.approx(1 / 5)
