"""`reproducible = true`: settings under which a run is no function of its file, said before anything starts.

In: a run's settings. Out: nothing, or an error that names the setting, why, and the fix. `trial.check_repeats` plays
tasks twice, and an engine tries at its start whether its bits depend on the batch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from rollouts.engines.vllm.core_start import is_cpu_build
from settings.errors import InvalidInput
from settings.run_file import RunConfig
from storage.log.claims import is_fixed

_FIXED_ORDER = "NCCL_ALGO"
"""With this in the environment NCCL adds up by one algorithm; otherwise it chooses one by sizes and links."""


def check_settings(config: RunConfig, *, on_gpus: bool) -> None:
    """Raise `InvalidInput` for a setting that `reproducible = true` cannot be promised with.

    `on_gpus`: the trainer's ranks have GPUs.
    """
    if problem := next(_problems(config, on_gpus), ""):
        raise InvalidInput(f"reproducible = true with {problem}")


def check_producer(config: RunConfig) -> None:
    """Raise `InvalidInput` for a run whose log-probabilities must have the bits of its own machine."""
    if config.reproducible:
        raise InvalidInput(
            f"run {config.run!r} is reproducible, and an engine elsewhere cannot prove that it computes the same bits: "
            "another processor rounds otherwise; give its driver more rollout.num_workers"
        )


def _problems(config: RunConfig, on_gpus: bool) -> Iterator[str]:
    arguments = config.engine.vllm
    if not is_fixed(config) and config.max_staleness:
        yield (
            f"max_staleness = {config.max_staleness:g}: which policy answers a prompt would depend on the moment; set "
            'rollout.schedule = "fixed", or max_staleness = 0'
        )
    if not is_fixed(config):
        yield (
            f"train.steps_per_update = {config.train.steps_per_update}: which groups come first would depend on the "
            'moment; set rollout.schedule = "fixed", or the key to 1'
        )
    if not config.rollout.num_workers:
        yield (
            "rollout.num_workers = 0: an engine elsewhere cannot prove that it computes the same bits; give the run "
            "a worker of its own"
        )
    if arguments.get("speculative_config"):
        yield "engine.vllm.speculative_config: vLLM draws such tokens from a stream of its own; leave it out"
    if arguments.get("enforce_eager") is False and is_cpu_build():
        yield (
            "engine.vllm.enforce_eager = false: on CPUs only layers that are not compiled compute in a fixed order; "
            "leave it out"
        )
    if on_gpus and config.train.num_ranks > 1 and _FIXED_ORDER not in os.environ:
        yield (
            f"train.num_ranks = {config.train.num_ranks}: NCCL adds up gradients in an order of its own choice; set "
            f"{_FIXED_ORDER}=Ring in the environment, or train on one GPU"
        )
