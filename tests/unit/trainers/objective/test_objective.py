"""The objective is policy loss + KL − entropy, whatever the packing; and its sums become the step's metrics."""

from pathlib import Path
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

CUSTOM = """
from trainers.objective.losses import LossInputs, LossOutput

def reinforce(inputs: LossInputs, scale: float) -> LossOutput:
    weight = inputs.weights * inputs.importance * inputs.mask
    return LossOutput(loss=-scale * (weight * inputs.advantages * inputs.logprobs).sum(), sums={"mine": 1.0})
"""

LOSSES: list[dict[str, Any]] = [
    {"kind": "clip", "dual_clip": 2.0},
    {"kind": "gspo", "clip_low": 0.02, "clip_high": 0.03},
    {"kind": "cispo", "clip_low": 0.5},
    {"kind": "sapo"},
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


def test_kl_and_entropy_are_added_under_the_weights_of_the_loss() -> None:
    tokens = arrays([7, 1, 12], seed=0)
    plain, plain_gradient, _ = _run(tokens, _settings(kl={}, entropy_bonus=0.0))
    output, gradient, entropy_gradient = _run(tokens, _settings())
    weight = tokens["weights"] * tokens["mask"]  # no importance: the reference is not sampled from
    difference = tokens["logprobs"] - tokens["reference_logprobs"]
    k3 = np.exp(-difference) - 1 + difference
    expected = plain.loss.item() + 0.1 * (weight * k3).sum() - 0.01 * (weight * tokens["entropy"]).sum()
    assert output.loss.item() == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(gradient, plain_gradient + 0.1 * weight * (1 - np.exp(-difference)), rtol=1e-9)
    np.testing.assert_allclose(entropy_gradient, -0.01 * weight, rtol=1e-12)
    assert output.sums["reference_kl"] == pytest.approx((tokens["mask"] * k3).sum())
    assert output.sums["entropy"] == pytest.approx((tokens["mask"] * tokens["entropy"]).sum())
    assert output.sums["approx_kl"] == pytest.approx(
        float((tokens["mask"] * _k3_of(tokens["logprobs"] - tokens["old_logprobs"])).sum())
    )


def _k3_of(log_ratio: np.ndarray) -> np.ndarray:
    return np.exp(log_ratio) - 1 - log_ratio


def test_a_penalty_in_the_reward_is_measured_but_not_in_the_loss() -> None:
    tokens = arrays([7, 5], seed=1)
    output, gradient, _ = _run(tokens, _settings(kl={"coefficient": 0.1, "place": "reward", "estimator": "k1"}))
    plain, plain_gradient, _ = _run(tokens, _settings(kl={}))
    assert output.loss.item() == plain.loss.item()
    np.testing.assert_array_equal(gradient, plain_gradient)
    difference = tokens["logprobs"] - tokens["reference_logprobs"]
    assert output.sums["reference_kl"] == pytest.approx((tokens["mask"] * difference).sum())


def test_a_clamped_kl_is_clamped_token_by_token() -> None:
    tokens = arrays([7, 5], seed=2)
    kl = {"coefficient": 1.0, "clamp": 0.01}
    output, _, _ = _run(tokens, _settings(kl=kl, entropy_bonus=0.0))
    plain, _, _ = _run(tokens, _settings(kl={}, entropy_bonus=0.0))
    k3 = np.minimum(_k3_of(tokens["reference_logprobs"] - tokens["logprobs"]), 0.01)
    added = (tokens["weights"] * tokens["mask"] * k3).sum()
    assert output.loss.item() - plain.loss.item() == pytest.approx(added, rel=1e-9)


def test_only_selected_tokens_have_a_policy_term_and_a_bonus_while_kl_keeps_all() -> None:
    tokens = arrays([7, 5, 9], seed=3)
    selected = (np.random.default_rng(0).random(21) < 0.4).astype(np.float64)
    output, gradient, entropy_gradient = _run({**tokens, "selected": selected}, _settings())
    masked = {**tokens, "mask": tokens["mask"] * selected}
    on_selected, selected_gradient, _ = _run(masked, _settings(kl={}))
    weight = tokens["weights"] * tokens["mask"]
    difference = tokens["logprobs"] - tokens["reference_logprobs"]
    kl = 0.1 * (weight * _k3_of(-difference)).sum()
    assert output.loss.item() == pytest.approx(on_selected.loss.item() + kl, rel=1e-12)
    np.testing.assert_allclose(
        gradient, selected_gradient + 0.1 * weight * (1 - np.exp(-difference)), rtol=1e-9, atol=1e-15
    )
    np.testing.assert_allclose(entropy_gradient, -0.01 * weight * selected, rtol=1e-12)
    # Metrics stay those of all trained tokens.
    assert output.sums["entropy"] == pytest.approx((tokens["mask"] * tokens["entropy"]).sum())


def test_what_a_term_lacks_stops_the_step() -> None:
    tokens = arrays([3], seed=4)
    with pytest.raises(AssertionError, match="without reference_logprobs"):
        objective(inputs_of(tokens, reference_logprobs=None), _settings())
    with pytest.raises(AssertionError, match="bonus without gradient"):
        objective(inputs_of(tokens, entropy=torch.zeros(3)), _settings())


def test_a_custom_loss_gets_its_arguments_and_what_is_added_to_every_loss(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CUSTOM)
    loss = {"kind": "custom", "path": f"{tmp_path}/mine.py:reinforce", "arguments": {"scale": 2.0}}
    tokens = arrays([7, 5], seed=5)
    weight = tokens["weights"] * tokens["importance"] * tokens["mask"]
    expected = -2 * (weight * tokens["advantages"] * tokens["logprobs"]).sum()
    plain, _, _ = _run(tokens, _settings(loss, kl={}, entropy_bonus=0.0))
    assert plain.loss.item() == pytest.approx(expected, rel=1e-12)
    assert set(plain.sums) == {"mine", "approx_kl", "entropy", "reference_kl"}
    both, _, _ = _run(tokens, _settings(loss))
    clip, _, _ = _run(tokens, _settings())
    clip_alone, _, _ = _run(tokens, _settings(kl={}, entropy_bonus=0.0))
    assert both.loss.item() - expected == pytest.approx(clip.loss.item() - clip_alone.loss.item(), rel=1e-9)


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


def test_sums_become_means_over_their_own_denominators() -> None:
    tokens = arrays([30, 20], seed=6, spread=0.6)
    metrics = mean_metrics(objective(inputs_of(tokens), _settings()).sums, num_tokens=tokens["mask"].sum())
    trained = tokens["mask"] > 0
    ratio = np.exp(tokens["logprobs"] - tokens["old_logprobs"])[trained]
    advantages = tokens["advantages"][trained]
    assert metrics["clip_fraction_low"] == pytest.approx(np.mean(ratio[advantages < 0] < 0.8))
    assert metrics["clip_fraction_high"] == pytest.approx(np.mean(ratio[advantages > 0] > 1.28))
    both = ((ratio < 0.8) & (advantages < 0)) | ((ratio > 1.28) & (advantages > 0))
    assert metrics["clip_fraction"] == pytest.approx(np.mean(both))
    assert metrics["entropy"] == pytest.approx(tokens["entropy"][trained].mean())
    assert not any(name.endswith("/of") for name in metrics)


def test_a_share_of_no_tokens_is_left_out() -> None:
    assert mean_metrics({"a": 0.0, "a/of": 0.0, "b": 1.0}, num_tokens=2) == {"b": 0.5}
    assert mean_metrics({"b": 0.0}, num_tokens=0) == {}
