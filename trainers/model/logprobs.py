"""Log-probability of given tokens, and the entropy, without ever holding a batch's logits.

In: hidden states, the output matrix, target ids. Out: log p(target) and the entropy, per token.

The vocabulary is cut into slices. The forward pass folds each slice's logits into running sums (an online softmax);
the backward pass computes them once more, unless there is room to keep them, turns them into their own gradient and
multiplies that away:

    logits of a slice ─▶ softmax − one-hot ─┬─▶ · output matrix    added to the hidden states' gradient
                                            └─▶ · hidden states    written once: these rows of the matrix's gradient

Slices of the vocabulary rather than of the tokens, because then no row of the large gradient is touched twice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from settings.errors import InvalidInput

TILE_BYTES = 512 * 2**20
"""Default bound on the temporaries of one slice: its logits and what is computed from them."""
_KEEP_BYTES = 32 * 2**20
"""Logits up to this size are kept for the backward pass: recomputing them would only cost time."""
_NARROWEST = 128
"""Least width of a slice."""


def linear_logprobs(
    hidden_TD: torch.Tensor,
    output_VD: torch.Tensor,
    targets_T: torch.Tensor,
    *,
    temperature: float,
    bias_V: torch.Tensor | None = None,
    scale: float = 1.0,
    cap: float | None = None,
    entropy_grad: bool = False,
    tile_bytes: int = TILE_BYTES,
    compile: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log p(target), entropy in nats), each of shape [T], of softmax(logits / temperature), where logits are
    scale · (hidden · outputᵀ + bias), under a `cap` cap · tanh(logits / cap).

    Float32, or float64 for float64 inputs; the softmax is taken in that type whatever type the matrices have.
    `temperature` must be the one the tokens were sampled at: the engine's logprobs are taken after it. The entropy has
    a gradient only with `entropy_grad`. `tile_bytes` bounds temporary memory beside the two gradients: if all logits
    fit into half of it they are kept for the backward pass. `compile` fuses what is done to a slice's logits.

    Raises `ValueError` for a temperature that is not positive: a greedy reply has no probabilities to train on.
    """
    if not temperature > 0:
        raise InvalidInput(f"temperature {temperature}: log-probabilities need one above 0")
    num_tokens, vocabulary = len(hidden_TD), len(output_VD)
    form = _Form(temperature / scale, None if cap is None else cap / temperature)
    if num_tokens * vocabulary * 4 <= min(_KEEP_BYTES, tile_bytes):
        product_TV = hidden_TD @ output_VD.T if bias_V is None else torch.addmm(bias_V, hidden_TD, output_VD.T)
        return _logprobs_of_product(product_TV, targets_T, form, entropy_grad=entropy_grad)
    keeps = torch.is_grad_enabled() and 2 * num_tokens * vocabulary * hidden_TD.dtype.itemsize <= tile_bytes
    widest = tile_bytes // (1 + keeps) // (num_tokens * _bytes_per_logit(hidden_TD.dtype, compile=compile))
    # A power of two: GPUs multiply matrices of odd widths at a third of their speed, and each width is compiled anew.
    width = vocabulary if widest >= vocabulary else max(_NARROWEST, 2 ** (max(widest, 1).bit_length() - 1))
    logprobs_T, entropy_T = _LinearLogprobs.apply(
        hidden_TD, output_VD, bias_V, targets_T, form, entropy_grad, width, keeps, compile
    )
    return logprobs_T, entropy_T


class _Form(NamedTuple):
    """Logits over temperature are product / divisor, or most · tanh(product / divisor / most)."""

    divisor: float
    most: float | None


