"""Each loss is its paper's, value and gradient, against numpy written from the formula; and masks leave no trace."""

import functools
import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
import torch

from tests.unit.trainers.loss_tokens import Arrays, arrays, inputs_of, slope, value_and_gradient
from trainers.objective.losses import (
    LossInputs,
    LossOutput,
    cispo_loss,
    clip_loss,
    dppo_loss,
    gspo_loss,
    sapo_loss,
    sft_loss,
    value_loss,
)
from trainers.objective.rejection import divergence

LENGTHS = [7, 1, 12, 5, 20]


def _ratios(tokens: Arrays) -> np.ndarray:
    return np.exp(tokens["logprobs"] - tokens["old_logprobs"])


def _clipped(ratios: np.ndarray, tokens: Arrays, low: float, high: float) -> np.ndarray:
    return np.minimum(ratios * tokens["advantages"], ratios.clip(1 - low, 1 + high) * tokens["advantages"])


# Surrogates: each takes the tokens, and as `fixed` those whose numbers have no gradient.


def _clip(tokens: Arrays, fixed: Arrays) -> np.ndarray:
    """PPO's, https://arxiv.org/abs/1707.06347 eq. 7, with the bounds of DAPO."""
    return _clipped(_ratios(tokens), tokens, 0.2, 0.28)


def _dual_clip(tokens: Arrays, fixed: Arrays) -> np.ndarray:
    """https://arxiv.org/abs/1912.09729"""
    bounded = np.maximum(_clip(tokens, fixed), 1.5 * tokens["advantages"])
    return np.where(tokens["advantages"] < 0, bounded, _clip(tokens, fixed))


def _sequence_ratios(tokens: Arrays) -> np.ndarray:
    """The geometric mean of each sequence's trained ratios, at each of its tokens."""
    log_ratios = (tokens["logprobs"] - tokens["old_logprobs"]) * tokens["mask"]
    sums, counts = (np.bincount(tokens["sequences"], weights=each) for each in (log_ratios, tokens["mask"]))
    return np.exp(sums / counts.clip(1))[tokens["sequences"]]


def _gspo(tokens: Arrays, fixed: Arrays) -> np.ndarray:
    """Of whole sequences, https://arxiv.org/abs/2507.18071 eq. 5."""
    return _clipped(_sequence_ratios(tokens), tokens, 0.05, 0.1)


def _gspo_token(tokens: Arrays, fixed: Arrays) -> np.ndarray:
    """The same where advantages differ by token: the gradient goes through each token's own probability."""
    own = np.exp(tokens["logprobs"] - fixed["logprobs"])
    return _clipped(_sequence_ratios(fixed) * own, tokens, 0.05, 0.1)


def _cispo(tokens: Arrays, fixed: Arrays) -> np.ndarray:
    """https://arxiv.org/abs/2506.13585 eq. 4 and 5: a clipped token keeps a gradient."""
    return _ratios(fixed).clip(0, 1.28) * tokens["advantages"] * tokens["logprobs"]


def _cispo_two_bounds(tokens: Arrays, fixed: Arrays) -> np.ndarray:
    return _ratios(fixed).clip(0.7, 1.28) * tokens["advantages"] * tokens["logprobs"]


def _dppo(tokens: Arrays, fixed: Arrays, *, divergence: str, delta: float) -> np.ndarray:
    """`compute_policy_loss_dppo_tv` and `_kl` of verl 0.9.1's core_algos.py, with clip_ratio_c = 1.5."""
    prob, old = np.exp(fixed["logprobs"]), np.exp(fixed["old_logprobs"])
    if divergence == "tv":
        valid_positive, valid_negative = prob - old <= 0.7 * delta, prob - old >= -delta
    else:
        binary_kl = old * np.log(old / prob) + (1 - old) * np.log((1.0 - old + 1e-8) / (1.0 - prob + 1e-8))
        valid_positive = (binary_kl <= 0.7 * delta) | (prob <= old)
        valid_negative = (binary_kl <= delta) | (prob >= old)
    valid = np.where(tokens["advantages"] > 0, valid_positive, valid_negative)
    return tokens["advantages"] * _ratios(fixed).clip(max=1.5) * tokens["logprobs"] * valid


def _dppo_of(inputs: LossInputs, kind: Literal["tv", "binary_kl"], delta: float) -> LossOutput:
    moved = divergence(kind, inputs.logprobs.detach(), inputs.old_logprobs)
    return dppo_loss(inputs, divergence_T=moved, clip_low=delta, clip_high=0.7 * delta, cap=1.5)


def _sapo(tokens: Arrays, fixed: Arrays) -> np.ndarray:
    """https://arxiv.org/abs/2511.20347"""
    tau = np.where(tokens["advantages"] > 0, 1.0, 1.05)
    return tokens["advantages"] * 4 / tau / (1 + np.exp(-tau * (_ratios(tokens) - 1)))


def _sft(tokens: Arrays, fixed: Arrays) -> np.ndarray:
    return tokens["logprobs"]


