"""Peak memory of this process and its descendants, sampled in the background.

Out: bytes, as proportional set size, so shared pages count once.
"""

from __future__ import annotations

import threading
import time

import psutil

_SHARE_OF_A_CORE = 0.01
"""Share of a core that measuring may use."""


class PeakMemory:
    """A context manager; `peak_bytes` is updated while it is open."""

    def __init__(self, *, every_seconds: float = 2.0) -> None:
        self._every_seconds = every_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)
        self.peak_bytes = 0

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        pause = self._every_seconds
        while not self._stop.wait(pause):
            started = time.thread_time()
            self.peak_bytes = max(self.peak_bytes, tree_bytes())
            # The kernel visits every page of every process for this, on cores that have other work.
            pause = max(self._every_seconds, (time.thread_time() - started) / _SHARE_OF_A_CORE)


def tree_bytes() -> int:
    """Memory of this process and all its descendants right now."""
    total = 0
    this = psutil.Process()
    for process in [this, *this.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it ended meanwhile
    return total
