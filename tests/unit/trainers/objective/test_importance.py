"""The proximal policy between two versions, and the four ways to bound its distance from the one that sampled."""

import math

import numpy as np
import pytest
import torch

from tests.unit.trainers.loss_tokens import arrays, inputs_of
from trainers.objective.importance import importance_weights, loglinear_proximal
from trainers.objective.losses import clip_loss
from trainers.objective.objective import mean_metrics


def _loglinear(versions: list[float], *, proximal: float, current: float) -> torch.Tensor:
    """Between −2 (sampled) and −1 (current)."""
    count = len(versions)
    return loglinear_proximal(
        torch.full((count,), -1.0, dtype=torch.float64),
        torch.full((count,), -2.0, dtype=torch.float64),
        torch.tensor(versions),
        proximal_version=proximal,
        current_version=current,
    )


def test_loglinear_lies_between_the_sampling_and_the_current_policy_by_version() -> None:
    # α = (4 − v) / (5 − v): 0 for version 4, 1/2 for 3, 2/3 for 2, 3/4 for 1
    assert _loglinear([4, 3, 2, 1], proximal=4, current=5).tolist() == pytest.approx([-2, -1.5, -4 / 3, -1.25])


def test_loglinear_before_the_steps_first_update_is_the_recomputed_value_exactly() -> None:
    draw = np.random.default_rng(0)
    current = torch.from_numpy(draw.normal(-2, 1, 50))
    sampled = torch.from_numpy(draw.normal(-2, 1, 50))
    versions = torch.from_numpy(draw.integers(0, 8, 50))  # 7 is the proximal policy itself: no version lies between
    proximal = loglinear_proximal(current, sampled, versions, proximal_version=7, current_version=7)
    assert torch.equal(proximal, current)


def test_loglinear_of_a_token_the_proximal_policy_sampled_is_what_it_was_sampled_at_exactly() -> None:
    sampled = torch.linspace(-5, -0.1, 20, dtype=torch.float64)
    versions = torch.full((20,), 7)
    proximal = loglinear_proximal(sampled + 0.3, sampled, versions, proximal_version=7, current_version=7.25)
    assert torch.equal(proximal, sampled)


@pytest.mark.parametrize("proximal", [10, 1000, 100_000])
def test_loglinear_is_as_exact_in_float32_after_many_versions(proximal: int) -> None:
    sampled, current = torch.tensor([-2.0, -2.0, -2.0]), torch.tensor([-1.0, -1.0, -1.0])
    versions = torch.tensor([proximal, proximal - 1, proximal - 3], dtype=torch.int32)
    found = loglinear_proximal(current, sampled, versions, proximal_version=proximal, current_version=proximal + 1 / 3)
    torch.testing.assert_close(found, torch.tensor([-2.0, -2 + 1 / (4 / 3), -2 + 3 / (10 / 3)]), rtol=1e-4, atol=0)
    assert found[0] == -2


def test_loglinear_is_exact_where_the_policy_moves_in_a_straight_line() -> None:
    # Each version and each half of a step moves a token's log-probability by the same amount.
    pace = np.linspace(-0.1, 0.1, 21)
    versions = np.arange(21) % 4

    def at(version: float) -> torch.Tensor:
        return torch.from_numpy(-2 + pace * version)

    sampled = torch.from_numpy(-2 + pace * versions)
    proximal = loglinear_proximal(at(3.5), sampled, torch.from_numpy(versions), proximal_version=3, current_version=3.5)
    torch.testing.assert_close(proximal, at(3), rtol=1e-12, atol=0)


def test_loglinear_sends_no_gradient_through_the_proximal_policy() -> None:
    current = torch.tensor([-1.0], requires_grad=True)
    proximal = loglinear_proximal(
        current, torch.tensor([-2.0]), torch.tensor([1]), proximal_version=2, current_version=3
    )
    assert not proximal.requires_grad


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


