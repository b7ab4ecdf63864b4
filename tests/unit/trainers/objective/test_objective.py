"""The objective is policy loss + KL − entropy, whatever the packing; and its sums become the step's metrics."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from settings.train import TrainSettings
from tests.unit.trainers.loss_tokens import Arrays, arrays, inputs_of
from trainers.objective.aggregation import aggregation_weights
from trainers.objective.losses import LossOutput
from trainers.objective.objective import mean_metrics, objective

LOSSES: list[dict[str, Any]] = [
    {"kind": "clip", "dual_clip": 2.0},
    {"kind": "gspo", "clip_low": 0.02, "clip_high": 0.03},
    {"kind": "cispo", "clip_low": 0.5},
    {"kind": "sapo"},
    {"kind": "dppo", "clip_low": 0.05, "clip_high": 0.05},
    {"kind": "sft"},
]


def _settings(loss: dict[str, Any] | None = None, **changes: Any) -> TrainSettings:
    """With everything that may be added to a loss, unless `changes` say otherwise."""
    terms = {"kl": {"coefficient": 0.1}, "reference": {"kind": "base"}, "entropy_bonus": 0.01, **changes}
    return TrainSettings.model_validate({"loss": loss or {"kind": "clip"}, **terms})


def _run(tokens: Arrays, train: TrainSettings) -> tuple[LossOutput, np.ndarray, np.ndarray]:
    """The objective, and its gradients by log-probabilities and entropies."""
    inputs = inputs_of(tokens)
    output = objective(inputs, train)
    by_logprob, by_entropy = torch.autograd.grad(output.loss, (inputs.logprobs, inputs.entropy), allow_unused=True)
    nothing = torch.zeros_like(inputs.entropy) if by_entropy is None else by_entropy
    return output, by_logprob.numpy(), nothing.numpy()


@pytest.mark.parametrize("clamp", [None, 0.01])
@pytest.mark.parametrize("has_selection", [False, True])
def test_kl_and_entropy_are_added_under_the_weights_of_the_loss(has_selection: bool, clamp: float | None) -> None:
    """Only selected tokens have a policy term and a bonus; the KL penalty and the metrics keep all."""
    tokens = arrays([7, 1, 12], seed=0)
    selected = np.ones(20)
    if has_selection:
        selected = tokens["selected"] = (np.random.default_rng(0).random(20) < 0.4).astype(np.float64)
    alone = {**tokens, "mask": tokens["mask"] * selected}
    plain, plain_gradient, _ = _run(alone, _settings(kl={}, entropy_bonus=0.0))
    output, gradient, entropy_gradient = _run(tokens, _settings(kl={"coefficient": 0.1, "clamp": clamp}))
    weight = tokens["weights"] * tokens["mask"]  # no importance: the reference is not sampled from
    difference = tokens["logprobs"] - tokens["reference_logprobs"]
    k3, bound = np.exp(-difference) - 1 + difference, np.inf if clamp is None else clamp
    kl, slope = k3.clip(max=bound), np.where(k3 < bound, 1 - np.exp(-difference), 0)
    bonus = (weight * selected * tokens["entropy"]).sum()
    expected = plain.loss.item() + 0.1 * (weight * kl).sum() - 0.01 * bonus
    assert output.loss.item() == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(gradient, plain_gradient + 0.1 * weight * slope, rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(entropy_gradient, -0.01 * weight * selected, rtol=1e-12)
    log_ratio = tokens["logprobs"] - tokens["old_logprobs"]
    per_token = {"reference_kl": kl, "entropy": tokens["entropy"], "approx_kl": np.exp(log_ratio) - 1 - log_ratio}
    assert {name: output.sums[name] for name in per_token} == pytest.approx(
        {name: float((tokens["mask"] * values).sum()) for name, values in per_token.items()}
    )


def test_a_penalty_in_the_reward_is_measured_but_not_in_the_loss() -> None:
    tokens = arrays([7, 5], seed=1)
    output, gradient, _ = _run(tokens, _settings(kl={"coefficient": 0.1, "place": "reward", "estimator": "k1"}))
    plain, plain_gradient, _ = _run(tokens, _settings(kl={}))
    assert output.loss.item() == plain.loss.item()
    np.testing.assert_array_equal(gradient, plain_gradient)
    difference = tokens["logprobs"] - tokens["reference_logprobs"]
    assert output.sums["reference_kl"] == pytest.approx((tokens["mask"] * difference).sum())


def test_what_a_term_lacks_stops_the_step() -> None:
    tokens = arrays([3], seed=4)
    with pytest.raises(AssertionError, match="without reference_logprobs"):
        objective(inputs_of(tokens, reference_logprobs=None), _settings())
    with pytest.raises(AssertionError, match="bonus without gradient"):
        objective(inputs_of(tokens, entropy=torch.zeros(3)), _settings())


@st.composite
def _packings(draw: st.DrawFn) -> tuple[list[int], int, list[list[int]]]:
    """Lengths, a seed, and the sequences shuffled and cut into packs, some of them empty."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=7))
    order = draw(st.permutations(range(len(lengths))))
    cuts = sorted(draw(st.lists(st.integers(0, len(lengths)), max_size=3)))
    bounds = [0, *cuts, len(lengths)]
    packs = [list(order[start:stop]) for start, stop in zip(bounds, bounds[1:], strict=False)]
    return lengths, draw(st.integers(0, 1000)), packs


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss["kind"])
@settings(deadline=None, max_examples=40)
@given(case=_packings(), aggregation=st.sampled_from(["token_mean", "sequence_mean", "sequence_sum", "constant"]))
def test_packing_order_and_micro_batches_change_neither_value_nor_gradient_nor_metrics(
    loss: dict[str, Any], case: tuple[list[int], int, list[list[int]]], aggregation: str
) -> None:
    lengths, seed, packs = case
    tokens = arrays(lengths, seed=seed)
    tokens["selected"] = (np.random.default_rng(seed).random(sum(lengths)) < 0.7).astype(np.float64)
    counts = np.array([int(tokens["mask"][tokens["sequences"] == row].sum()) for row in range(len(lengths))])
    weights = aggregation_weights(
        counts,
        aggregation=aggregation,
        num_tokens=int(counts.sum()),
        num_sequences=len(lengths),
        max_tokens=9,
    )
    tokens["weights"] = weights[tokens["sequences"]]
    train = _settings(loss)
    expected, gradient, entropy_gradient = _run(tokens, train)

    value, sums = 0.0, dict.fromkeys(expected.sums, 0.0)
    for pack in packs:
        where = np.concatenate([np.flatnonzero(tokens["sequences"] == row) for row in pack] or [np.zeros(0, np.int64)])
        part = {name: values[where] for name, values in tokens.items()}
        part["sequences"] = np.repeat(np.arange(len(pack)), [lengths[row] for row in pack])
        output, part_gradient, part_entropy_gradient = _run(part, train)
        value += output.loss.item()
        sums = {name: sums[name] + output.sums[name] for name in sums}
        np.testing.assert_allclose(part_gradient, gradient[where], rtol=1e-9, atol=1e-14)
        np.testing.assert_allclose(part_entropy_gradient, entropy_gradient[where], rtol=1e-12)
    assert value == pytest.approx(expected.loss.item(), rel=1e-9, abs=1e-13)
    assert sums == pytest.approx(expected.sums, rel=1e-9, abs=1e-12)


def test_sums_become_means_over_their_own_denominators_and_a_share_of_no_tokens_is_left_out() -> None:
    sums = {"entropy": 6.0, "low": 1.0, "low/of": 4.0, "high": 0.0, "high/of": 0.0}
    assert mean_metrics(sums, num_tokens=8) == {"entropy": 0.75, "low": 0.25}
    assert mean_metrics({"entropy": 0.0}, num_tokens=0) == {}
