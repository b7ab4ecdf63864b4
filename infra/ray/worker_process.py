"""The process of a worker, started by Ray: it writes to its log file, and ends with the process that started it.

In: the import path of a plain class or function. Out: what its methods return.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import inspect
import math
import os
import pkgutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from typing import Any

from infra.environment import turn_telemetry_off
from infra.forks import adopt_environment, end_with_parent
from infra.ports import free_port
from infra.process_output import redirect_output
from infra.structured_logs import CALL

_STUCK_SECONDS = 120.0
_COLLECT_AFTER = 10_000  # new objects; Python's default of 700 is a few attempts, and many more leave holes in the heap
_COLLECT_SECONDS = 60.0  # between two looks at all that is new: what outlives the first look would stay for hours
_SHARE_OF_TIME = 0.001  # that those looks may take


class Host:
    """Runs inside the actor: opens the plain object there and forwards calls to it."""

    def __init__(self, path: str, log_file: str, environment: dict[str, str]) -> None:
        _set(environment)
        _die_with_parent()
        redirect_output(log_file)
        self._path = path
        self._target: Any = None
        self._turning: asyncio.Task[None] | None = None
        self._collects_at = math.inf

    def rendezvous(self) -> tuple[str, int]:
        import ray

        return ray.util.get_node_ip_address(), free_port(host="")

    def prepare(self, environment: dict[str, str]) -> None:
        os.environ.update(environment)
        adopt_environment()

    async def call(self, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if self._turning is None:
            self._turning = asyncio.create_task(_log_stacks_when_stuck())
            _end_with_loop(threading.current_thread())
        steps = [step for argument in arguments if isinstance(step := getattr(argument, "step", None), int)]
        CALL.set({"call": method, **({"step": steps[0]} if steps else {})})
        if self._target is None:
            if method == "close":
                return None
            assert method == "open", f"{method}() before open()"
            self._target = await pkgutil.resolve_name(self._path).open(*arguments, **keywords)
            # Libraries, engine and model stay until the end: the garbage collector need not visit them again and again,
            # nor run because of the objects of many concurrent attempts.
            gc.collect()
            gc.freeze()
            gc.set_threshold(_COLLECT_AFTER)
            self._collect()
            return self._target.opened
        result = getattr(self._target, method)(*arguments, **keywords)
        try:
            return await result if inspect.isawaitable(result) else result
        finally:
            if time.monotonic() >= self._collects_at:
                self._collect()

    def _collect(self) -> None:
        started = time.monotonic()
        gc.collect()
        ended = time.monotonic()
        self._collects_at = ended + max(_COLLECT_SECONDS, (ended - started) / _SHARE_OF_TIME)


def _end_with_loop(thread: threading.Thread) -> None:
    """End this process if the thread of the event loop ends: a task that raises `SystemExit` takes the loop with it,
    and the driver would wait for this worker for ever."""
    usual = threading.excepthook

    def look(ended: threading.ExceptHookArgs) -> None:
        if ended.thread is not thread:
            usual(ended)
            return
        traceback.print_exception(ended.exc_value)
        sys.stderr.flush()
        os._exit(1)

    threading.excepthook = look


async def _log_stacks_when_stuck() -> None:
    """Write the stack of every thread to the log if the event loop is blocked for a while."""
    while True:
        faulthandler.dump_traceback_later(_STUCK_SECONDS)
        await asyncio.sleep(_STUCK_SECONDS / 4)


def run_function(path: str, arguments: dict[str, Any], log_file: str, environment: dict[str, str]) -> Any:
    _set(environment)
    _die_with_parent()
    redirect_output(log_file)
    return pkgutil.resolve_name(path)(**arguments)


def _set(environment: dict[str, str]) -> None:
    """Set variables before a library reads them; telemetry is off on another node's environment too."""
    turn_telemetry_off()
    os.environ.update(environment)
    tempfile.tempdir = None


def _die_with_parent() -> None:
    """Kill this process when its parent dies, and its process group when this process dies.

    A killed run must leave no worker that holds memory or commits. The kernel signals the parent's end. What this
    process starts, such as vLLM's engine, does not notice ours: a shell that waits at a pipe kills it. The shell is no
    child of this process, because Ray kills the children of a worker that it ends.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    read, _ = os.pipe()  # the other end stays open for as long as this process lives
    watch = f"exec 3<&0; {{ cat <&3 > /dev/null; kill -9 -{os.getpid()}; }} > /dev/null 2>&1 &"
    subprocess.run(["/bin/sh", "-c", watch], stdin=read, start_new_session=True, check=True)
    os.close(read)
    end_with_parent()
