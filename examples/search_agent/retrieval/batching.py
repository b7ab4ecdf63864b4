"""Requests that arrive together are worked on together.

In: single items, awaited by their callers. Out: their results. `work` runs in one thread, on up to `most` items: those
that came before it was free, or within `wait_seconds` of the first.

    callers ─items─▶ queue (bounded: QueueFull) ─batch─▶ thread: work ─results─▶ callers
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class QueueFull(Exception):
    """Too many items wait already."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"the queue is full; it will have drained in about {retry_after} s")
        self.retry_after = retry_after
        """Seconds until the waiting items are done, at the speed of the last batch; at least 1."""


class Batcher(Generic[Item, Result]):
    """Use as `async with`; `most` items at a time, `queue` may wait."""

    def __init__(
        self, work: Callable[[Sequence[Item]], Sequence[Result]], *, most: int, wait_seconds: float, queue: int
    ) -> None:
        self._work = work
        self._most = most
        self._wait_seconds = wait_seconds
        self.queue_limit = queue
        self.num_batches = 0
        self.num_items = 0
        self._item_seconds = 0.0
        self._waiting: deque[tuple[Item, asyncio.Future[Result], float]] = deque()
        self._arrived = asyncio.Event()
        self._wanted = 1
        """How many items must wait before `_arrived` is set: waking up for each one costs CPU that the work needs."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batch")

    async def __aenter__(self) -> Batcher[Item, Result]:
        self._running = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        for waiting in self._waiting:
            waiting[1].cancel()
        self._thread.shutdown(wait=False)

    @property
    def queue_length(self) -> int:
        """Items that wait, without those being worked on."""
        return len(self._waiting)

    async def __call__(self, items: Sequence[Item]) -> list[Result]:
        """Results in the order of the items; raises what `work` raised, or `QueueFull`, then for all of them."""
        if len(self._waiting) + len(items) > self.queue_limit:
            raise QueueFull(max(1, math.ceil(len(self._waiting) * self._item_seconds)))
        now = time.monotonic()
        futures = [asyncio.get_running_loop().create_future() for _ in items]
        self._waiting.extend((item, future, now) for item, future in zip(items, futures, strict=True))
        if len(self._waiting) >= self._wanted:
            self._arrived.set()
        return await asyncio.gather(*futures)

    async def _run(self) -> None:
        while True:
            batch = await self._next_batch()
            try:
                await self._work_on(batch)
            finally:
                for _, future in batch:  # their callers still wait, and this was cancelled
                    future.cancel()

    async def _work_on(self, batch: Sequence[tuple[Item, asyncio.Future[Result]]]) -> None:
        items = [item for item, _ in batch]
        started = time.monotonic()
        outcomes = await asyncio.get_running_loop().run_in_executor(self._thread, self._outcomes, items)
        self._item_seconds = (time.monotonic() - started) / len(batch)
        self.num_batches += 1
        self.num_items += len(batch)
        for (_, future), outcome in zip(batch, outcomes, strict=True):
            if future.done():  # its caller has gone
                continue
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    async def _next_batch(self) -> list[tuple[Item, asyncio.Future[Result]]]:
        batch: list[tuple[Item, asyncio.Future[Result]]] = []
        while not batch:
            await self._until(1, None)
            await self._until(self._most, self._waiting[0][2] + self._wait_seconds)
            while self._waiting and len(batch) < self._most:
                item, future, _ = self._waiting.popleft()
                if not future.done():
                    batch.append((item, future))
        return batch

    async def _until(self, count: int, at: float | None) -> None:
        """Until `count` items wait, or until the moment `at`."""
        while len(self._waiting) < count:
            left = None if at is None else at - time.monotonic()
            if left is not None and left <= 0:
                return
            self._arrived.clear()
            self._wanted = count
            try:
                await asyncio.wait_for(self._arrived.wait(), left)
            except TimeoutError:
                return

    def _outcomes(self, items: Sequence[Item]) -> list[Result | Exception]:
        """The result or the error of each item; one that fails must not fail its neighbours."""
        try:
            return list(self._work(items))
        except Exception as error:  # noqa: BLE001 - it is handed to the caller it belongs to
            if len(items) == 1:
                return [error]
            return [outcome for item in items for outcome in self._outcomes([item])]
