"""Chunked log-probabilities equal the plain softmax, in value and in gradient, at any chunk and temperature."""

import pytest
import torch

from trainers.logprobs import chunked_logprobs


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 8, generator=draw).requires_grad_()
    output = torch.randn(16, 8, generator=draw).requires_grad_()
    return hidden, output, torch.randint(16, (11,), generator=draw)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
@pytest.mark.parametrize("chunk", [1, 4, 11, 1024])
def test_values_and_gradients_equal_the_plain_softmax(chunk: int, temperature: float) -> None:
    hidden, output, targets = _inputs()
    upstream = torch.linspace(-1, 2, 11)
    log_p = (hidden @ output.T / temperature).log_softmax(-1)
    expected = log_p[torch.arange(11), targets]
    expected_gradients = torch.autograd.grad((expected * upstream).sum(), [hidden, output], retain_graph=True)

    logprobs, entropy = chunked_logprobs(hidden, output, targets, temperature=temperature, chunk=chunk)
    found = torch.autograd.grad((logprobs * upstream).sum(), [hidden, output])
    torch.testing.assert_close(logprobs, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(entropy, -(log_p.exp() * log_p).sum(-1).detach(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found, expected_gradients, atol=1e-5, rtol=1e-5)


def test_a_higher_temperature_is_a_flatter_distribution() -> None:
    hidden, output, targets = _inputs()
    entropies = [chunked_logprobs(hidden, output, targets, temperature=t)[1].mean() for t in (0.5, 1.0, 2.0)]
    assert entropies == sorted(entropies)


def test_bfloat16_inputs_give_float32_logprobs_with_the_softmax_in_float32() -> None:
    hidden, output, targets = _inputs()
    logprobs, entropy = chunked_logprobs(hidden.bfloat16(), output.bfloat16(), targets, temperature=1.0)
    logits = (hidden.bfloat16() @ output.bfloat16().T).float()
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[torch.arange(11), targets])
