"""The plan of memory beside what a round took."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.clock import RoundClock
from tests.builders import a_log, a_step


def test_what_is_above_the_plan_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    memory: Any = SimpleNamespace(peak_bytes=3 * 10**9)
    clock = RoundClock(memory, {"peak_memory_bytes": 2e9})
    metrics = asyncio.run(clock.metrics([], num_producers=1))
    assert metrics["planned_peak_memory_bytes"] == 2e9 and metrics["peak_memory_bytes"] == 3e9
    step = dataclasses.replace(a_step(a_log().state), metrics=metrics)
    clock.say_above_plan(step)
    clock.say_above_plan(step)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "step 1: memory of all processes: 3.0 GB, planned 2.0 GB. Other steps may take more still; "
        "train.tokens_per_microbatch is the cheapest to lower"
    ]
