"""Run by test_vllm.py in a process of its own: start vLLM once, with adapters, and check what is theirs."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rollouts.engines.engine import EngineError
from rollouts.engines.vllm.adapter_slot import check_applied
from tests.engine.bench import Bench
from tests.engine.check_engine import adapters_change_as_whole_weights_do

BROKEN = {
    "a rank that is too large": "rank",
    "not weights": "header",
    "other weights than sealed": "the engine read adapter",
    "an unknown layer": "cannot adapt model.layers.9",
}


async def an_engine_that_answers_with_the_base_model_is_noticed(bench: Bench) -> None:
    real = bench.engine.llm.generate

    def forgetful(prompt: Any, parameters: Any, request_id: str, lora_request: Any = None) -> Any:
        return real(prompt, parameters, request_id)

    with (
        bench.replaced("generate", forgetful),
        pytest.raises(EngineError, match="answers with the base model"),
    ):
        await check_applied(bench.engine.llm)


async def check(base: Path, scratch: Path) -> None:
    dtype = os.environ.get("DTYPE", "float32")  # on GPUs vLLM has kernels for adapters of 16 bits alone
    bench = Bench(base, scratch, adapters=True, enable_lora=True, dtype=dtype)
    try:
        first = await bench.start()
        await bench.assert_serving()
        await adapters_change_as_whole_weights_do(bench, first, BROKEN)
        await an_engine_that_answers_with_the_base_model_is_noticed(bench)
    finally:
        await bench.engine.stop()
    print("all checks passed")


if __name__ == "__main__":
    asyncio.run(check(Path(sys.argv[1]), Path(sys.argv[2])))
