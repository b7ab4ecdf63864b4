"""What vLLM is given in its own words: an engine's arguments, a request's sampling, the tokens that end a reply.

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
    """vLLM's arguments so that the parts of an engine, where it has several, are child processes of ours.

    Raises `ValueError` where Ray is asked to start them: our process has all their devices already.
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
        # vLLM would bind each part to a NUMA node of its own, and most machines have one.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        threads = int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0))))
        os.environ["OMP_NUM_THREADS"] = str(max(1, threads // num_parts(arguments)))
    # Inside of a Ray placement group, where we are, vLLM would choose Ray.
    return {**arguments, "distributed_executor_backend": "mp"}


@functools.lru_cache(maxsize=16)
def sampling_parameters(sampling: Sampling, stop_ids: tuple[int, ...]) -> Any:
    """vLLM's form of them, which it copies for each request; all attempts without a seed share it."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        logprobs=0,  # the sampled token's own
        flat_logprobs=True,  # a list, not a dictionary with an object per token
        stop_token_ids=list(stop_ids),
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # a deep copy for each request would cost as much as the rest of its admission
    )


def end_token_ids(folder: Path) -> list[int]:
    """End-of-reply token ids of a model folder, from `generation_config.json`, else `config.json`."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        ids = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        if ids is not None:
            return list(ids) if isinstance(ids, list) else [ids]
    raise EngineError(f"{folder} names no eos_token_id in generation_config.json or config.json")
