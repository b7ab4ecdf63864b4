"""The three estimators: their values, and over a whole distribution their means and the gradients of those."""

import functools
import itertools
import math
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainers.objective.divergence import kl_estimate


def _estimate(difference: list[float], estimator: str, clamp: float | None = None) -> list[float]:
    logprobs = torch.tensor(difference, dtype=torch.float64)
    zeros = torch.zeros_like(logprobs)
    return kl_estimate(logprobs, zeros, zeros + 1, estimator=estimator, clamp=clamp).tolist()


def test_estimates_by_hand() -> None:
    # A token twice as likely as under the reference, and one half as likely.
    log2 = math.log(2)
    assert _estimate([log2, -log2], "k1") == pytest.approx([log2, -log2])
    assert _estimate([log2, -log2], "k2") == pytest.approx([log2**2 / 2] * 2)
    assert _estimate([log2, -log2], "k3") == pytest.approx([0.5 - 1 + log2, 2 - 1 - log2])


def test_clamp_bounds_each_token_on_both_sides_and_takes_its_gradient() -> None:
    assert _estimate([0.5, -9.0, 9.0], "k1", clamp=3) == pytest.approx([0.5, -3, 3])
    assert _estimate([0.5, 9.0], "k2", clamp=3) == pytest.approx([0.125, 3])
    logprobs = torch.tensor([0.5, -9.0, -1000.0, 1000.0], requires_grad=True)
    estimate = kl_estimate(logprobs, torch.zeros(4), torch.ones(4), estimator="k3", clamp=10)
    estimate.sum().backward()
    assert estimate.tolist() == pytest.approx([math.exp(-0.5) - 0.5, 10, 10, 10])
    assert logprobs.grad.tolist() == pytest.approx([1 - math.exp(-0.5), 0, 0, 0])


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=20), st.floats(-1e-7, 1e-7))
def test_k2_and_k3_are_never_negative_and_k3_keeps_its_digits(differences: list[float], small: float) -> None:
    assert min(_estimate(differences, "k2")) >= 0 and min(_estimate(differences, "k3")) >= 0
    # exp(−d) − 1 + d would be rounding: its terms are 1e14 times the result.
    assert _estimate([small], "k3")[0] == pytest.approx(small**2 / 2, rel=1e-6, abs=1e-21)


def test_masked_tokens_are_zero_and_without_gradient() -> None:
    logprobs = torch.tensor([-1.0, -math.inf, -1.0], requires_grad=True)
    reference = torch.tensor([-1.5, 0.0, math.nan])
    estimate = kl_estimate(logprobs, reference, torch.tensor([1.0, 0, 0]), estimator="k3")
    estimate.sum().backward()
    assert estimate.tolist()[1:] == [0, 0]
    assert logprobs.grad.tolist()[1:] == [0, 0]


def _distributions() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of a policy over 7 tokens, log-probabilities of a reference, and of another policy that sampled."""
    draw = np.random.default_rng(0)
    logits, *others = (torch.from_numpy(draw.normal(0, 1, 7)) for _ in range(3))
    return logits.requires_grad_(), *(other.log_softmax(0) for other in others)


def _mean(
    estimator: str, *, sampler: str, weighed: bool, gradient: Literal["estimator", "k2"] = "estimator"
) -> tuple[float, torch.Tensor]:
    """The exact mean of the estimate over the sampled token, and of its gradient by the logits."""
    logits, reference, other = _distributions()
    logprobs = logits.log_softmax(0)
    old = logprobs.detach() if sampler == "policy" else other
    ratio = (logprobs - old).exp() if weighed else None
    estimate = kl_estimate(logprobs, reference, torch.ones(7), estimator=estimator, ratio_T=ratio, gradient=gradient)
    mean = (old.exp() * estimate).sum()  # the sampling distribution is not differentiated, as in training
    return mean.item(), torch.autograd.grad(mean, logits)[0]


def test_means_and_gradients_over_a_distribution() -> None:
    """https://arxiv.org/abs/2506.09477"""
    logits, reference, _ = _distributions()
    logprobs = logits.log_softmax(0)
    divergence = (logprobs.exp() * (logprobs - reference)).sum()
    reverse = (reference.exp() * (reference - logprobs)).sum()
    (slope,), (reverse_slope,) = (torch.autograd.grad(kl, logits, retain_graph=True) for kl in (divergence, reverse))
    close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-14)
    # As a term of the loss each estimator follows another gradient.
    for estimator, gradient in (("k1", torch.zeros_like(slope)), ("k2", slope), ("k3", reverse_slope)):
        mean, found = _mean(estimator, sampler="policy", weighed=False)
        close(found, gradient)
        assert estimator == "k2" or mean == pytest.approx(divergence.item(), rel=1e-12)
    # Times the ratio, value and gradient are right on and off policy.
    for estimator, sampler in itertools.product(("k1", "k3"), ("policy", "another")):
        mean, found = _mean(estimator, sampler=sampler, weighed=True)
        assert mean == pytest.approx(divergence.item(), rel=1e-12)
        close(found, slope)
        # So they are with the gradient of k2, which alone is right on policy without the ratio.
        mean, found = _mean(estimator, sampler=sampler, weighed=sampler == "another", gradient="k2")
        assert mean == pytest.approx(divergence.item(), rel=1e-12)
        close(found, slope)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_gradient_of_k2_under_another_value_is_verls_and_openrlhfs(estimator: str) -> None:
    """`kl_penalty` of verl 0.9.1's core_algos.py with `k3+`; `compute_approx_kl` of OpenRLHF 0.11.2 with
    `unbiased_gradient`, whose importance weight is cut at 10: no clamp cuts the gradient, and the value is exact."""
    logprobs = torch.tensor([-1.0, -2.0, -9.0, -0.1], dtype=torch.float64, requires_grad=True)
    reference, old = torch.tensor([-1.5, -1.0, -0.5, -8.0]).double(), torch.tensor([-1.2, -2.5, -9.0, -0.3]).double()
    d, ones = (logprobs - reference).detach(), torch.ones(4)
    for clamp, ratio in ((None, None), (3.0, None), (None, (logprobs - old).exp())):
        options = {"estimator": estimator, "clamp": clamp, "ratio_T": ratio}
        found = kl_estimate(logprobs, reference, ones, **options, gradient="k2")
        assert torch.equal(found, kl_estimate(logprobs, reference, ones, **options))
        (slope,) = torch.autograd.grad(found.sum(), logprobs)
        torch.testing.assert_close(slope, d if ratio is None else d * ratio.detach())
