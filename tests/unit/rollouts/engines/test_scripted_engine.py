"""The scripted engine answers as the real one does: what an update returns, how a swap inside a reply looks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollouts.engines.engine import EngineError, Generation, WeightUpdate
from rollouts.engines.scripted_engine import ScriptedEngine, random_reply
from storage.records import Sampling
from tests.builders import a_policy_folder


async def test_tokens_after_a_swap_carry_the_new_version(tmp_path: Path):
    digest = a_policy_folder(tmp_path / "new")
    a_policy_folder(tmp_path / "old", weights=b"old")
    engine = ScriptedEngine(lambda *_: [5, 6, 7, 8, 1], num_choices=4)
    assert await engine.start(tmp_path / "old", 3)
    running = asyncio.create_task(engine.generate([2], sampling=Sampling(max_tokens=4), request_id="a"))
    for _ in range(3):
        await asyncio.sleep(0)  # the engine yields once per token
    update = await engine.load_policy(tmp_path / "new", 4)
    assert update == WeightUpdate(checksum=digest, mode="keep", cache_cleared=True, paused_seconds=0.0)
    reply = await running
    assert reply.token_ids == [5, 6, 7, 8] and reply.finish_reason == "length"
    assert reply.weight_versions == [3, 3, 4, 4]
    assert len(reply.logprobs) == 4 and all(logprob < 0 for logprob in reply.logprobs)
    assert engine.running == 0 and engine.peak_running == 1


async def test_a_policy_that_cannot_be_loaded_leaves_the_old_one_serving(tmp_path: Path):
    a_policy_folder(tmp_path / "old")
    engine = ScriptedEngine(lambda *_: [1])
    await engine.start(tmp_path / "old", 3)
    with pytest.raises(EngineError, match="policy 4 from .* was not loaded, policy 3 serves on"):
        await engine.load_policy(tmp_path / "nowhere", 4)
    reply = await engine.generate([2], sampling=Sampling(max_tokens=4), request_id="a")
    assert reply.weight_versions == [3] and reply.finish_reason == "stop"


async def test_what_it_holds_is_answered_by_the_next_policy_or_after_a_release(tmp_path: Path):
    a_policy_folder(tmp_path / "policy")
    engine = ScriptedEngine(lambda *_: [5, 1])

    async def ask() -> asyncio.Task[Generation]:
        request = asyncio.create_task(engine.generate([2], sampling=Sampling(max_tokens=4), request_id="a"))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not request.done()
        return request

    await engine.start(tmp_path / "policy", 3)
    for version in (3, 4):
        await engine.hold()
        request = await ask()
        await (engine.release() if version == 3 else engine.load_policy(tmp_path / "policy", 4))
        reply = await request
        assert reply.weight_versions == [version] * 2 and reply.held_seconds > 0


def test_random_replies_depend_on_prompt_and_seed_alone():
    engine = ScriptedEngine(random_reply(alphabet=[5, 6, 7], end_id=1, longest=3))

    def reply(seed: int, request_id: str) -> list[int]:
        sampling = Sampling(max_tokens=9, seed=seed)
        return asyncio.run(engine.generate([2, 3], sampling=sampling, request_id=request_id)).token_ids

    said = reply(1, "a")
    assert said == reply(1, "b") and said[-1] == 1 and 2 <= len(said) <= 4 and set(said[:-1]) <= {5, 6, 7}
    assert len({tuple(reply(seed, "a")) for seed in range(20)}) > 5
