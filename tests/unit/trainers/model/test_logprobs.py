"""Sliced log-probabilities and entropy equal the plain softmax, in value and in gradient, at any slicing."""

import functools
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from trainers.model import logprobs as logprobs_module
from trainers.model.logprobs import _compiled, _logits, linear_logprobs

_ALL_AT_ONCE = 2**40


def _inputs(
    num_tokens: int = 11, width: int = 8, vocabulary: int = 150, *, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, width, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    output = torch.randn(vocabulary, width, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, output, torch.randint(vocabulary, (num_tokens,), generator=draw)


def _by_hand(
    hidden: torch.Tensor, output: torch.Tensor, targets: torch.Tensor, a: np.ndarray, b: np.ndarray, temperature: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Log p, H, and the gradients of Σ a log p + b H, in numpy: d log p / dz = 1[y] − p, dH / dz = −p (log p + H)."""
    h, w, y = hidden.detach().double().numpy(), output.detach().double().numpy(), targets.numpy()
    logits = h @ w.T / temperature
    shifted = logits - logits.max(1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    p = np.exp(log_p)
    entropy = -(p * log_p).sum(1)
    one_hot = np.eye(len(w))[y]
    by_logits = (a[:, None] * (one_hot - p) - b[:, None] * p * (log_p + entropy[:, None])) / temperature
    return log_p[np.arange(len(y)), y], entropy, by_logits @ w, by_logits.T @ h


@given(
    st.integers(1, 20),
    st.integers(2, 300),
    st.integers(1, 60_000) | st.just(_ALL_AT_ONCE),
    st.floats(0.3, 3.0),
    st.booleans(),
    st.sampled_from(["both", "hidden", "output"]),
)
@settings(max_examples=80)
def test_values_and_gradients_are_those_of_the_formulas_at_any_slicing(
    num_tokens: int, vocabulary: int, tile_bytes: int, temperature: float, entropy_grad: bool, trained: str
) -> None:
    hidden, output, targets = _inputs(num_tokens, 4, vocabulary)
    a, b = np.linspace(-1, 2, num_tokens), np.linspace(0.5, -0.7, num_tokens) * entropy_grad
    expected = _by_hand(hidden, output, targets, a, b, temperature)
    for name, matrix in (("hidden", hidden), ("output", output)):
        matrix.requires_grad_(trained in ("both", name))
    options = {"temperature": temperature, "entropy_grad": entropy_grad, "tile_bytes": tile_bytes}
    logprobs, entropy = linear_logprobs(hidden, output, targets, **options)
    loss = (torch.from_numpy(a) * logprobs).sum()
    if entropy_grad:
        loss = loss + (torch.from_numpy(b) * entropy).sum()
    assert entropy.requires_grad == entropy_grad
    loss.backward()
    found = logprobs.detach(), entropy.detach(), hidden.grad, output.grad
    for name, mine, theirs in zip(("", "", "hidden", "output"), found, expected, strict=True):
        if name in ("", trained) or trained == "both":
            np.testing.assert_allclose(mine.numpy(), theirs, rtol=1e-8, atol=1e-10)
        else:
            assert mine is None, "a frozen matrix has no gradient"


@pytest.mark.parametrize(("tile_bytes", "num_products"), [(2 * 11 * 150 * 8, 2), (2 * 11 * 150 * 8 - 1, 4)])
def test_where_half_of_the_memory_holds_all_logits_they_are_computed_once(
    tile_bytes: int, num_products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, output, targets = _inputs()
    expected = linear_logprobs(hidden, output, targets, temperature=0.9)[0]
    monkeypatch.setattr(logprobs_module, "_KEEP_BYTES", 0)
    products = []

    def counted(*arguments: Any) -> torch.Tensor:
        *_, start, width = arguments
        products.append(min(width, 150 - start))
        return _logits(*arguments)

    monkeypatch.setattr(logprobs_module, "_logits", counted)
    found = linear_logprobs(hidden, output, targets, temperature=0.9, tile_bytes=tile_bytes)[0]
    gradients = [torch.autograd.grad((logprobs**2).sum(), [hidden, output]) for logprobs in (found, expected)]
    for one, other in zip((found, *gradients[0]), (expected, *gradients[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
    assert products == [128, 22] * (num_products // 2)


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_beside_its_logits_a_slice_has_few_tensors_in_float32_at_a_time(
    dtype: torch.dtype, entropy_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs_module, "_KEEP_BYTES", 0)
    hidden, output, targets = _inputs(dtype=dtype)
    of_all, most = 11 * 150 * 4, {}

    def measured(step: Any) -> Any:
        def call(*arguments: Any) -> Any:
            with _Held() as held:
                result = step(*arguments)
            most[step.__name__] = held.most // of_all
            return result

        return call

    for name in ("_fold_slice", "_turn_into_gradient"):
        monkeypatch.setattr(logprobs_module, name, measured(getattr(logprobs_module, name)))
    logprobs, entropy = linear_logprobs(
        hidden, output, targets, temperature=0.9, entropy_grad=entropy_grad, tile_bytes=_ALL_AT_ONCE
    )
    (logprobs.sum() + entropy.sum() if entropy_grad else logprobs.sum()).backward()
    # The shifted logits and their exponentials; the gradient takes the place of both.
    assert most == {"_fold_slice": 2, "_turn_into_gradient": 1 + entropy_grad}


class _Held(TorchDispatchMode):
    """Counts the bytes of large new tensors that are there at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        result = function(*arguments, **(named or {}))
        is_new = isinstance(result, torch.Tensor) and not any(result is each for each in arguments)
        if is_new and result.numel() == 11 * 150 and result.dtype == torch.float32:
            self._alive[id(result)] = result
            self.most = max(self.most, sum(each.nbytes for each in self._alive.values()))
        return result


@pytest.mark.parametrize("tile_bytes", [2**29, 1])
@pytest.mark.parametrize(
    "form", [{"scale": 0.3}, {"cap": 2.0}, {"bias": True}, {"scale": 3.0, "cap": 5.0, "bias": True}], ids=str
)
def test_scaled_capped_and_biased_logits_are_those_of_the_formula(
    form: dict[str, Any], tile_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs_module, "_KEEP_BYTES", 0 if tile_bytes == 1 else 2**25)
    hidden, output, targets = _inputs()
    bias = torch.linspace(-1, 1, len(output), dtype=torch.float64).requires_grad_() if form.pop("bias", False) else None
    logits = hidden @ output.T if bias is None else hidden @ output.T + bias
    logits, cap = form.get("scale", 1.0) * logits, form.get("cap")
    log_p = ((logits if cap is None else cap * (logits / cap).tanh()) / 0.7).log_softmax(-1)
    expected = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)
    options: dict[str, Any] = {"temperature": 0.7, "bias_V": bias, "tile_bytes": tile_bytes, "entropy_grad": True}
    found = linear_logprobs(hidden, output, targets, **options, **form)
    by = [hidden, output, *([] if bias is None else [bias])]
    gradients = [torch.autograd.grad((one**2).sum() + other.sum(), by) for one, other in (found, expected)]
    for mine, theirs in zip((*found, *gradients[0]), (*expected, *gradients[1]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)


def test_logits_of_a_thousand_neither_overflow_nor_lose_the_target() -> None:
    hidden, output, targets = _inputs(dtype=torch.float32)
    big = hidden.detach() * 300
    found = linear_logprobs(big, output, targets, temperature=1.0, tile_bytes=1)
    expected = linear_logprobs(big.double(), output.double(), targets, temperature=1.0)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("tile_bytes", [1, _ALL_AT_ONCE])
def test_bfloat16_matrices_have_their_softmax_and_its_gradient_in_float32(tile_bytes: int) -> None:
    hidden, output, targets = _inputs(64, 32, 400, dtype=torch.bfloat16)
    logprobs, entropy = linear_logprobs(hidden, output, targets, temperature=1.0, tile_bytes=tile_bytes)
    assert logprobs.dtype == entropy.dtype == torch.float32
    a = np.linspace(-1, 2, 64)
    expected = _by_hand(hidden, output, targets, a, a * 0, 1.0)
    # bfloat16 holds 8 bits: of a logit of 20, that is 0.06.
    np.testing.assert_allclose(logprobs.detach().numpy(), expected[0], atol=0.15)
    found = torch.autograd.grad((logprobs * torch.from_numpy(a).float()).sum(), [hidden, output])
    for mine, theirs in zip(found, expected[2:], strict=True):
        assert mine.dtype == torch.bfloat16
        assert np.linalg.norm(mine.double().numpy() - theirs) < 0.02 * np.linalg.norm(theirs)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_without_probabilities_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        linear_logprobs(*_inputs(), temperature=temperature)


def test_compiled_equals_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # no C++ compiler
    _compiled.cache_clear()
    hidden, output, targets = _inputs()
    results = []
    for compile in (False, True):
        options = {"temperature": 0.9, "entropy_grad": True, "tile_bytes": 1, "compile": compile}
        logprobs, entropy = linear_logprobs(hidden, output, targets, **options)
        results.append((logprobs, entropy, *torch.autograd.grad((logprobs * 2 - entropy).sum(), [hidden, output])))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    _compiled.cache_clear()
