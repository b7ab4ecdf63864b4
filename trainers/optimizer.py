"""The optimizer and what surrounds it: learning rate, gradient norms, a moving average of the weights.

In: a step number, parameters with their gradients (plain, or FSDP2 shards). Out: a number, sums, an updated average.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from trainers.health import NonFinite
from trainers.model.distributed import copy_into, full, local

Schedule = Literal["constant", "linear", "cosine"]

_MODULES = (
    ("norm", r"norm|(^|[._])ln(_|$)"),
    ("critic", r"critic|value_head|^score$"),
    ("lm_head", r"^lm_head$|^embed_out$"),
    ("embed", r"embed|^wte$|^wpe$"),
    ("attention", r"attn|attention"),
    ("mlp", r"mlp|expert|moe|feed_forward"),
)
"""Module groups by what the name of a part of a parameter's path matches; the innermost part decides."""


def make_optimizer(
    parameters: Iterable[nn.Parameter], *, learning_rate: float, weight_decay: float, fused: bool = False
) -> torch.optim.AdamW:
    """AdamW with betas 0.9 and 0.99, decaying all weights alike. `fused` is one kernel per update; on the CPU too it
    takes a fifth of the time of a dozen small ones per sharded tensor. https://arxiv.org/abs/1711.05101"""
    betas = (0.9, 0.99)
    return torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=weight_decay, betas=betas, fused=fused or None)


def learning_rate(step: int, *, peak: float, warmup_steps: int, schedule: Schedule, decay_steps: int) -> float:
    """The rate of optimizer step `step`, counted from 1: linear up to `peak` at `warmup_steps`, then kept, or down
    to 0 at `decay_steps`, along a line or half a cosine; 0 after that.

    >>> [learning_rate(s, peak=1.0, warmup_steps=2, schedule="linear", decay_steps=6) for s in (1, 2, 4, 6)]
    [0.5, 1.0, 0.5, 0.0]
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup_steps) / (decay_steps - warmup_steps))
    return peak * (1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2)


def module_group(name: str) -> str:
    """Which part of the model a parameter is in.

    >>> module_group("causal_lm.model.layers.0.self_attn.q_proj.weight")
    'attention'
    """
    for part in reversed(name.split(".")):
        for group, pattern in _MODULES:
            if re.search(pattern, part):
                return group
    return "other"


def zero_gradients(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """A gradient of 0, which an optimizer takes as it takes others, unlike none."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], scale: float) -> None:
    """Multiply every gradient that is there."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale)


def clip_gradient(
    parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    max_norm: float,
    sum_over_ranks: Callable[[np.ndarray], np.ndarray],
    what: str = "the gradient",
    rows: Sequence[str] = (),
    num_updates: int = 0,
) -> tuple[float, dict[str, float]]:
    """Scale a gradient down to `max_norm`; returns the L2 norm it had, and those of its module groups, of the whole
    model on every rank; 0 without a gradient. One collective.

    Raises `NonFinite` about `what`, with all `rows` of the mini-batch, before anything is touched.
    """
    named = list(parameters)
    squares: dict[str, list[torch.Tensor]] = {}
    for name, parameter in named:
        of_group = squares.setdefault(module_group(name), [])
        if parameter.grad is not None:
            of_group.append(_own_square(parameter.grad))
    sums = [float(torch.stack(of_group).sum()) if of_group else 0.0 for of_group in squares.values()]
    totals = sum_over_ranks(np.array(sums, dtype=np.float64)).tolist()
    by_group = {group: math.sqrt(total) for group, total in zip(squares, totals, strict=True)}
    total = math.hypot(*by_group.values())
    if not math.isfinite(total):
        raise NonFinite(what, rows, num_updates)
    torch.nn.utils.clip_grads_with_norm_([parameter for _, parameter in named], max_norm, torch.tensor(total))
    return total, by_group


class Ema:
    """An exponential moving average of the weights in float32, sharded as they are: average ← decay · average +
    (1 − decay) · weights, after each optimizer update, beginning with the weights."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], *, decay: float) -> None:
        self._parameters = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        self._decay = decay
        self._average = {name: parameter.detach().clone().float() for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are now."""
        average = [local(tensor) for tensor in self._average.values()]
        weights = [local(parameter).float() for parameter in self._parameters.values()]
        torch._foreach_lerp_(average, weights, 1 - self._decay)

    def move(self, device: torch.device) -> None:
        """Move the average."""
        self._average = {name: tensor.to(device) for name, tensor in self._average.items()}

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Whole tensors `ema/<parameter>` for the saved state; every rank must call it."""
        return {f"ema/{name}": full(tensor).contiguous() for name, tensor in self._average.items()}

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on from `state_tensors`; from the present weights if the state has no average."""
        for name, parameter in self._parameters.items():
            saved = tensors.get(f"ema/{name}")
            copy_into(self._average[name], full(parameter).float() if saved is None else saved)


def _own_square(gradient: torch.Tensor) -> torch.Tensor:
    """This rank's share of the squared norm, so that the shares of all ranks add up to it."""
    square = torch.linalg.vector_norm(local(gradient).detach(), dtype=torch.float64).square()
    if not isinstance(gradient, DTensor):
        return square / (dist.get_world_size() if dist.is_initialized() else 1)
    sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return square / math.prod(size for size, placement in sizes if not placement.is_shard())  # so many have the same
