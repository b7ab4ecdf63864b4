"""Where the time and memory of a round went, for the metrics of its step.

In: how long the driver waited, published, and what the machine did. Out: metrics by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence

import psutil

from storage.log.entries import Shard, Step
from storage.tracking.metrics import SystemMetrics
from tasks.checks.memory_plan import above_plan
from trainers.timing import split_wait

logger = logging.getLogger("millrace.train")

_EVERY_SECONDS = 2.0
_SHARE_OF_A_CORE = 0.01
"""Share of a core that measuring may use."""


class PeakMemory:
    """Peak memory of this process and its descendants, in bytes of proportional set size; sampled in a thread."""

    def __init__(self) -> None:
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
        pause = _EVERY_SECONDS
        while not self._stop.wait(pause):
            started = time.thread_time()
            self.peak_bytes = max(self.peak_bytes, tree_bytes())
            # The kernel visits every page of every process for this, on cores that have other work.
            pause = max(_EVERY_SECONDS, (time.thread_time() - started) / _SHARE_OF_A_CORE)


def tree_bytes() -> int:
    """Memory of this process and all its descendants right now."""
    total, this = 0, psutil.Process()
    for process in [this, *this.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it ended meanwhile
            total += process.memory_full_info().pss
    return total


def out_of_room(shards: Sequence[Shard], group_ids: Collection[str]) -> dict[str, float]:
    """Share of the groups' attempts that filled the model's context; empty without groups."""
    groups = [group for shard in shards for group in shard.groups if group.id in group_ids]
    attempts = sum(group.expected for group in groups)
    return {"out_of_room_fraction": sum(group.out_of_room for group in groups) / attempts} if attempts else {}


class RoundClock:
    """The clock of one driver; a round ends with `next_round`."""

    def __init__(self, memory: PeakMemory, planned: Mapping[str, float]) -> None:
        """`planned` is `tasks.checks.memory_plan.planned`."""
        self._memory = memory
        self._planned = {f"planned_{name}": value for name, value in planned.items()}
        self._above_plan: set[str] = set()
        self._system = SystemMetrics()
        self.next_round()

    async def metrics(self, shards: Sequence[Shard], *, num_producers: int) -> dict[str, float]:
        """The metrics of the round that a step with these shards ends."""
        return {
            **split_wait(self.waited_seconds, shards, num_producers=num_producers),
            "publish_seconds": self.publish_seconds,
            "peak_memory_bytes": float(self._memory.peak_bytes),
            **self._planned,
            **await asyncio.to_thread(self._system.sample),
        }

    def say_above_plan(self, step: Step) -> None:
        """Warn, once for each, of what a step has taken more of than was planned."""
        above = above_plan(step.metrics)
        for name in above.keys() - self._above_plan:
            logger.warning(
                "step %d: %s. Other steps may take more still; train.tokens_per_microbatch is the cheapest to lower",
                step.claim.step,
                above[name],
            )
        self._above_plan |= above.keys()

    def next_round(self) -> None:
        """The step is committed."""
        self.publish_seconds = 0.0
        self.waited_seconds = 0.0
        """How long the round has waited for its batch."""
        self._round_started = time.perf_counter()

    @property
    def round_seconds(self) -> float:
        """Of this round so far."""
        return time.perf_counter() - self._round_started
