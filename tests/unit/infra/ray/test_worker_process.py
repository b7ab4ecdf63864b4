"""What a worker's process does around the calls of its object."""

from __future__ import annotations

import asyncio
import gc
import math
import weakref
from types import SimpleNamespace

import pytest

from infra.ray import worker_process
from infra.ray.worker_process import Host


class Circle:
    """Something that only the garbage collector removes."""

    def __init__(self) -> None:
        self.itself = self


class Leaving:
    """An object that leaves circles behind, as `json` and safetensors do."""

    def work(self) -> weakref.ref[Circle]:
        return weakref.ref(Circle())


async def test_what_calls_leave_behind_goes_within_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(worker_process, "time", SimpleNamespace(monotonic=lambda: now))
    host = Host.__new__(Host)
    host._target, host._turning, host._collects_at = Leaving(), asyncio.ensure_future(asyncio.sleep(0)), math.inf
    gc.collect()
    gc.disable()  # a worker's own threshold is far away
    try:
        host._collect()
        left = await host.call("work", (), {})
        assert left() is not None
        now += worker_process._COLLECT_SECONDS
        await host.call("work", (), {})
        assert left() is None and host._collects_at == now + worker_process._COLLECT_SECONDS
    finally:
        gc.enable()
