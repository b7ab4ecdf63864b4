"""Notes of one process about its start: when libraries were imported and functions ran, by wall clock and CPU time.

In: `START_TRACE`, a file. Out: lines of JSON there, one per event. `benchmarks.start_up` lets every Python process of a
command call `install` before anything else.
"""

from __future__ import annotations

import functools
import importlib.abc
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

FILE = "START_TRACE"
MODULES = {
    *("torch", "torch._dynamo", "transformers", "transformers.generation.utils", "sklearn", "pandas", "vllm", "openai"),
    *("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.v1.engine.async_llm", "ray", "mlflow", "prefect"),
    *("prefect.server", "fastapi", "pyarrow", "rollouts.production.worker", "trainers.worker", "flows.train_grpo"),
}
FUNCTIONS = {
    "tasks.checks.preflight": ["check_run", "play_tasks"],
    "infra.ray.cluster": ["Cluster.__aenter__"],
    "infra.services.prefect_server": ["ServerBeside.answers"],
    "tasks.base_model": ["store_model"],
    "infra.ray.worker_process": ["Host.call"],
    "rollouts.engines.vllm.vllm_engine": ["VllmEngine.start"],
    "vllm.engine.arg_utils": ["EngineArgs.create_engine_config"],
    "vllm.v1.engine.core": ["EngineCore.__init__", "EngineCore._initialize_kv_caches"],
    "vllm.v1.worker.cpu_worker": ["CPUWorker.load_model", "CPUWorker.compile_or_warm_up_model"],
    "trainers.worker": ["TrainerWorker.open"],
    "trainers.replay": ["ReplayWorker.open"],
}
"""Methods are named with their class."""
FIRST = {"rollouts.production.attempts": ["Player._attempt"], "trainers.replay": ["ReplayWorker.retrain"]}
"""When the first call of one of these ends there was the first reply, or the first step of a replay."""


_seen: set[str] = set()


def note(kind: str, what: str) -> None:
    """Write an event down; of those of kind `first` that have one name, the first."""
    if kind == "first" and what in _seen:
        return
    _seen.add(what)
    event = [os.getpid(), time.time(), time.process_time(), kind, what]
    with open(os.environ[FILE], "a") as file:
        file.write(json.dumps(event) + "\n")


def install() -> None:
    """Note what this process, and its forks, do from now on."""
    if FILE in os.environ:
        note("process", " ".join(sys.orig_argv)[:120])
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name not in MODULES and name not in FUNCTIONS and name not in FIRST:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        name = module.__name__
        load = functools.partial(self._loader.exec_module, module)
        _noted(load, f"import {name}")() if name in MODULES else load()
        for path in [*FUNCTIONS.get(name, ()), *FIRST.get(name, ())]:
            holder, _, last = path.rpartition(".")
            owner = getattr(module, holder) if holder else module
            raw, kind = inspect.getattr_static(owner, last), "first" if path in FIRST.get(name, ()) else ""
            if isinstance(raw, classmethod):
                setattr(owner, last, classmethod(_noted(raw.__func__, path, kind)))
            else:
                setattr(owner, last, _noted(raw, path, kind))


def _noted(function: Callable[..., Any], name: str, kind: str = "") -> Callable[..., Any]:
    """The same function, which notes its begin and end; of kind `first`, only the end."""
    if not inspect.iscoroutinefunction(function):

        def call(*arguments: Any, **keywords: Any) -> Any:
            if not kind:
                note("begin", name)
            try:
                return function(*arguments, **keywords)
            finally:
                note(kind or "end", name)

        return functools.wraps(function)(call) if hasattr(function, "__name__") else call

    @functools.wraps(function)
    async def call_async(*arguments: Any, **keywords: Any) -> Any:
        label = f"{name} {arguments[1]}" if name == "Host.call" else name
        if not kind:
            note("begin", label)
        try:
            return await function(*arguments, **keywords)
        finally:
            note(kind or "end", label)

    return call_async
