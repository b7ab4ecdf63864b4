"""Watches what a session depends on: Ray on this machine, the processes below the driver, and workers elsewhere.

    a look every 2 s ─┬─ Ray's raylet here, or its GCS, is gone ─▶ `lost`: every wait of the session ends with that
                      ├─ a process has been stopped for 10 s ────▶ it is killed, and its callers see a death
                      └─ the session has not ended 30 s after ───▶ this process ends, with the sentence and status 2

In: the Ray that this process is connected to. Out: `lost`, and one line per process that is killed. A thread does it,
because a look may block the event loop. Workers of a cluster that was joined are below its raylets, not below the
driver: a `NodeWatch` on each node looks at them. Deaths of workers, here and on other machines, Ray reports itself.
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
from collections.abc import Awaitable, Callable, Iterable
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
_NEXT_WATCH_SECONDS = 60.0
_DEPTH = 2  # below the driver: Ray, and its workers
_ENGINE = "VLLM"
_WATCHED_ON_NODES = ("ray::Host", _ENGINE)  # a cluster has workers of other programs too


class RayLost(UserError):
    """Ray is gone, and every process of the session with it; the message says which part of it."""

    may_pass = False


class Watch:
    """Watches for one session, from the event loop it is made in, until `end`.

    For a cluster that was joined, `host_on(node_id, path)` hosts an object of an import path on a node.
    """

    def __init__(self, raylet_socket: str, gcs_address: str, host_on: Callable[[str, str], Any] | None) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done once Ray is gone: which part of it has died, as a sentence."""
        self._reason = ""
        self._loop = asyncio.get_running_loop()
        self._raylet = _with_argument(raylet_socket)
        self._gcs_address = gcs_address
        self._gcs_misses = 0
        self._stopped = Stopped()
        self._over = threading.Event()
        self._on_nodes: dict[str, asyncio.Future[None]] = {}
        threading.Thread(target=self._watch, name="liveness", daemon=True).start()
        if host_on is not None:  # a thread of its own: a look at the nodes waits for a GCS that does not answer
            threading.Thread(target=self._watch_nodes, args=[host_on], name="nodes", daemon=True).start()

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
                for sentence in self._stopped.end(_below(psutil.Process())):
                    logger.warning(sentence)
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

    def _watch_nodes(self, host_on: Callable[[str, str], Any]) -> None:
        """Have a watch on each node, also on those that join later."""
        import ray

        while not self._over.wait(LOOK_SECONDS):
            with contextlib.suppress(Exception):  # Ray is gone, or ends
                for node_id in [node["NodeID"] for node in ray.nodes() if node["Alive"]]:
                    self._loop.call_soon_threadsafe(self._watch_node, node_id, host_on)

    def _watch_node(self, node_id: str, host_on: Callable[[str, str], Any]) -> None:
        async def report() -> None:
            try:
                watch = host_on(node_id, f"{__name__}:NodeWatch")
                await watch.call("open")
                while True:
                    for sentence in await watch.call("killed"):
                        logger.warning(sentence)
            except (UserError, psutil.Error) as error:  # its node has died, or Ray; or the node has no Millrace
                logger.debug("no watch on node %s: %r", node_id, error)
                await asyncio.sleep(_NEXT_WATCH_SECONDS)

        if node_id not in self._on_nodes or self._on_nodes[node_id].done():
            self._on_nodes[node_id] = asyncio.ensure_future(report())

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


class Stopped:
    """Which processes are stopped, and for how many looks."""

    def __init__(self) -> None:
        self._looks: Counter[psutil.Process] = Counter()

    def end(self, processes: Iterable[psutil.Process]) -> list[str]:
        """Look at them once more, and kill those that have been stopped for a while; a sentence for each."""
        before, self._looks, said = self._looks, Counter(), []
        for process in processes:
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_STOPPED:
                    continue
                self._looks[process] = before[process] + 1
                if self._looks[process] >= STOPPED_LOOKS:
                    seconds, what = STOPPED_LOOKS * LOOK_SECONDS, f"{process.name()} (process {process.pid})"
                    process.kill()
                    said.append(f"{what} has been stopped for {seconds:.0f} s, so it is killed")
        return said


class NodeWatch:
    """Hosted on a node: looks at the workers there, those of other runs too."""

    opened = None

    def __init__(self) -> None:
        self._stopped = Stopped()

    @classmethod
    async def open(cls) -> NodeWatch:
        """Begin."""
        return cls()

    async def killed(self) -> list[str]:
        """Look until some have been stopped for so long that they are killed; a sentence for each."""
        raylet = psutil.Process(os.getppid())
        while True:
            workers = [each for each in _below(raylet, depth=1) if each.name().startswith(_WATCHED_ON_NODES)]
            if said := self._stopped.end(workers):
                return [f"on {socket.gethostname()}: {sentence}" for sentence in said]
            await asyncio.sleep(LOOK_SECONDS)


def _below(top: psutil.Process, *, depth: int = _DEPTH) -> list[psutil.Process]:
    """Below the driver, or a raylet: Ray's processes, workers, their engines and Prefect's server; not what agents and
    rewards run, which has time limits of its own and may stop and wake its own children."""
    watched, depths = [], {top.pid: 0}
    for process in top.children(recursive=True):  # parents first; it reads the parents of all processes
        with contextlib.suppress(psutil.Error):
            level = depths[process.pid] = depths.get(process.ppid(), _DEPTH) + 1
            # An engine's core, and those of its parts, are children of a fork server that may be a worker's child.
            if level <= depth or process.name().startswith(_ENGINE):
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
