"""Translates for vLLM: an engine's arguments, a request's sampling parameters, the tokens that end a reply.

In: Millrace's settings and records, and a model folder. Out: vLLM's.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

from rollouts.engines.engine import EngineError
from settings.engine import num_parts
from settings.errors import InvalidInput
from storage.records import Sampling


def in_processes_of_its_own(arguments: dict[str, Any]) -> dict[str, Any]:
    """vLLM's arguments with which the parts of an engine, if it has several, are child processes of this one.

    Raises `InvalidInput` if Ray is to start them: this process has all their devices already.
    """
    if num_parts(arguments) == 1:
        return arguments
    from vllm.platforms import current_platform

    backend = arguments.get("distributed_executor_backend", "mp")
    if backend != "mp":
        raise InvalidInput(
            f'engine.vllm.distributed_executor_backend = "{backend}": the parts of an engine are processes of one '
            "node; leave it out"
        )
    if current_platform.is_cpu():
        # vLLM would bind each part to its own NUMA node, and most machines have only one.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        threads = int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0))))
        os.environ["OMP_NUM_THREADS"] = str(max(1, threads // num_parts(arguments)))
    # This process is in a Ray placement group, so vLLM would choose Ray.
    return {**arguments, "distributed_executor_backend": "mp"}


@functools.lru_cache(maxsize=16)
def sampling_parameters(sampling: Sampling, stop_ids: tuple[int, ...]) -> Any:
    """vLLM's sampling parameters. vLLM copies them for each request, so attempts without a seed share one object."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        logprobs=0,  # only the sampled token's
        flat_logprobs=True,  # lists, not a dictionary and an object per token
        stop_token_ids=list(stop_ids),
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # a deep copy for each request would cost as much as the rest of its admission
    )


def end_token_ids(folder: Path) -> list[int]:
    """Token ids that end a reply, from `generation_config.json` of a model folder, else from `config.json`."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        ids = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        if ids is not None:
            return list(ids) if isinstance(ids, list) else [ids]
    raise EngineError(f"{folder} names no eos_token_id in generation_config.json or config.json")
