"""Watches what a session depends on: Ray on this machine, and the processes below the driver.

    a look every 2 s ─┬─ Ray's raylet here, or its GCS, is gone ─▶ `lost`: every wait of the session ends with that
                      ├─ a process has been stopped for 10 s ────▶ it is killed, and its callers see a death
                      └─ the session has not ended 30 s after ───▶ this process ends, with the sentence and status 2

In: the Ray that this process is connected to. Out: `lost`, and one line per process that is killed. A thread does it,
because a look may block the event loop. Deaths of workers, here and on other machines, Ray reports itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Awaitable
from typing import Any, TypeVar

import psutil

from settings.errors import UserError

logger = logging.getLogger("millrace.workers")

Result = TypeVar("Result")

LOOK_SECONDS = 2.0
STOPPED_LOOKS = 5
"""Looks, not seconds: Ctrl-Z stops the driver too, and after it everything is to go on."""
GCS_LOOKS = 3
_ANSWER_SECONDS = 5.0
END_SECONDS = 30.0
_DEPTH = 2  # below the driver: Ray, and its workers


class RayLost(UserError):
    """Ray is gone, and every process of the session with it; the message says which part of it."""


class Watch:
    """Watches for one session, from the event loop it is made in, until `end`."""

    def __init__(self, *, raylet_socket: str, gcs_address: str) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done once Ray is gone: which part of it has died, as a sentence."""
        self._reason = ""
        self._loop = asyncio.get_running_loop()
        self._raylet = _with_argument(raylet_socket)
        self._gcs_address = gcs_address
        self._gcs_misses = 0
        self._stopped: Counter[psutil.Process] = Counter()
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="liveness", daemon=True).start()

    def check(self) -> None:
        """Raise `RayLost` if Ray is gone: its client would wait in the event loop for its answer."""
        if self.lost.done():
            raise RayLost(self.lost.result())

    async def unless_lost(self, waiting: Awaitable[Result]) -> Result:
        """Await something that Ray does. Raises `RayLost` when Ray cannot do it any more."""
        task: asyncio.Future[Result] = asyncio.ensure_future(waiting)
        futures: list[asyncio.Future[Any]] = [task, self.lost]
        try:
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait([task])  # it may have something to give back
            raise
        if not task.done():
            task.cancel()
            self.check()
        return task.result()

    def end(self) -> None:
        """End the watch."""
        self._over.set()

    def raylet_is_gone(self) -> str:
        """A sentence if this machine's part of Ray has died; else an empty string."""
        if self._raylet is None or _is_alive(self._raylet):
            return self._reason
        return "Ray's raylet has died on this machine, and with it every worker"

    def _watch(self) -> None:
        while not self._reason and not self._over.wait(LOOK_SECONDS):
            try:
                self._end_stopped()
                self._reason = self.raylet_is_gone() or self._gcs_is_gone()
            except (OSError, psutil.Error) as error:  # a process that ended meanwhile, say
                logger.debug("a look at the processes failed: %r", error)
        if self._over.is_set():
            return
        self._reason += "; what was committed is safe, and the same command continues the run"
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._report_loss)
        if not self._over.wait(END_SECONDS):
            sys.stderr.write(f"error: {self._reason}\n")
            sys.stderr.flush()
            os._exit(2)  # Ray's client may wait for ever for a Ray that is gone; our children die with us

    def _report_loss(self) -> None:
        if not self.lost.done():
            self.lost.set_result(self._reason)

    def _gcs_is_gone(self) -> str:
        host, _, port = self._gcs_address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()
            self._gcs_misses = 0
        except OSError:
            self._gcs_misses += 1
        if self._gcs_misses < GCS_LOOKS:
            return ""
        return f"Ray's GCS, which knows all workers, has died: nothing answers at {self._gcs_address}"

    def _end_stopped(self) -> None:
        before, self._stopped = self._stopped, Counter()
        for process in _below(psutil.Process()):
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_STOPPED:
                    continue
                self._stopped[process] = before[process] + 1
                if self._stopped[process] >= STOPPED_LOOKS:
                    seconds, what = STOPPED_LOOKS * LOOK_SECONDS, f"{process.name()} (process {process.pid})"
                    logger.warning("%s has been stopped for %.0f s, so it is killed", what, seconds)
                    process.kill()


def _below(driver: psutil.Process) -> list[psutil.Process]:
    """Ray's processes, workers, their engines and Prefect's server; not what agents and rewards run, which has time
    limits of its own and may stop and wake its own children."""
    watched, depths = [], {driver.pid: 0}
    for process in driver.children(recursive=True):  # parents first; it reads the parents of all processes
        with contextlib.suppress(psutil.Error):
            depth = depths[process.pid] = depths.get(process.ppid(), _DEPTH) + 1
            # An engine's core, and those of its parts, are children of a fork server that may be a worker's child.
            if depth <= _DEPTH or process.name().startswith("VLLM"):
                watched.append(process)
    return watched


def _with_argument(text: str) -> psutil.Process | None:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.name() == "raylet" and any(text in word for word in process.cmdline()):
                return process
    return None


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
