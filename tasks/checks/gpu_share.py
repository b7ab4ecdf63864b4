"""How an engine and the trainer use one GPU: by turns, or each a part of it; and which runs cannot.

In: a run's settings, and how many GPUs there are. Out: `phases`, `split`, or nothing if they share none; or a refusal,
before anything starts. `tasks.phases` carries turns out.
"""

from __future__ import annotations

import math
import os
from typing import Literal

from rollouts.engines.vllm.core_start import needs_gpu
from settings.errors import InvalidInput, counted
from settings.run_file import RunConfig


def share_of(config: RunConfig, num_gpus: float, *, trains: bool = True) -> Literal["phases", "split", ""]:
    """How engine and trainer use one GPU; empty if they share none. Turns are for one engine on this machine."""
    num_engines, num_ranks = _processes(config, trains=trains)
    if not (num_engines and num_ranks and 0 < num_gpus < num_engines + num_ranks):
        return ""
    if config.engine.share != "auto":
        return config.engine.share
    by_turns = num_gpus == 1 and num_engines == num_ranks == 1 and not os.environ.get("RAY_ADDRESS")
    return "phases" if by_turns and config.max_staleness == 0 and config.engine.kind == "vllm" else "split"


def with_share(config: RunConfig, num_gpus: float, *, trains: bool = True) -> RunConfig:
    """The settings with `engine.share` as it will be, "auto" if nothing is shared; an engine that is to sleep is told
    so when it starts."""
    share = share_of(config, num_gpus, trains=trains) or "auto"
    sleeps = {"enable_sleep_mode": True} if share == "phases" else {}
    engine = config.engine.model_copy(update={"share": share, "vllm": {**config.engine.vllm, **sleeps}})
    return config.model_copy(update={"engine": engine})


def check_share(config: RunConfig, num_gpus: float) -> None:
    """Raise `InvalidInput` for a way of sharing that this run cannot have, and for an engine without its GPU."""
    if config.engine.kind == "vllm" and not num_gpus and needs_gpu():
        raise InvalidInput(
            "the installed vLLM computes on GPUs, and this machine has 0: install the extra `cpu`, or start the run "
            "where `nvidia-smi` lists one"
        )
    num_engines, num_ranks = _processes(config)
    share, each = config.engine.share, math.ceil((num_engines + num_ranks) / num_gpus) if num_gpus else 0
    holders = f"{counted(num_engines, 'engine')} and {counted(num_ranks, 'trainer rank')}"
    if num_engines > 1 and num_ranks and each > 2:
        raise InvalidInput(
            f"{holders} for {counted(int(num_gpus), 'GPU')}: {each} on one, and one engine and one rank are the most "
            "that share one; set rollout.num_workers = 1 and evaluation.own_engine = false"
        )
    if share == "auto":
        return
    setting = f'engine.share = "{share}"'
    if not num_gpus or config.engine.kind != "vllm":
        where = "there are 0 GPUs" if not num_gpus else f'engine.kind = "{config.engine.kind}" has no memory on a GPU'
        raise InvalidInput(f"{setting} is about a GPU that engine and trainer share, and {where}; leave it out")
    if not share_of(config, num_gpus):
        raise InvalidInput(f"{setting}: {holders} share none of {counted(int(num_gpus), 'GPU')}; leave it out")
    if share == "split":
        return
    if config.max_staleness > 0:
        raise InvalidInput(
            f"{setting} with max_staleness = {config.max_staleness:g}: the engine would sleep when it is to sample "
            f'ahead; set max_staleness = 0, or engine.share = "split"'
        )
    if (address := os.environ.get("RAY_ADDRESS")) or num_gpus > 1:
        where = f"RAY_ADDRESS = {address} may place the two on different machines"
        where = where if address else f"this machine has {num_gpus:g}"
        raise InvalidInput(f'{setting} is for one engine and one rank on 1 GPU, and {where}; use "split"')


def _processes(config: RunConfig, *, trains: bool = True) -> tuple[int, int]:
    """Processes of engines, and ranks of the trainer, that each want a GPU."""
    num_engines = (config.rollout.num_workers + config.evaluation.own_engine) * config.engine.num_gpus
    return num_engines, config.train.num_ranks if trains and config.train.device != "cpu" else 0