def _logprobs_of_product(
    product_TV: torch.Tensor, targets_T: torch.Tensor, form: _Form, *, entropy_grad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_TV = product_TV.to(_softmax_dtype(product_TV.dtype))
    if form.divisor != 1:
        logits_TV = logits_TV / form.divisor
    if form.most is not None:
        logits_TV = form.most * torch.tanh(logits_TV / form.most)
    log_p_TV = logits_TV.log_softmax(-1)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy_T = -torch.linalg.vecdot(log_p_TV.exp(), log_p_TV)
    # No view: FSDP hangs its hooks on what a module returns.
    return log_p_TV.gather(1, targets_T[:, None])[:, 0].clone(), entropy_T


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        output_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_T: torch.Tensor,
        form: _Form,
        entropy_grad: bool,
        width: int,
        keeps: bool,
        compile: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        fold = _compiled(_fold_slice) if compile else _fold_slice
        numbers = {"dtype": _softmax_dtype(hidden_TD.dtype), "device": hidden_TD.device}
        # Four tensors: with one of them twice the first slice would be compiled by itself.
        sums = tuple(torch.full((len(hidden_TD),), value, **numbers) for value in (-math.inf, 0.0, 0.0, 0.0))
        kept = []
        for start in range(0, len(output_VD), width):
            logits_TW = _logits(hidden_TD, output_VD, bias_V, form, start, width)
            sums = fold(logits_TW, targets_T - start, *sums)
            if keeps:
                kept.append(logits_TW)
        top_T, total_T, moment_T, target_T = sums
        log_total_T = total_T.log()
        logprobs_T, entropy_T = target_T - top_T - log_total_T, log_total_T - moment_T / total_T
        ctx.save_for_backward(hidden_TD, output_VD, bias_V, targets_T, top_T + log_total_T, entropy_T, *kept)
        ctx.arguments = form, entropy_grad, width, compile
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_T: torch.Tensor, grad_entropy_T: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_TD, output_VD, bias_V, targets_T, log_sum_T, entropy_T, *kept = ctx.saved_tensors
        form, entropy_grad, width, compile = ctx.arguments
        turn = _compiled(_turn_into_gradient) if compile else _turn_into_gradient
        wants_hidden, wants_output, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden_TD = torch.zeros_like(hidden_TD, dtype=log_sum_T.dtype) if wants_hidden else None
        grad_output_VD = torch.empty_like(output_VD) if wants_output else None
        grad_bias_V = torch.empty_like(bias_V) if wants_bias and bias_V is not None else None
        for number, start in enumerate(range(0, len(output_VD), width)):
            output_WD = output_VD[start : start + width]
            logits_TW = kept[number] if kept else _logits(hidden_TD, output_VD, bias_V, form, start, width)
            gradient_TW = turn(
                logits_TW,
                targets_T - start,
                log_sum_T,
                entropy_T,
                grad_logprobs_T / form.divisor,
                grad_entropy_T / form.divisor if entropy_grad else None,
            )
            if form.most is not None:  # the derivative of the cap
                gradient_TW = gradient_TW * (1 - (logits_TW / form.most).square())
            if grad_bias_V is not None:
                grad_bias_V[start : start + width] = gradient_TW.sum(0)
            if grad_hidden_TD is not None:
                if hidden_TD.dtype == grad_hidden_TD.dtype:
                    grad_hidden_TD.addmm_(gradient_TW, output_WD)
                else:
                    grad_hidden_TD += gradient_TW @ output_WD
            if grad_output_VD is not None:
                torch.mm(gradient_TW.T, hidden_TD, out=grad_output_VD[start : start + len(output_WD)])
        grad_hidden_TD = None if grad_hidden_TD is None else grad_hidden_TD.to(hidden_TD.dtype)
        return grad_hidden_TD, grad_output_VD, grad_bias_V, None, None, None, None, None, None


def _logits(
    hidden_TD: torch.Tensor,
    output_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    form: _Form,
    start: int,
    width: int,
) -> torch.Tensor:
    """A slice's logits over temperature, in the type of the matrices; the division comes with the multiplication."""
    output_WD, factor = output_VD[start : start + width], 1 / form.divisor
    if bias_V is None:
        logits_TW = hidden_TD.new_empty(len(hidden_TD), len(output_WD))
        torch.addmm(logits_TW, hidden_TD, output_WD.T, beta=0, alpha=factor, out=logits_TW)
    else:
        logits_TW = torch.addmm(bias_V[start : start + width], hidden_TD, output_WD.T, beta=factor, alpha=factor)
    return logits_TW if form.most is None else logits_TW.div_(form.most).tanh_().mul_(form.most)


def _fold_slice(
    logits_TW: torch.Tensor,
    local_T: torch.Tensor,
    top_T: torch.Tensor,
    total_T: torch.Tensor,
    moment_T: torch.Tensor,
    target_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add a slice to the largest logit, Σ e^(z − top), Σ (z − top) e^(z − top) and the target's logit, per token.
    `local_T` is where the target stands in this slice; outside of it if it is in another one."""
    new_top_T = torch.maximum(top_T, logits_TW.amax(1).to(top_T.dtype))
    local_T, is_here_T = _inside(local_T, logits_TW.shape[1])
    target_T = torch.where(is_here_T, logits_TW.gather(1, local_T[:, None])[:, 0].to(top_T.dtype), target_T)
    shifted_TW = _less(logits_TW, new_top_T)
    weights_TW = shifted_TW.exp()
    # Before the first slice the top is −∞: there is nothing to carry over, and −∞ · 0 would be no number.
    lift_T = torch.where(top_T.isinf(), torch.zeros_like(top_T), top_T - new_top_T)
    decay_T = lift_T.exp()
    moment_T = (moment_T + total_T * lift_T) * decay_T + shifted_TW.mul_(weights_TW).sum(1)
    return new_top_T, total_T * decay_T + weights_TW.sum(1), moment_T, target_T


def _turn_into_gradient(
    logits_TW: torch.Tensor,
    local_T: torch.Tensor,
    log_sum_T: torch.Tensor,
    entropy_T: torch.Tensor,
    grad_logprobs_T: torch.Tensor,
    grad_entropy_T: torch.Tensor | None,
) -> torch.Tensor:
    """The loss's gradient by these logits, in their type: a (1[target] − p) − b p (log p + H), with a and b the
    gradients by log-probability and entropy."""
    log_p_TW = _less(logits_TW, log_sum_T)
    local_T, is_here_T = _inside(local_T, logits_TW.shape[1])
    if grad_entropy_T is None:
        gradient_TW = log_p_TW.exp_().mul_(-grad_logprobs_T[:, None])
    else:
        p_TW = log_p_TW.exp()
        weights_TW = log_p_TW.add_(entropy_T[:, None]).mul_(grad_entropy_T[:, None]).add_(grad_logprobs_T[:, None])
        gradient_TW = p_TW.neg_().mul_(weights_TW)
    at_target_T = torch.where(is_here_T, grad_logprobs_T, torch.zeros_like(grad_logprobs_T))
    if torch.compiler.is_compiling():  # a comparison fuses; a scatter would write everything out first
        columns_W = torch.arange(logits_TW.shape[1], device=logits_TW.device)
        gradient_TW = gradient_TW + torch.where(columns_W == local_T[:, None], at_target_T[:, None], 0.0)
    else:
        gradient_TW.scatter_add_(1, local_T[:, None], at_target_T[:, None])
    return gradient_TW.to(logits_TW.dtype)


def _less(logits_TW: torch.Tensor, subtrahend_T: torch.Tensor) -> torch.Tensor:
    """Logits less a number of each token, in the type of that number: one new tensor, which may be overwritten."""
    if logits_TW.dtype == subtrahend_T.dtype:
        return logits_TW - subtrahend_T[:, None]
    return logits_TW.to(subtrahend_T.dtype).sub_(subtrahend_T[:, None])


def _inside(local_T: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An index that is always valid, and whether it is the real one."""
    return local_T.clamp(0, width - 1), (local_T >= 0) & (local_T < width)


def _softmax_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _bytes_per_logit(dtype: torch.dtype, *, compile: bool) -> int:
    """What one logit of a slice may need: itself and three steps of its gradient, fused the last. It is less since the
    steps overwrite each other, but widths of slices follow from it, and they decide the last bits of the weights."""
    return 2 * dtype.itemsize if compile else dtype.itemsize + 3 * _softmax_dtype(dtype).itemsize


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled for any number of tokens and one width: a kernel that knows it reads several numbers at a time."""
    compiled = torch.compile(function, dynamic=True)

    def call(logits_TW: torch.Tensor, *others: Any) -> Any:
        torch._dynamo.mark_static(logits_TW, 1)
        return compiled(logits_TW, *others)

    return call
