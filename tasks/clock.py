"""Where the time and memory of a round went, for the metrics of its step.

In: how long the driver waited, published, and what the machine did. Out: metrics by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence

from infra.memory import PeakMemory
from storage.log.entries import Shard
from storage.tracking.metrics import SystemMetrics
from trainers.timing import split_wait


class RoundClock:
    """The clock of one driver; a round ends with `next_round`."""

    def __init__(self, memory: PeakMemory) -> None:
        self._memory = memory
        self._system = SystemMetrics()
        self._publish_seconds = 0.0
        self._waited_seconds = 0.0
        self.round_started = time.time()
        """Unix seconds."""

    @contextlib.contextmanager
    def publishing(self) -> Iterator[None]:
        """Time a publication."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._publish_seconds = time.perf_counter() - started

    def waited(self, seconds: float) -> None:
        """The round has waited so long for its batch."""
        self._waited_seconds += seconds

    async def metrics(self, shards: Sequence[Shard], *, num_producers: int) -> dict[str, float]:
        """Of the round that a step with these shards ends."""
        return {
            **split_wait(self._waited_seconds, shards, num_producers=num_producers),
            "publish_seconds": self._publish_seconds,
            "peak_memory_bytes": float(self._memory.peak_bytes),
            **await asyncio.to_thread(self._system.sample),
        }

    def next_round(self) -> None:
        """The step is committed."""
        self._publish_seconds = self._waited_seconds = 0.0
        self.round_started = time.time()
