"""A loss of the user's, by import path.

In: `package.module:function` or `path/to/file.py:function`, and arguments. Out: the function, tried on five tokens, so
that a mistake in it shows before a model is loaded.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from infra.user_code import load_object
from settings.errors import InvalidInput, failure_text
from trainers.objective.losses import LossInputs, LossOutput

LossFunction = Callable[..., LossOutput]

_RESERVED = re.compile(
    r"loss|tokens|approx_kl|entropy|reference_kl|off_policy_kl|ratio|ratio_squared|importance.*|value_.*"
    r"|reward.*|null_reward_fraction|fraction_groups.*|grad_norm.*|critic.*|learning_rate|effective_sample_size"
    r"|trained_.*|train_flops|measured_groups|rejected_.*|staleness.*|masked_.*|engine_gap.*"
)
"""Names that a step's metrics have with any loss."""


@functools.cache
def load_loss(path: str) -> LossFunction:
    """Import a loss function, once per process. Raises `ValueError` with the fix if there is none."""
    try:
        function: LossFunction = load_object(path)
    except InvalidInput as error:
        raise InvalidInput(f"loss.path: {error}") from error
    if not callable(function):
        raise InvalidInput(f"loss.path = {path!r} is no function but {function!r}")
    return function


def check_loss(path: str, arguments: Mapping[str, Any], *, with_reference: bool = False) -> None:
    """Try a custom loss on two sequences, together and one by one. `with_reference` gives it `reference_logprobs`.

    Raises `ValueError` that says what is wrong: it cannot be loaded or called like this, fails, returns something else
    than a `LossOutput` with a finite scalar that has a gradient, or its value depends on what is packed together.
    """
    function, named = load_loss(path), f"loss.path = {path!r}"
    inputs = _trial_inputs([3, 2], with_reference=with_reference)
    try:
        inspect.signature(function).bind(inputs, **arguments)
    except TypeError as error:
        raise InvalidInput(
            f"{named} is called with (inputs, **arguments), arguments = {dict(arguments)}, which does not fit its "
            f"signature {inspect.signature(function)}: {error}"
        ) from error
    whole = _try(function, inputs, arguments, named)
    first = _try(function, _part(inputs, slice(0, 3)), arguments, named)
    second = _try(function, _part(inputs, slice(3, 5)), arguments, named)
    if not math.isclose(whole, first + second, rel_tol=1e-4, abs_tol=1e-6):
        raise InvalidInput(
            f"{named} gives {whole:.6g} for two sequences in one pack and {first + second:.6g} for them in two: "
            "training would depend on packing. Multiply by inputs.weights, which hold the denominator, and sum"
        )


def _try(function: LossFunction, inputs: LossInputs, arguments: Mapping[str, Any], named: str) -> float:
    try:
        output = function(inputs, **arguments)
    except Exception as error:
        raise InvalidInput(f"{named} fails on a trial of five tokens: {failure_text(error)}") from error
    if not isinstance(output, LossOutput):
        raise InvalidInput(
            f"{named} returns {type(output).__name__}; return trainers.objective.losses.LossOutput(loss=…, sums=…)"
        )
    if not isinstance(output.loss, torch.Tensor) or output.loss.ndim != 0:
        shape = list(output.loss.shape) if isinstance(output.loss, torch.Tensor) else type(output.loss).__name__
        raise InvalidInput(f"{named} returns a loss of shape {shape}; it has to be a scalar: sum over the tokens")
    if not output.loss.requires_grad:
        raise InvalidInput(f"{named} returns a loss without gradient; compute it from inputs.logprobs, undetached")
    if not math.isfinite(output.loss.item()):
        raise InvalidInput(f"{named} returns {output.loss.item()} on a trial of five tokens")
    if wrong := [key for key, value in output.sums.items() if not isinstance(value, (int, float))]:
        raise InvalidInput(f"{named}: sums {wrong} are no numbers; write float(tensor)")
    if reserved := [key for key in output.sums if _RESERVED.fullmatch(key)]:
        raise InvalidInput(f"{named}: sums {reserved} have names that the trainer's own metrics have; give them others")
    return output.loss.item()


def _trial_inputs(lengths: list[int], *, with_reference: bool) -> LossInputs:
    total = sum(lengths)
    old = torch.linspace(-3, -0.5, total)
    mask = torch.ones(total)
    mask[-1] = 0
    return LossInputs(
        logprobs=(old + torch.linspace(-0.2, 0.3, total)).requires_grad_(),
        old_logprobs=old,
        sampled_logprobs=old,
        advantages=torch.linspace(1, -1.5, total),
        mask=mask,
        weights=torch.full((total,), 1 / total),
        importance=torch.ones(total),
        sequences=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        entropy=torch.linspace(0.5, 1, total).requires_grad_(),
        reference_logprobs=old - 0.1 if with_reference else None,
    )


def _part(inputs: LossInputs, tokens: slice) -> LossInputs:
    parts = {key: value[tokens] for key, value in vars(inputs).items() if value is not None}
    parts["sequences"] = parts["sequences"] - parts["sequences"][0]
    return LossInputs(**parts)
