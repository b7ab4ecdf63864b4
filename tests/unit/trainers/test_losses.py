"""The clipped loss is the paper's, its gradient too, and neither knows how the batch was cut up."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainers.losses import LossOutput, cispo_loss, clip_loss


def _loss(ratios: list[float], advantages: list[float], mask: list[int] | None = None, **options: object) -> LossOutput:
    """The loss of tokens whose probability changed by `ratios` since they were sampled at probability 0.1."""
    old = torch.full((len(ratios),), math.log(0.1), dtype=torch.float64)
    options = {"denominator": 4.0, "clip_low": 0.2, "clip_high": 0.28, **options}
    return clip_loss(
        old + torch.tensor(ratios, dtype=torch.float64).log(),
        old,
        torch.tensor(advantages, dtype=torch.float64),
        torch.tensor(mask or [1] * len(ratios)),
        **options,
    )


def test_hand_computed_with_asymmetric_clip() -> None:
    # min(1.5, 1.28) + min(−1.5, −1.28) + min(0.5, 0.8) + min(−0.5, −0.8) = 1.28 − 1.5 + 0.5 − 0.8 = −0.52
    output = _loss([1.5, 1.5, 0.5, 0.5], [1, -1, 1, -1])
    assert float(output.loss) == pytest.approx(0.52 / 4)
    assert output.sums["clip_fraction"] == 2  # the first and the last
    assert output.sums["approx_kl"] == pytest.approx(2 * (0.5 - math.log(1.5)) + 2 * (-0.5 - math.log(0.5)))


def test_inside_the_bounds_nothing_is_clipped() -> None:
    output = _loss([1.27, 0.81], [2, -3], denominator=1.0)
    assert float(output.loss) == pytest.approx(-(1.27 * 2 - 0.81 * 3))
    assert output.sums["clip_fraction"] == 0


def test_weights_multiply_each_tokens_share() -> None:
    weights = torch.tensor([2.0, 1.0, 0.5, 0.0], dtype=torch.float64)
    output = _loss([1.5, 1.5, 0.5, 0.5], [1, -1, 1, -1], weights_T=weights)
    assert float(output.loss) == pytest.approx(-(2 * 1.28 - 1.5 + 0.5 * 0.5) / 4)


def test_masked_tokens_count_nowhere_however_wild_they_are() -> None:
    output = _loss([1.1, 1e30, 1e-30], [1, 5, -5], mask=[1, 0, 0], denominator=1.0)
    assert float(output.loss) == pytest.approx(-1.1)
    assert output.sums == pytest.approx(_loss([1.1], [1]).sums)


_TOKENS = st.lists(
    st.tuples(st.floats(-1, 1), st.floats(-3, 3), st.booleans(), st.floats(0, 2)), min_size=1, max_size=20
)


def _tensors(tokens: list[tuple[float, float, bool, float]]) -> dict[str, torch.Tensor]:
    log_ratio, advantage, mask, weight = (list(column) for column in zip(*tokens, strict=True))
    old = torch.linspace(-3, -0.5, len(tokens), dtype=torch.float64)
    return {
        "logprobs_T": old + torch.tensor(log_ratio, dtype=torch.float64),
        "old_logprobs_T": old,
        "advantages_T": torch.tensor(advantage, dtype=torch.float64),
        "mask_T": torch.tensor(mask),
        "weights_T": torch.tensor(weight, dtype=torch.float64),
    }


@given(_TOKENS, st.lists(st.integers(0, 20), max_size=4))
def test_micro_batches_add_up_to_the_batch(tokens: list[tuple[float, float, bool, float]], cuts: list[int]) -> None:
    options = {"denominator": 13.0, "clip_low": 0.2, "clip_high": 0.28}
    whole = _tensors(tokens)
    whole["logprobs_T"].requires_grad_()
    expected = clip_loss(**whole, **options)
    (gradient,) = torch.autograd.grad(expected.loss, whole["logprobs_T"])

    bounds = sorted({0, len(tokens), *(min(cut, len(tokens)) for cut in cuts)})
    parts, part_gradients = [], []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        part = {name: tensor[start:stop].detach() for name, tensor in whole.items()}
        part["logprobs_T"].requires_grad_()
        parts.append(clip_loss(**part, **options))
        part_gradients.append(torch.autograd.grad(parts[-1].loss, part["logprobs_T"])[0])
    assert sum(part.loss.item() for part in parts) == pytest.approx(expected.loss.item(), abs=1e-12)
    assert torch.equal(torch.cat(part_gradients), gradient)
    for key, value in expected.sums.items():
        assert sum(part.sums[key] for part in parts) == pytest.approx(value, abs=1e-12)


def _numpy_loss(logprobs: np.ndarray, tensors: dict[str, torch.Tensor], denominator: float) -> float:
    """The formula of the docstring, token by token."""
    total = 0.0
    for logprob, old, advantage, trained, weight in zip(
        logprobs, *(tensors[name].tolist() for name in tensors if name != "logprobs_T"), strict=True
    ):
        ratio = math.exp(logprob - old)
        clipped = min(max(ratio, 1 - 0.2), 1 + 0.28)
        total += trained * weight * min(ratio * advantage, clipped * advantage)
    return -total / denominator


def test_loss_and_gradient_equal_numpy_and_finite_differences() -> None:
    draw = np.random.default_rng(0)
    tokens = [(float(r), float(a), bool(m), float(w)) for r, a, m, w in draw.normal(0, 0.5, (40, 4))]
    tensors = _tensors(tokens)
    tensors["logprobs_T"].requires_grad_()
    loss = clip_loss(**tensors, denominator=17.0, clip_low=0.2, clip_high=0.28).loss
    loss.backward()
    start = tensors["logprobs_T"].detach().numpy()
    assert loss.item() == pytest.approx(_numpy_loss(start, tensors, 17.0), abs=1e-12)
    for token in range(len(tokens)):
        bump = np.zeros(len(tokens))
        bump[token] = 1e-6
        slope = (_numpy_loss(start + bump, tensors, 17.0) - _numpy_loss(start - bump, tensors, 17.0)) / 2e-6
        assert float(tensors["logprobs_T"].grad[token]) == pytest.approx(slope, abs=1e-8)


def test_a_clipped_token_has_no_gradient_and_an_unclipped_one_has_its_ratio_times_advantage() -> None:
    old = torch.zeros(3, dtype=torch.float64)
    logprobs = torch.tensor([1.5, 1.5, 1.0], dtype=torch.float64).log().requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64)
    clip_loss(logprobs, old, advantages, torch.ones(3), denominator=2.0, clip_low=0.2, clip_high=0.28).loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([0.0, 1.5 / 2, -2.0 / 2])


def _cispo(ratios: list[float], advantages: list[float], **options: object) -> tuple[LossOutput, torch.Tensor]:
    """CISPO's loss and its gradient by the log-probabilities, for tokens sampled at probability 0.1."""
    old = torch.full((len(ratios),), math.log(0.1), dtype=torch.float64)
    logprobs = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    mask = torch.ones(len(ratios))
    output = cispo_loss(
        logprobs,
        old,
        torch.tensor(advantages, dtype=torch.float64),
        **{"mask_T": mask, "denominator": 4.0, "clip_high": 0.28, **options},
    )
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    return dataclasses.replace(output, loss=output.loss.detach()), gradient


