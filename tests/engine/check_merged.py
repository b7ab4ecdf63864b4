"""Run by test_vllm.py in a process of its own: start vLLM once, on CPUs, where each adapter is merged with the base."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.engine.bench import Bench
from tests.engine.check_engine import adapters_change_as_whole_weights_do

BROKEN = {
    "not weights": "header",
    "other weights than sealed": "the engine read adapter",
    "an unknown layer": "no weight of model.layers.9",
}


async def a_start_on_an_adapter_serves_it(base: Path, scratch: Path) -> None:
    """As after a resume."""
    scratch.mkdir()
    bench = Bench(base, scratch, adapters=True)
    bench.folders[0] = bench.policies[0]
    try:
        await bench.start()
        await bench.assert_serving()
    finally:
        await bench.engine.stop()


async def check(base: Path, scratch: Path) -> None:
    bench = Bench(base, scratch, adapters=True)
    try:
        first = await bench.start()
        assert not bench.engine._has_slot
        await bench.assert_serving()
        await adapters_change_as_whole_weights_do(bench, first, BROKEN)
    finally:
        await bench.engine.stop()
    await a_start_on_an_adapter_serves_it(base, scratch / "resumed")
    print("all checks passed")


if __name__ == "__main__":
    asyncio.run(check(Path(sys.argv[1]), Path(sys.argv[2])))
