"""Run by test_vllm.py in a process of its own, on a GPU: an engine that sleeps and is woken, again and again."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
import torch

from rollouts.engines.engine import EngineError
from storage.policies.adapters import has_adapter
from tests.engine.bench import Bench
from tests.engine.policies import spoilt

MOST_HELD = 2**30
"""Bytes of the GPU that a sleeping engine may have."""


def _held() -> int:
    """Bytes of the GPU in use, by whatever process."""
    free, total = torch.cuda.mem_get_info()
    return total - free


async def requests_span_a_sleep(bench: Bench) -> None:
    """Under the tokens of a reply: those of before keep their version, and no log-probability is of other weights."""
    old = bench.version
    async with bench.running() as requests:
        awake = _held()
        await bench.engine.sleep()
        asleep = _held()
        assert asleep < awake, "the cache alone is gigabytes"
        late = asyncio.create_task(bench.generate())
        await bench.load(bench.other)
        for reply in await asyncio.gather(*requests):
            bench.assert_spanning(reply, old, bench.version)
        bench.assert_spanning(await late, bench.version)
    await bench.assert_serving()
    print(f"{awake / 2**30:.2f} GiB awake, {asleep / 2**30:.2f} GiB asleep")


async def the_policy_of_before_serves_after_a_sleep_without_a_new_one(bench: Bench) -> None:
    for _ in range(3):
        await bench.engine.sleep()
        await bench.engine.wake()
        await bench.assert_serving()


async def a_policy_that_cannot_be_loaded_wakes_the_old_one(bench: Bench) -> None:
    how = "not weights" if has_adapter(bench.other) else "cut short"
    broken = spoilt(bench.other, bench.scratch / "broken", how)
    await bench.engine.sleep()
    with pytest.raises(EngineError, match=f"policy {bench.version} serves on"):
        await bench.load(broken)
    await bench.assert_serving()


async def the_memory_is_another_ones_meanwhile(bench: Bench, *, without: int) -> None:
    """What another process writes where weights and cache were does not show in them. `without` the engine so many
    bytes were in use."""
    await bench.engine.sleep()
    held = _held() - without
    assert held <= MOST_HELD, f"{held / 2**30:.2f} GiB of a sleeping engine"
    free, _ = torch.cuda.mem_get_info()
    spoiler = torch.full((int(0.9 * free),), 0x7F, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    del spoiler
    torch.cuda.empty_cache()
    await bench.load(bench.other)
    await bench.assert_serving()


async def check(base: Path, scratch: Path, *, adapters: bool, eager: bool, dtype: str) -> None:
    sleeps = {"enable_sleep_mode": True, "kv_cache_memory_bytes": 2**32, "enforce_eager": eager, "dtype": dtype}
    without = _held()  # with this process's own context
    bench = Bench(base, scratch, adapters=adapters, **sleeps)
    await bench.start()
    try:
        await requests_span_a_sleep(bench)
        await the_policy_of_before_serves_after_a_sleep_without_a_new_one(bench)
        await a_policy_that_cannot_be_loaded_wakes_the_old_one(bench)
        await the_memory_is_another_ones_meanwhile(bench, without=without)
        for _ in range(10):
            await bench.engine.sleep()
            await bench.load(bench.other)
        await bench.assert_serving()
    finally:
        await bench.engine.stop()


async def main(base: Path, scratch: Path) -> None:
    kinds = ((False, False, "float32"), (False, False, "bfloat16"), (False, True, "float32"), (True, True, "bfloat16"))
    for adapters, eager, dtype in kinds:  # CUDA graphs keep the addresses of weights
        folder = scratch / f"{adapters}-{eager}-{dtype}"
        folder.mkdir()
        print(f"{adapters=}, {eager=}, {dtype}", flush=True)
        await check(base, folder, adapters=adapters, eager=eager, dtype=dtype)
    print("all checks passed")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