Loss = Callable[[LossInputs], LossOutput]
LOSSES: dict[str, Loss] = {
    "clip": lambda inputs: clip_loss(inputs, clip_low=0.2, clip_high=0.28),
    "dual clip": lambda inputs: clip_loss(inputs, clip_low=0.2, clip_high=0.28, dual_clip=1.5),
    "gspo": lambda inputs: gspo_loss(inputs, clip_low=0.05, clip_high=0.1),
    "cispo": lambda inputs: cispo_loss(inputs, clip_high=0.28),
    "cispo of two bounds": lambda inputs: cispo_loss(inputs, clip_high=0.28, clip_low=0.3),
    "dppo clip tv": lambda inputs: _dppo_of(inputs, "tv", 0.1),
    "dppo clip kl": lambda inputs: _dppo_of(inputs, "binary_kl", 0.02),
    "sapo": lambda inputs: sapo_loss(inputs, tau_positive=1.0, tau_negative=1.05),
    "sft": sft_loss,
}
CASES: list[tuple[str, Callable[[Arrays, Arrays], np.ndarray], bool]] = [
    ("clip", _clip, True),
    ("dual clip", _dual_clip, True),
    ("gspo", _gspo, False),
    ("gspo", _gspo_token, True),
    ("cispo", _cispo, True),
    ("cispo of two bounds", _cispo_two_bounds, True),
    ("dppo clip tv", functools.partial(_dppo, divergence="tv", delta=0.1), True),
    ("dppo clip kl", functools.partial(_dppo, divergence="kl", delta=0.02), True),
    ("sapo", _sapo, True),
    ("sft", _sft, True),
]


@pytest.mark.parametrize(("name", "surrogate", "token_level"), CASES)
def test_a_loss_equals_its_formula_in_value_and_gradient(
    name: str, surrogate: Callable[[Arrays, Arrays], np.ndarray], token_level: bool
) -> None:
    tokens = arrays(LENGTHS, seed=1, spread=0.6, token_level=token_level)

    def formula(moved: Arrays) -> float:
        return -float((tokens["weights"] * tokens["importance"] * tokens["mask"] * surrogate(moved, tokens)).sum())

    value, gradient = value_and_gradient(LOSSES[name], tokens)
    assert value == pytest.approx(formula(tokens), rel=1e-12)
    np.testing.assert_allclose(gradient, slope(formula, tokens), rtol=1e-6, atol=1e-9)
    num_moved, num_trained = np.count_nonzero(gradient), np.count_nonzero(tokens["mask"])
    assert 0 < num_moved < num_trained if "clip" in name or name == "gspo" else num_moved == num_trained


def _by_ratio(ratios: list[float], advantages: list[float], **changes: object) -> LossInputs:
    """Tokens of weight 1 whose probability changed by `ratios` since they were sampled at probability 0.1."""
    old, ones = np.full(len(ratios), math.log(0.1)), np.ones(len(ratios))
    tokens = {"logprobs": old + np.log(ratios), "old_logprobs": old, "sampled_logprobs": old}
    tokens |= dict.fromkeys(("mask", "weights", "importance", "entropy"), ones)
    tokens |= {"advantages": np.array(advantages, float), "sequences": np.zeros(len(ratios), np.int64)}
    return inputs_of(tokens, **changes)


def test_clip_is_asymmetric_and_counts_by_the_sign_of_the_advantage() -> None:
    # min(1.5, 1.28) + min(−1.5, −1.28) + min(0.5, 0.8) + min(−0.5, −0.8) + 1.27 = 1.28 − 1.5 + 0.5 − 0.8 + 1.27
    output = LOSSES["clip"](_by_ratio([1.5, 1.5, 0.5, 0.5, 1.27], [1, -1, 1, -1, 1]))
    assert output.loss.item() == pytest.approx(-0.75)
    assert output.sums == {
        "clip_fraction": 2,  # the first and the fourth
        "clip_fraction_low": 1,
        "clip_fraction_low/of": 2,
        "clip_fraction_high": 1,
        "clip_fraction_high/of": 3,
    }