def test_a_sequence_whose_product_is_over_the_cap_is_cut_or_masked_whole() -> None:
    ratios = [1.5, 1.6, 1.0, 1.0, 1.0]  # 2.4 and 1
    assert _weights(ratios, correction="sequence_truncate")[0].tolist() == pytest.approx([2, 2, 2, 1, 1])
    weights, sums = _weights(ratios, correction="sequence_mask")
    assert weights.tolist() == pytest.approx([0, 0, 0, 1, 1])
    assert sums["importance_corrected"] == 3


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


def test_a_product_beyond_floating_point_is_cut_or_masked_without_nan() -> None:
    long = torch.full((400,), 1.0)  # e^400 overflows float32
    nothing, one = torch.zeros(400), torch.zeros(400, dtype=torch.int64)
    for correction, expected in (("sequence_truncate", 2.0), ("sequence_mask", 0.0)):
        weights, sums = importance_weights(long, nothing, nothing + 1, one, correction=correction, cap=2.0)
        assert weights.tolist() == [expected] * 400
        assert sums["importance_squared"] == 400 * expected**2


def test_effective_sample_size_is_one_for_equal_weights_and_falls_with_their_spread() -> None:
    _, equal = _weights([1.0] * 5, correction="token_truncate")
    assert mean_metrics(equal, num_tokens=5)["importance_effective_sample_size"] == pytest.approx(1)
    _, one_of_five = _weights([1, 3, 3, 3, 3], correction="token_mask")
    assert mean_metrics(one_of_five, num_tokens=5)["importance_effective_sample_size"] == pytest.approx(1 / 5)


def test_masking_by_importance_does_not_make_the_other_tokens_louder() -> None:
    # The denominator is the count of sampled tokens, before anything was masked: 5 here, not the 3 that are left.
    tokens = arrays([3, 2], seed=1)
    tokens["mask"], tokens["weights"] = np.ones(5), np.full(5, 1 / 5)
    importance, _ = _weights([0.5, 1.0, 3.0, 4.0, 0.1], correction="token_mask")
    tokens["importance"] = importance.numpy()
    inputs = inputs_of(tokens)
    clip_loss(inputs, clip_low=0.9, clip_high=9.0).loss.backward()
    ratio = np.exp(tokens["logprobs"] - tokens["old_logprobs"])
    expected = -np.array([0.5, 1, 0, 0, 0.1]) * tokens["advantages"] * ratio / 5
    np.testing.assert_allclose(inputs.logprobs.grad.numpy(), expected, rtol=1e-9)


def test_decoupled_loss_equals_numpy_in_value_and_gradient() -> None:
    """https://arxiv.org/abs/2505.24298 eq. 5: clipped around the proximal policy, weighed by its distance from the
    one that sampled."""
    tokens = arrays([7, 1, 12, 5], seed=2)
    importance, _ = importance_weights(
        *(torch.from_numpy(tokens[name]) for name in ("old_logprobs", "sampled_logprobs", "mask", "sequences")),
        correction="token_truncate",
        cap=1.2,
    )
    inputs = inputs_of(tokens, importance=importance)
    output = clip_loss(inputs, clip_low=0.2, clip_high=0.28)
    output.loss.backward()
    total, slopes = 0.0, np.zeros(25)
    for t in np.flatnonzero(tokens["mask"]):
        prox = tokens["old_logprobs"][t]
        weight = tokens["weights"][t] * min(math.exp(prox - tokens["sampled_logprobs"][t]), 1.2)
        ratio, advantage = math.exp(tokens["logprobs"][t] - prox), tokens["advantages"][t]
        total -= weight * min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
        slopes[t] = 0.0 if (ratio > 1.28 if advantage > 0 else ratio < 0.8) else -weight * advantage * ratio
    assert output.loss.item() == pytest.approx(total, rel=1e-12)
    np.testing.assert_allclose(inputs.logprobs.grad.numpy(), slopes, rtol=1e-9, atol=1e-13)
    assert (importance == 1.2).any()
