"""Run by test_vllm.py in a process of its own: one model on an engine of one part, then on one of two parts.

Each part of the second is a process with half of every layer. What a caller sees must be the same.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from rollouts.engines.engine import EngineError, Generation
from rollouts.engines.vllm.vllm_engine import VllmEngine
from rollouts.engines.vllm.worker_extension import results
from settings.engine import EngineSettings
from storage.records import Sampling
from tests.engine.bench import Bench
from tests.engine.check_engine import (
    IN_TIME,
    a_policy_that_cannot_be_loaded_leaves_the_old_one_serving,
    broken_policies,
    running_requests_span_the_swap,
    weights_come_by_broadcast,
)

GREEDY = Sampling(max_tokens=100, temperature=0.0)


async def greedy_replies(bench: Bench) -> list[Generation]:
    """One of each policy; the first is served before and after."""
    replies = []
    for folder in (bench.policies[1], bench.policies[0]):
        await bench.load(folder)
        replies.append(await bench.generate(GREEDY))
    return replies


async def each_part_answers_for_its_own_weights(bench: Bench) -> None:
    answers = results(await bench.engine.llm.collective_rpc("weight_digests"))
    assert len(answers) == 2
    shards = [{name.removeprefix("model."): value for name, value in answer.items()} for answer in answers]
    assert shards[0].keys() == shards[1].keys()
    assert shards[0]["layers.0.self_attn.qkv_proj.bias"] != shards[1]["layers.0.self_attn.qkv_proj.bias"]
    assert shards[0]["norm.weight"] == shards[1]["norm.weight"], "what is not divided both have"


async def a_killed_part_fails_everything_at_once(bench: Bench) -> None:
    parts = [process for process in psutil.Process().children(recursive=True) if "Worker" in process.name()]
    assert len(parts) == 2, parts
    async with bench.running(2) as requests, asyncio.timeout(IN_TIME):
        os.kill(parts[1].pid, signal.SIGKILL)
        for waiting in requests:
            with pytest.raises(EngineError):
                await waiting
        with pytest.raises(EngineError):
            await bench.load(bench.other)


async def parts_started_by_ray_are_refused(bench: Bench) -> None:
    arguments = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    engine = VllmEngine(EngineSettings(max_model_len=256, vllm=arguments), seed=0)
    with pytest.raises(ValueError, match=r'distributed_executor_backend = "ray": .* leave it out'):
        await engine.start(bench.policies[0], 0)


async def check(base: Path, scratch: Path) -> None:
    (scratch / "whole").mkdir()
    (scratch / "divided").mkdir()
    whole = Bench(base, scratch / "whole")
    first = await whole.start()
    expected = await greedy_replies(whole)
    await whole.engine.stop()

    divided = Bench(base, scratch / "divided", tensor_parallel_size=2)
    await parts_started_by_ray_are_refused(divided)
    started = time.monotonic()
    checksum = await divided.start()
    print(f"two parts start in {time.monotonic() - started:.0f} s")
    try:
        assert checksum != first, "of two halves each"
        for one, other in zip(expected, await greedy_replies(divided), strict=True):
            assert one.token_ids == other.token_ids and one.weight_versions == other.weight_versions
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        await divided.load(divided.policies[0])
        await each_part_answers_for_its_own_weights(divided)
        await running_requests_span_the_swap(divided, "keep", True)
        await weights_come_by_broadcast(divided, parts=2)
        await a_policy_that_cannot_be_loaded_leaves_the_old_one_serving(divided, broken_policies("4192 of 6240"))
        await a_killed_part_fails_everything_at_once(divided)
    finally:
        await divided.engine.stop()
    print("all checks passed")


if __name__ == "__main__":
    asyncio.run(check(Path(sys.argv[1]), Path(sys.argv[2])))