def test_dual_clip_bounds_the_loss_of_negative_advantages_alone_and_without_nan() -> None:
    inputs = _by_ratio([10.0, 10.0, 2.0, 0.5], [-1, 1, -1, -1])
    output = clip_loss(inputs, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    # max(−10, −3) + 1.28 − 2 + min(−0.5, −0.8)
    assert output.loss.item() == pytest.approx(-(-3 + 1.28 - 2 - 0.8))
    output.loss.backward()
    assert inputs.logprobs.grad.tolist() == pytest.approx([0, 0, 2, 0])
    assert (output.sums["dual_clip_fraction"], output.sums["dual_clip_fraction/of"]) == (1, 3)

    inputs = _by_ratio([1.0, 1.0], [-1, -1])
    far = inputs.logprobs.detach() + torch.tensor([0.0, 800.0])  # e^800 overflows float64
    inputs = LossInputs(**{**vars(inputs), "logprobs": far.requires_grad_()})
    output = clip_loss(inputs, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(1 + 3)
    assert far.grad.tolist() == pytest.approx([1, 0])


def test_gspo_takes_one_ratio_per_sequence_not_per_pack() -> None:
    # Ratios 2 and 1/2 in one sequence have the geometric mean 1; as two sequences one is clipped and the other is not.
    together = _by_ratio([2.0, 0.5], [1, 1])
    apart = _by_ratio([2.0, 0.5], [1, 1], sequences=torch.tensor([0, 1]))
    assert gspo_loss(together, clip_low=0.2, clip_high=0.2).loss.item() == pytest.approx(-2)
    assert gspo_loss(apart, clip_low=0.2, clip_high=0.2).loss.item() == pytest.approx(-(1.2 + 0.5))


def test_cispo_counts_what_is_cut_on_either_side() -> None:
    inputs = _by_ratio([1.5, 1.5, 0.5, 0.1], [1, -1, 2, -3])
    sums = cispo_loss(inputs, clip_high=0.28, clip_low=0.8).sums
    assert sums == {"clip_fraction": 3, "clip_fraction_low": 1, "clip_fraction_high": 2}
    assert cispo_loss(inputs, clip_high=0.28).sums["clip_fraction_low"] == 0


def test_dppo_leaves_out_what_has_left_its_region_in_the_direction_of_its_advantage() -> None:
    # From 0.1 to 0.3, up and down, 0.05, 0.26 and 0.24; 0.3 is over the cap of twice its old probability.
    inputs = _by_ratio([3.0, 3.0, 0.5, 2.6, 2.4], [1, -1, -1, 1, 1])
    moved = divergence("tv", inputs.logprobs.detach(), inputs.old_logprobs)
    assert moved.tolist() == pytest.approx([0.2, 0.2, 0.05, 0.16, 0.14])
    output = dppo_loss(inputs, divergence_T=moved, clip_low=0.04, clip_high=0.15, cap=2.0)
    output.loss.backward()
    assert inputs.logprobs.grad.tolist() == pytest.approx([0, 2, 0, 0, -2])
    assert output.sums == {
        "clip_fraction": 3,
        "clip_fraction_low": 1,
        "clip_fraction_low/of": 2,
        "clip_fraction_high": 2,
        "clip_fraction_high/of": 3,
    }


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss_equals_numpy_in_value_and_gradient(clip: float | None) -> None:
    draw = np.random.default_rng(9)
    tokens = {name: draw.normal(0, 0.5, 40) for name in ("values", "old", "returns")}
    mask, weights = (draw.random(40) < 0.8).astype(float), draw.uniform(0.01, 0.1, 40)

    def paper(tokens: Arrays) -> float:
        values, old, returns = tokens.values()
        worst = (values - returns) ** 2
        if clip is not None:
            worst = np.maximum(worst, (old + (values - old).clip(-clip, clip) - returns) ** 2)
        return float((0.5 * mask * weights * worst).sum())

    values, old, returns = (torch.from_numpy(column) for column in tokens.values())
    values.requires_grad_()
    output = value_loss(values, old, returns, torch.from_numpy(mask), torch.from_numpy(weights), clip=clip)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(paper(tokens), rel=1e-12)
    np.testing.assert_allclose(values.grad.numpy(), slope(paper, tokens, "values"), rtol=1e-6, atol=1e-9)


def test_value_loss_by_hand() -> None:
    # v = 1 from 0 towards R = 2 counts as 0.2: ½ (0.2 − 2)²; v = 1 away from R = −1 keeps its own error ½ (1 + 1)².
    values = torch.tensor([1.0, 1.0, 9.0], requires_grad=True)
    old, returns, ones = torch.zeros(3), torch.tensor([2.0, -1.0, math.nan]), torch.ones(3)
    output = value_loss(values, old, returns, torch.tensor([1.0, 1.0, 0.0]), ones, clip=0.2)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(0.5 * 1.8**2 + 0.5 * 2**2)
    assert values.grad.tolist() == pytest.approx([0, 2, 0])  # the clipped one does not move
    assert output.sums == pytest.approx({"value_clip_fraction": 1, "value_error": 3, "value_loss": 1.62 + 2})


@pytest.mark.parametrize("name", LOSSES)
def test_what_stands_at_masked_tokens_leaves_no_trace(name: str) -> None:
    clean = arrays(LENGTHS, seed=10)
    wild = {key: values.copy() for key, values in clean.items()}
    masked = clean["mask"] == 0
    for key, value in {"logprobs": -math.inf, "old_logprobs": 900.0, "advantages": math.nan}.items():
        wild[key][masked] = value
    expected, gradient = value_and_gradient(LOSSES[name], clean)
    value, wild_gradient = value_and_gradient(LOSSES[name], wild)
    assert value == expected
    np.testing.assert_array_equal(wild_gradient, gradient)
    assert LOSSES[name](inputs_of(wild)).sums == LOSSES[name](inputs_of(clean)).sums
    value, gradient = value_and_gradient(LOSSES[name], {**clean, "mask": 0 * clean["mask"]})
    assert value == 0 and not gradient.any()