def test_cispo_weighs_log_probabilities_by_a_ratio_that_is_clipped_above_only() -> None:
    # Weights 1.28 (clipped), 1.28 (clipped), 0.5 and 0.1: there is no lower bound.
    ratios, weights, advantages = [1.5, 1.5, 0.5, 0.1], [1.28, 1.28, 0.5, 0.1], [1.0, -1.0, 2.0, -3.0]
    output, gradient = _cispo(ratios, advantages)
    terms = [w * a * math.log(0.1 * r) for w, a, r in zip(weights, advantages, ratios, strict=True)]
    assert float(output.loss) == pytest.approx(-sum(terms) / 4)
    assert output.sums["clip_fraction"] == 2
    assert output.sums["approx_kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios))
    # The gradient is −w A / denominator: the ratio itself is not differentiated, and a clipped token keeps its own.
    assert gradient.tolist() == pytest.approx([-w * a / 4 for w, a in zip(weights, advantages, strict=True)])


def test_cispo_and_the_clipped_loss_have_one_gradient_until_something_is_clipped() -> None:
    ratios, advantages = [1.27, 0.81, 1.0], [2.0, -3.0, 0.5]
    _, cispo = _cispo(ratios, advantages)
    old = torch.full((3,), math.log(0.1), dtype=torch.float64)
    logprobs = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    options = {"denominator": 4.0, "clip_low": 0.2, "clip_high": 0.28}
    clip_loss(logprobs, old, torch.tensor(advantages, dtype=torch.float64), torch.ones(3), **options).loss.backward()
    assert cispo.tolist() == pytest.approx(logprobs.grad.tolist(), abs=1e-15)


def test_cispo_leaves_out_masked_tokens_and_multiplies_by_weights() -> None:
    mask, weights = torch.tensor([1, 0, 1]), torch.tensor([2.0, 1.0, 0.5], dtype=torch.float64)
    output, gradient = _cispo([1.1, 1e30, 0.9], [1.0, 5.0, -2.0], mask_T=mask, weights_T=weights, denominator=1.0)
    expected = 2 * 1.1 * math.log(0.11) - 0.5 * 0.9 * 2 * math.log(0.09)
    assert float(output.loss) == pytest.approx(-expected)
    assert gradient.tolist() == pytest.approx([-2.2, 0.0, 0.9])
    assert output.sums["clip_fraction"] == 0
