"""Batches: what is worked on together, what callers get back, and what happens when too many come."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from examples.search_agent.retrieval.batching import Batcher, QueueFull


class _Gated:
    """Doubles numbers, batch by batch, each when `gate` lets it; negative ones it cannot."""

    def __init__(self, *, open_gates: int = 0) -> None:
        self.gate = threading.Semaphore(open_gates)
        self.batches: list[list[int]] = []
        self.begun = threading.Event()

    def __call__(self, items: Sequence[int]) -> list[int]:
        self.batches.append(list(items))
        self.begun.set()
        assert self.gate.acquire(timeout=20)
        if min(items) < 0:
            raise ValueError(f"negative: {min(items)}")
        return [2 * item for item in items]


def _batcher(work: _Gated, *, most: int, wait_seconds: float = 0, queue: int = 100) -> Batcher[int, int]:
    return Batcher(work, most=most, wait_seconds=wait_seconds, queue=queue)


async def _busy(batcher: Batcher[int, int], work: _Gated) -> asyncio.Task[list[int]]:
    """Have the thread begin with a batch of one."""
    task = asyncio.create_task(batcher([100]))
    await asyncio.to_thread(work.begun.wait)
    return task


async def _queue(batcher: Batcher[int, int], *numbers: int) -> list[asyncio.Task[list[int]]]:
    """Ask for each number alone, and return when all of them wait."""
    tasks = [asyncio.create_task(batcher([number])) for number in numbers]
    already = batcher.queue_length
    while batcher.queue_length < already + len(numbers):
        await asyncio.sleep(0)
    return tasks


@pytest.mark.parametrize(
    ("wait_seconds", "items", "sizes"),
    [(3600, [[0], [1], [2]], [3]), (0.01, [[1, 2]], [2]), (0, [list(range(50))], [3] * 16 + [2])],
    ids=["a full batch waits for no more", "one that does not fill, for its wait", "a request larger than a batch"],
)
async def test_batches_fill_as_far_as_they_may(wait_seconds: float, items: list[list[int]], sizes: list[int]):
    async with _batcher(work := _Gated(open_gates=100), most=3, wait_seconds=wait_seconds) as batcher:
        results = await asyncio.gather(*(batcher(numbers) for numbers in items))
        assert results == [[2 * number for number in numbers] for numbers in items]
        assert [len(batch) for batch in work.batches] == sizes


async def test_an_item_that_fails_does_not_harm_its_neighbours():
    async with _batcher(_Gated(open_gates=100), most=4, wait_seconds=3600) as batcher:
        outcomes: list[Any] = await asyncio.gather(*(batcher([n]) for n in (1, -2, 3, 4)), return_exceptions=True)
        assert [outcomes[0], *outcomes[2:]] == [[2], [6], [8]]
        assert str(outcomes[1]) == "negative: -2"


async def test_items_that_come_while_the_thread_is_busy_are_worked_on_together_but_for_callers_that_have_gone():
    async with _batcher(work := _Gated(), most=4) as batcher:
        first, later = await _busy(batcher, work), await _queue(batcher, *range(10))
        gone = later.pop(3)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        work.gate.release(4)
        assert await first == [200]
        assert [await task for task in later] == [[2 * number] for number in range(10) if number != 3]
        assert work.batches == [[100], [0, 1, 2, 4], [5, 6, 7, 8], [9]]
        assert (batcher.num_batches, batcher.num_items) == (4, 10)


async def test_a_request_that_does_not_fit_into_the_queue_is_refused_as_a_whole():
    async with _batcher(work := _Gated(), most=1, queue=3) as batcher:
        first, waiting = await _busy(batcher, work), await _queue(batcher, 0, 1)
        with pytest.raises(QueueFull):
            await batcher([5, 6])
        waiting += await _queue(batcher, 7)
        work.gate.release(10)
        assert [await task for task in (first, *waiting)] == [[200], [0], [2], [14]]


async def test_leaving_ends_calls_whose_work_has_begun_and_calls_that_wait():
    async with _batcher(work := _Gated(), most=1) as batcher:
        begun, [waiting] = await _busy(batcher, work), await _queue(batcher, 1)
    for task in (begun, waiting):
        with pytest.raises(asyncio.CancelledError):
            await task
    work.gate.release()
