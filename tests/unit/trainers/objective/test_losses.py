"""Each loss is its paper's, value and gradient, against numpy written from the formula; and masks leave no trace."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.unit.trainers.loss_tokens import Arrays, arrays, inputs_of, slope, value_and_gradient
from trainers.objective.losses import (
    LossInputs,
    LossOutput,
    cispo_loss,
    clip_loss,
    gspo_loss,
    sapo_loss,
    sft_loss,
    value_loss,
)

LENGTHS = [7, 1, 12, 5, 20]
EXACT = {"rtol": 1e-9, "atol": 1e-13}
DIFFERENCES = {"rtol": 1e-6, "atol": 1e-9}


def _tokens(tokens: Arrays) -> list[tuple[float, float, float, float]]:
    """(log π, log π_old, A, weight · importance) of the trained tokens."""
    factor = tokens["weights"] * tokens["importance"]
    columns = (tokens["logprobs"], tokens["old_logprobs"], tokens["advantages"], factor)
    return [row for row, mask in zip(zip(*columns, strict=True), tokens["mask"], strict=True) if mask]


def _on_trained(tokens: Arrays, values: list[float]) -> np.ndarray:
    everywhere = np.zeros(len(tokens["mask"]))
    everywhere[tokens["mask"] > 0] = values
    return everywhere


# PPO's clip, https://arxiv.org/abs/1707.06347 eq. 7, with bounds of DAPO and the dual clip of 1912.09729


def _numpy_clip(tokens: Arrays, low: float, high: float, dual: float | None) -> float:
    total = 0.0
    for logprob, old, advantage, factor in _tokens(tokens):
        ratio = math.exp(logprob - old)
        surrogate = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
        if dual is not None and advantage < 0:
            surrogate = max(surrogate, dual * advantage)
        total -= factor * surrogate
    return total


def _numpy_clip_gradient(tokens: Arrays, low: float, high: float, dual: float | None) -> np.ndarray:
    slopes = []
    for logprob, old, advantage, factor in _tokens(tokens):
        ratio = math.exp(logprob - old)
        is_flat = ratio > 1 + high if advantage > 0 else ratio < 1 - low or (dual is not None and ratio > dual)
        slopes.append(0.0 if is_flat else -factor * advantage * ratio)
    return _on_trained(tokens, slopes)


@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_clip_loss_equals_numpy_in_value_and_gradient(dual_clip: float | None) -> None:
    tokens = arrays(LENGTHS, seed=1, spread=0.6)
    value, gradient = value_and_gradient(
        lambda inputs: clip_loss(inputs, clip_low=0.2, clip_high=0.28, dual_clip=dual_clip), tokens
    )
    assert value == pytest.approx(_numpy_clip(tokens, 0.2, 0.28, dual_clip), rel=1e-12)
    np.testing.assert_allclose(gradient, _numpy_clip_gradient(tokens, 0.2, 0.28, dual_clip), **EXACT)
    np.testing.assert_allclose(gradient, slope(lambda t: _numpy_clip(t, 0.2, 0.28, dual_clip), tokens), **DIFFERENCES)


def _by_ratio(ratios: list[float], advantages: list[float], **changes: object) -> LossInputs:
    """Tokens of weight 1 whose probability changed by `ratios` since they were sampled at probability 0.1."""
    count, old = len(ratios), math.log(0.1)
    ones = np.ones(count)
    tokens = {
        "logprobs": old + np.log(ratios),
        "old_logprobs": old * ones,
        "sampled_logprobs": old * ones,
        "advantages": np.array(advantages, dtype=np.float64),
        "mask": ones,
        "weights": ones,
        "importance": ones,
        "sequences": np.zeros(count, dtype=np.int64),
        "entropy": ones,
    }
    return inputs_of(tokens, **changes)


def test_clip_is_asymmetric_and_counts_by_the_sign_of_the_advantage() -> None:
    # min(1.5, 1.28) + min(−1.5, −1.28) + min(0.5, 0.8) + min(−0.5, −0.8) + 1.27 = 1.28 − 1.5 + 0.5 − 0.8 + 1.27
    output = clip_loss(_by_ratio([1.5, 1.5, 0.5, 0.5, 1.27], [1, -1, 1, -1, 1]), clip_low=0.2, clip_high=0.28)
    assert output.loss.item() == pytest.approx(-0.75)
    assert output.sums == {
        "clip_fraction": 2,  # the first and the fourth
        "clip_fraction_low": 1,
        "clip_fraction_low/of": 2,
        "clip_fraction_high": 1,
        "clip_fraction_high/of": 3,
    }


def test_dual_clip_bounds_the_loss_of_negative_advantages_alone() -> None:
    inputs = _by_ratio([10.0, 10.0, 2.0, 0.5], [-1, 1, -1, -1])
    output = clip_loss(inputs, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    # max(−10, −3) + 1.28 − 2 + min(−0.5, −0.8)
    assert output.loss.item() == pytest.approx(-(-3 + 1.28 - 2 - 0.8))
    output.loss.backward()
    assert inputs.logprobs.grad.tolist() == pytest.approx([0, 0, 2, 0])
    assert output.sums["dual_clip_fraction"] == 1
    assert output.sums["dual_clip_fraction/of"] == 3


def test_a_ratio_beyond_floating_point_is_cut_by_the_dual_clip_without_nan() -> None:
    inputs = _by_ratio([1.0, 1.0], [-1, -1])
    far = inputs.logprobs.detach() + torch.tensor([0.0, 800.0])  # e^800 overflows float64
    inputs = LossInputs(**{**vars(inputs), "logprobs": far.requires_grad_()})
    output = clip_loss(inputs, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(1 + 3)
    assert far.grad.tolist() == pytest.approx([1, 0])


# GSPO, https://arxiv.org/abs/2507.18071: the objective of whole sequences, eq. 5, and GSPO-token


def _sequences(tokens: Arrays) -> list[np.ndarray]:
    """The trained tokens of each sequence."""
    rows = [np.flatnonzero((tokens["sequences"] == s) & (tokens["mask"] > 0)) for s in set(tokens["sequences"])]
    return [row for row in rows if len(row)]


def _sequence_ratio(tokens: Arrays, row: np.ndarray) -> float:
    return math.exp(float(np.mean(tokens["logprobs"][row] - tokens["old_logprobs"][row])))


def _numpy_gspo(tokens: Arrays, low: float, high: float, *, by_sequence_mean: bool) -> float:
    """Each sequence once, weighed by the sum or mean of what its tokens weigh times their number."""
    total = 0.0
    for row in _sequences(tokens):
        ratio = _sequence_ratio(tokens, row)
        advantage = tokens["advantages"][row[0]]
        weight = tokens["weights"][row[0]] * tokens["importance"][row[0]] * (len(row) if by_sequence_mean else 1)
        total -= weight * min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    return total


def test_gspo_is_the_papers_sequence_objective_in_value_and_gradient() -> None:
    tokens = arrays(LENGTHS, seed=2, token_level=False)
    # sequence_mean: 1 / (|o_i| N), where N includes the sequence of which nothing is trained
    counts = np.array([max(1.0, tokens["mask"][tokens["sequences"] == s].sum()) for s in range(len(LENGTHS))])
    tokens["weights"] = 1 / (counts[tokens["sequences"]] * len(LENGTHS))
    tokens["importance"] = np.ones(len(tokens["mask"]))
    low, high = 0.05, 0.1

    def paper(tokens: Arrays) -> float:
        terms = []
        for row in _sequences(tokens):
            ratio, advantage = _sequence_ratio(tokens, row), tokens["advantages"][row[0]]
            terms.append(min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage))
        return -sum(terms) / len(LENGTHS)

    value, gradient = value_and_gradient(lambda inputs: gspo_loss(inputs, clip_low=low, clip_high=high), tokens)
    assert value == pytest.approx(paper(tokens), rel=1e-12)
    np.testing.assert_allclose(gradient, slope(paper, tokens), **DIFFERENCES)
    assert 0 < np.count_nonzero(gradient) < tokens["mask"].sum()  # some sequences are clipped, some are not


def test_gspo_under_any_weights_of_the_sequence_is_the_objective_weighed_by_length() -> None:
    tokens = arrays(LENGTHS, seed=3, token_level=False)

    def paper(tokens: Arrays) -> float:
        return _numpy_gspo(tokens, 0.05, 0.1, by_sequence_mean=True)

    value, gradient = value_and_gradient(lambda inputs: gspo_loss(inputs, clip_low=0.05, clip_high=0.1), tokens)
    assert value == pytest.approx(paper(tokens), rel=1e-12)
    np.testing.assert_allclose(gradient, slope(paper, tokens), **DIFFERENCES)


def test_gspo_with_advantages_by_token_gives_each_token_its_own_gradient() -> None:
    tokens = arrays(LENGTHS, seed=4, token_level=True)
    expected, total = np.zeros(sum(LENGTHS)), 0.0
    for row in _sequences(tokens):
        ratio = _sequence_ratio(tokens, row)
        for t in row:
            advantage, factor = tokens["advantages"][t], tokens["weights"][t] * tokens["importance"][t]
            is_flat = ratio > 1.1 if advantage > 0 else ratio < 0.95
            expected[t] = 0.0 if is_flat else -factor * advantage * ratio
            total -= factor * min(ratio * advantage, min(max(ratio, 0.95), 1.1) * advantage)
    value, gradient = value_and_gradient(lambda inputs: gspo_loss(inputs, clip_low=0.05, clip_high=0.1), tokens)
    assert value == pytest.approx(total, rel=1e-12)
    np.testing.assert_allclose(gradient, expected, **EXACT)


def test_gspo_takes_one_ratio_per_sequence_not_per_pack() -> None:
    # Ratios 2 and 1/2 in one sequence have the geometric mean 1; as two sequences one is clipped and the other is not.
    together = _by_ratio([2.0, 0.5], [1, 1])
    apart = _by_ratio([2.0, 0.5], [1, 1], sequences=torch.tensor([0, 1]))
    assert gspo_loss(together, clip_low=0.2, clip_high=0.2).loss.item() == pytest.approx(-2)
    assert gspo_loss(apart, clip_low=0.2, clip_high=0.2).loss.item() == pytest.approx(-(1.2 + 0.5))


# CISPO, https://arxiv.org/abs/2506.13585 eq. 4 and 5


@pytest.mark.parametrize("clip_low", [None, 0.3])
def test_cispo_equals_numpy_in_value_and_gradient(clip_low: float | None) -> None:
    tokens = arrays(LENGTHS, seed=5)
    low = 0.0 if clip_low is None else 1 - clip_low
    kept = [min(max(math.exp(logprob - old), low), 1.28) for logprob, old, _, _ in _tokens(tokens)]
    terms = [(w, a * f, logprob) for w, (logprob, _, a, f) in zip(kept, _tokens(tokens), strict=True)]
    value, gradient = value_and_gradient(lambda inputs: cispo_loss(inputs, clip_high=0.28, clip_low=clip_low), tokens)
    assert value == pytest.approx(-sum(w * af * logprob for w, af, logprob in terms), rel=1e-12)
    np.testing.assert_allclose(gradient, _on_trained(tokens, [-w * af for w, af, _ in terms]), **EXACT)
    assert np.all(gradient[tokens["mask"] > 0] != 0)  # a clipped token keeps a gradient


def test_cispo_counts_what_is_cut_on_either_side() -> None:
    inputs = _by_ratio([1.5, 1.5, 0.5, 0.1], [1, -1, 2, -3])
    sums = cispo_loss(inputs, clip_high=0.28, clip_low=0.8).sums
    assert sums == {"clip_fraction": 3, "clip_fraction_low": 1, "clip_fraction_high": 2}
    assert cispo_loss(inputs, clip_high=0.28).sums["clip_fraction_low"] == 0


def test_cispo_and_clip_have_one_gradient_until_something_is_clipped() -> None:
    tokens = arrays(LENGTHS, seed=6, spread=0.02)
    _, cispo = value_and_gradient(lambda inputs: cispo_loss(inputs, clip_high=0.28), tokens)
    _, clip = value_and_gradient(lambda inputs: clip_loss(inputs, clip_low=0.2, clip_high=0.28), tokens)
    np.testing.assert_allclose(cispo, clip, **EXACT)


# SAPO, https://arxiv.org/abs/2511.20347


def _numpy_sapo(tokens: Arrays) -> float:
    total = 0.0
    for logprob, old, advantage, factor in _tokens(tokens):
        tau = 1.0 if advantage > 0 else 1.05
        total -= factor * advantage * 4 / tau / (1 + math.exp(-tau * (math.exp(logprob - old) - 1)))
    return total


def test_sapo_equals_numpy_in_value_and_gradient() -> None:
    tokens = arrays(LENGTHS, seed=7)
    slopes = []
    for logprob, old, advantage, factor in _tokens(tokens):
        ratio, tau = math.exp(logprob - old), 1.0 if advantage > 0 else 1.05
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        slopes.append(-factor * advantage * 4 * gate * (1 - gate) * ratio)
    value, gradient = value_and_gradient(lambda inputs: sapo_loss(inputs, tau_positive=1.0, tau_negative=1.05), tokens)
    assert value == pytest.approx(_numpy_sapo(tokens), rel=1e-12)
    np.testing.assert_allclose(gradient, _on_trained(tokens, slopes), **EXACT)
    np.testing.assert_allclose(gradient, slope(_numpy_sapo, tokens), **DIFFERENCES)


def test_sapo_on_policy_has_the_gradient_of_the_policy_itself() -> None:
    inputs = _by_ratio([1.0, 1.0], [2.0, -3.0])
    sapo_loss(inputs, tau_positive=1.0, tau_negative=5.0).loss.backward()
    assert inputs.logprobs.grad.tolist() == pytest.approx([-2.0, 3.0])


# The rest


def test_sft_is_the_negative_log_likelihood_of_trained_tokens() -> None:
    tokens = arrays(LENGTHS, seed=8)
    factor = tokens["weights"] * tokens["importance"] * tokens["mask"]
    value, gradient = value_and_gradient(sft_loss, tokens)
    assert value == pytest.approx(-float((factor * tokens["logprobs"]).sum()), rel=1e-12)
    np.testing.assert_allclose(gradient, -factor, **EXACT)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss_equals_numpy_in_value_and_gradient(clip: float | None) -> None:
    draw = np.random.default_rng(9)
    tokens = {name: draw.normal(0, 0.5, 40) for name in ("values", "old", "returns")}
    mask, weights = (draw.random(40) < 0.8).astype(float), draw.uniform(0.01, 0.1, 40)

    def paper(tokens: Arrays) -> float:
        total = 0.0
        for value, old, target, m, w in zip(*tokens.values(), mask, weights, strict=True):
            worst = (value - target) ** 2
            if clip is not None:
                worst = max(worst, (old + min(max(value - old, -clip), clip) - target) ** 2)
            total += 0.5 * m * w * worst
        return total

    values, old, returns = (torch.from_numpy(column) for column in tokens.values())
    values.requires_grad_()
    output = value_loss(values, old, returns, torch.from_numpy(mask), torch.from_numpy(weights), clip=clip)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(paper(tokens), rel=1e-12)
    np.testing.assert_allclose(values.grad.numpy(), slope(paper, tokens, "values"), **DIFFERENCES)


def test_value_loss_by_hand() -> None:
    # v = 1 from 0 towards R = 2 counts as 0.2: ½ (0.2 − 2)²; v = 1 away from R = −1 keeps its own error ½ (1 + 1)².
    values = torch.tensor([1.0, 1.0, 9.0], requires_grad=True)
    old, returns, ones = torch.zeros(3), torch.tensor([2.0, -1.0, math.nan]), torch.ones(3)
    output = value_loss(values, old, returns, torch.tensor([1.0, 1.0, 0.0]), ones, clip=0.2)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(0.5 * 1.8**2 + 0.5 * 2**2)
    assert values.grad.tolist() == pytest.approx([0, 2, 0])  # the clipped one does not move
    assert output.sums == pytest.approx({"value_clip_fraction": 1, "value_error": 3, "value_loss": 1.62 + 2})


LOSSES: dict[str, Callable[[LossInputs], LossOutput]] = {
    "clip": lambda inputs: clip_loss(inputs, clip_low=0.2, clip_high=0.28),
    "dual clip": lambda inputs: clip_loss(inputs, clip_low=0.2, clip_high=0.28, dual_clip=2.0),
    "gspo": lambda inputs: gspo_loss(inputs, clip_low=0.02, clip_high=0.03),
    "cispo": lambda inputs: cispo_loss(inputs, clip_high=0.28, clip_low=0.5),
    "sapo": lambda inputs: sapo_loss(inputs, tau_positive=1.0, tau_negative=1.05),
    "sft": sft_loss,
}


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


@pytest.mark.parametrize("name", LOSSES)
def test_a_pack_with_everything_masked_has_a_zero_gradient(name: str) -> None:
    tokens = arrays([3, 2], seed=11)
    tokens["mask"] = np.zeros(5)
    value, gradient = value_and_gradient(LOSSES[name], tokens)
    assert value == 0
    assert not gradient.any()
