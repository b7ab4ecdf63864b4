"""Run by test_vllm.py in a process of its own: start vLLM once, on CPUs, where each adapter is merged with the base."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.engine.bench import Bench
from tests.engine.check_engine import (
    a_policy_that_cannot_be_loaded_leaves_the_old_one_serving,
    equal_weights_have_equal_checksums_and_others_do_not,
    running_requests_span_the_swap,
)

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
        for mode in ("keep", "keep", "abort", "wait"):
            await running_requests_span_the_swap(bench, mode, True)
        bench.engine.update_mode = "keep"
        await a_policy_that_cannot_be_loaded_leaves_the_old_one_serving(bench, BROKEN)
        await running_requests_span_the_swap(bench, "keep", True, folder=bench.folders[0])
        await equal_weights_have_equal_checksums_and_others_do_not(bench, first)
    finally:
        await bench.engine.stop()
    await a_start_on_an_adapter_serves_it(base, scratch / "resumed")
    print("all checks passed")


if __name__ == "__main__":
    asyncio.run(check(Path(sys.argv[1]), Path(sys.argv[2])))
