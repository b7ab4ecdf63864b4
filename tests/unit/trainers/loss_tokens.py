"""Random tokens for the tests of losses: float64 arrays, and the `LossInputs` made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from trainers.objective.losses import LossInputs, LossOutput

Arrays = dict[str, np.ndarray]


def arrays(lengths: Sequence[int], *, seed: int = 0, spread: float = 0.5, token_level: bool = True) -> Arrays:
    """Sequences end to end, with about a fifth of their tokens masked.

    Log-ratios are of deviation `spread`, so that all bounds are met. Without `token_level`, advantages, weights and
    importance are those of the sequence.
    """
    draw = np.random.default_rng(seed)
    total = int(sum(lengths))
    sequences = np.repeat(np.arange(len(lengths)), lengths)

    def per_token(low: float, high: float) -> np.ndarray:
        return draw.uniform(low, high, total) if token_level else draw.uniform(low, high, len(lengths))[sequences]

    old = draw.uniform(-3, -0.2, total)
    return {
        "logprobs": np.minimum(-0.01, old + draw.normal(0, spread, total)),
        "old_logprobs": old,
        "sampled_logprobs": np.minimum(-0.01, old + draw.normal(0, 0.3, total)),
        "reference_logprobs": old + draw.normal(0, 0.3, total),
        "advantages": per_token(-2, 2),
        "mask": (draw.random(total) < 0.8).astype(np.float64),
        "weights": per_token(0.01, 0.1),
        "importance": per_token(0, 2),
        "entropy": draw.uniform(0, 2, total),
        "sequences": sequences,
    }


def inputs_of(tokens: Arrays, **changes: object) -> LossInputs:
    tensors = {name: torch.from_numpy(values.copy()) for name, values in tokens.items()}
    tensors["logprobs"].requires_grad_()
    tensors["entropy"].requires_grad_()
    return LossInputs(**{**tensors, **changes})


def value_and_gradient(loss: Callable[[LossInputs], LossOutput], tokens: Arrays) -> tuple[float, np.ndarray]:
    """The loss and its gradient by `logprobs`."""
    inputs = inputs_of(tokens)
    output = loss(inputs)
    (gradient,) = torch.autograd.grad(output.loss, inputs.logprobs)
    return output.loss.item(), gradient.numpy()


def slope(loss: Callable[[Arrays], float], tokens: Arrays, name: str = "logprobs", size: float = 1e-6) -> np.ndarray:
    """The gradient of a numpy function by central differences."""
    slopes = np.zeros(len(tokens[name]))
    for token in range(len(slopes)):
        bump = np.zeros(len(slopes))
        bump[token] = size
        ahead, behind = loss({**tokens, name: tokens[name] + bump}), loss({**tokens, name: tokens[name] - bump})
        slopes[token] = (ahead - behind) / (2 * size)
    return slopes
