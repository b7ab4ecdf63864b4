"""What learning rate is usual for a model's size, and whether the first rounds have moved anything.

In: the run's settings, and its steps. Out: a range, and the sentence of a warning.

All weights from 100 million parameters on: TRL's `GRPOConfig`, verl and prime-rl have 1e-6. Tiny ones: nanoGPT's
`train_shakespeare_char.py` has 1e-3 for 10 million parameters, and the examples here, which learn, have 4e-4 to 5e-4.
Adapters: ten times that of all weights, https://thinkingmachines.ai/blog/lora/ (Schulman et al. 2025).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from settings.run_file import RunConfig
from storage.log.entries import Step
from trainers.model.fetch import local_folder

FIRST_STEPS = 10
"""After so many steps something should have moved."""
SOURCES = "TRL's GRPOConfig, nanoGPT's configurations, https://thinkingmachines.ai/blog/lora/"
_FULL = ((20e6, 1e-4, 1e-3), (100e6, 1e-5, 1e-4), (math.inf, 5e-7, 5e-6))
"""Parameters of the model below which these two learning rates are the usual range."""
_LORA = 10
_FAR = 10
"""A learning rate so many times below the usual range explains that nothing moves."""


def num_parameters(config: RunConfig) -> int | None:
    """Parameters of the run's model; None if it is not on this machine."""
    if not config.model:
        return config.warmup.num_layers * 16 * config.warmup.hidden_size**2
    folder = local_folder(config.model)
    return None if folder is None else sum(map(_parameters_in, folder.glob("*.safetensors")))


def usual_learning_rates(parameters: int, *, is_lora: bool) -> tuple[float, float]:
    """Lowest and highest usual peak of AdamW's learning rate.

    >>> usual_learning_rates(500_000, is_lora=False), usual_learning_rates(7_000_000_000, is_lora=True)
    ((0.0001, 0.001), (5e-06, 5e-05))
    """
    low, high = next((low, high) for below, low, high in _FULL if parameters < below)
    return (low * _LORA, high * _LORA) if is_lora else (low, high)


def unusual_learning_rate(config: RunConfig) -> str:
    """A sentence if the learning rate is outside the usual range; "" if it is inside, or the model is not here."""
    if (parameters := num_parameters(config)) is None:
        return ""
    low, high = usual_learning_rates(parameters, is_lora=config.train.lora is not None)
    if low <= config.learning_rate <= high:
        return ""
    side = "below" if config.learning_rate < low else "above"
    return (
        f"learning_rate = {config.learning_rate:g} is {side} what is usual for this size and kind, {low:g} to {high:g} "
        f"({SOURCES})"
    )


def nothing_moves(steps: Sequence[Step], config: RunConfig) -> str:
    """Why the first steps have moved nothing, and what to do; "" if they have, or if that is usual for the model.

    No gradient in any of them; or a mean reward that has not risen from their first half to their second, by more than
    two standard errors of the difference, at a learning rate far below the usual.
    """
    metrics = [step.metrics for step in steps[:FIRST_STEPS]]
    if not any(each.get("grad_norm", 0.0) for each in metrics):
        return (
            f"nothing has moved in {len(metrics)} steps: the gradient is 0, because the attempts at each prompt have "
            "the same reward; make some prompts easier or harder, or the reward finer"
        )
    parameters, rewards = num_parameters(config), [each["reward"] for each in metrics if "reward" in each]
    if parameters is None or len(rewards) < FIRST_STEPS:
        return ""
    low, high = usual_learning_rates(parameters, is_lora=config.train.lora is not None)
    early, late = rewards[: len(rewards) // 2], rewards[len(rewards) // 2 :]
    noise = math.sqrt(statistics.variance(early) / len(early) + statistics.variance(late) / len(late))
    begin, end = statistics.mean(early), statistics.mean(late)
    if end - begin > 2 * noise or config.learning_rate * _FAR > low:
        return ""
    return (
        f"nothing has moved in {len(metrics)} steps: the reward was {begin:.3f} in their first half and {end:.3f} in "
        f"the second. learning_rate = {config.learning_rate:g}; usual for this model is {low:g} to {high:g}"
    )


def _parameters_in(file: Path) -> int:
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as tensors:
        return sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
