"""Run by test_vllm_lora.py in a process of its own: start vLLM once, with adapters, and check what is theirs.

Replies are endless, as in check_engine.py, so a swap falls inside them for certain.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollouts.chat.chat_tokens import ChatTokens
from rollouts.engines.engine import EngineError, EngineUnusable, Generation, UpdateMode, WeightUpdate
from rollouts.engines.vllm_engine import VllmEngine
from rollouts.engines.vllm_lora import check_applied
from storage.objects.digests import verify_folder
from storage.records import Message, Sampling
from tests.engine.adapters import RANK, an_adapter, logprobs_of, spoilt_adapter
from tests.engine.policies import a_policy

LONG = Sampling(max_tokens=200)
SHORT = Sampling(max_tokens=40)


class Bench:
    """One engine on a base model, and the policies it has served: version 0 is the base, the others adapters."""

    def __init__(self, base: Path, scratch: Path) -> None:
        tokens = ChatTokens.load(base)
        self.scratch = scratch
        self.prompt = tokens.prompt([Message(role="user", content="37+05=")])
        self.base = a_policy(base, scratch / "base", end_id=tokens.end_id, seed=1)
        self.adapters = [an_adapter(self.base, scratch / f"adapter{seed}", seed=seed) for seed in (1, 2)]
        self.folders = {0: self.base}
        self.gaps: list[float] = []
        self.engine = VllmEngine(
            max_model_len=256,
            seed=0,
            update_mode="keep",
            clear_cache_on_reload=True,
            arguments={"dtype": "float32", "enforce_eager": True, "max_num_seqs": 16, "block_size": 32},
            lora_rank=RANK,
            base_folder=self.base,
        )
        self._names = (f"request{number}" for number in itertools.count())

    @property
    def version(self) -> int:
        return max(self.folders)

    async def load(self, folder: Path) -> WeightUpdate:
        update = await self.engine.load_policy(folder, self.version + 1)
        self.folders[self.version + 1] = folder
        return update

    async def generate(self, sampling: Sampling = SHORT) -> Generation:
        return await self.engine.generate(self.prompt, sampling=sampling, request_id=next(self._names))

    def check(self, reply: Generation, *versions: int) -> None:
        """The reply has tokens of exactly these versions, each with its policy's logprob, and echoes their adapters."""
        assert [version for version, _ in itertools.groupby(reply.weight_versions)] == list(versions)
        expected = {v: logprobs_of(self.base, self.folders[v], self.prompt, reply.token_ids) for v in versions}
        wanted = [expected[version][index] for index, version in enumerate(reply.weight_versions)]
        gap = float(np.abs(np.array(reply.logprobs) - wanted).mean())
        assert gap < 1e-4, f"engine and trainer differ by {gap} nats per token"
        self.gaps.append(gap)
        echoed = {v: verify_folder(self.folders[v]) for v in versions if self.folders[v] != self.base}
        assert reply.adapters == echoed


async def adapters_change_under_running_requests(bench: Bench, mode: UpdateMode, folder: Path) -> None:
    bench.engine.update_mode, old = mode, bench.version
    running = [asyncio.create_task(bench.generate(LONG)) for _ in range(6)]
    await asyncio.create_task(bench.generate())  # its turn comes after theirs
    assert not any(request.done() for request in running)
    update = await bench.load(folder)
    for reply in await asyncio.gather(*running):
        bench.check(reply, *([old] if mode == "wait" else [old, bench.version]))
    bench.check(await bench.generate(), bench.version)
    assert update.mode == mode
    print(f"{mode}: paused {update.paused_seconds:.3f} s")


async def an_adapter_that_cannot_be_loaded_leaves_the_old_one_serving(bench: Bench) -> None:
    for number, (how, reason) in enumerate(
        [
            ("a rank that is too large", "rank"),
            ("not weights", "header"),
            ("altered since it was sealed", "the engine read adapter"),
            ("a layer the model has not", "cannot adapt model.layers.9"),
        ]
    ):
        broken = spoilt_adapter(bench.base, bench.adapters[0], bench.scratch / f"broken{number}", how)
        running = asyncio.create_task(bench.generate(LONG))
        await asyncio.create_task(bench.generate())
        with pytest.raises(EngineError, match=f"(?s)policy {bench.version} serves on.*{reason}") as error:
            await bench.engine.load_policy(broken, bench.version + 1)
        assert not isinstance(error.value, EngineUnusable), how
        bench.check(await running, bench.version)
        bench.check(await bench.generate(), bench.version)


async def an_engine_that_answers_with_the_base_model_is_noticed(bench: Bench) -> None:
    real = bench.engine.llm.generate

    def forgetful(prompt: Any, parameters: Any, request_id: str, lora_request: Any = None) -> Any:
        return real(prompt, parameters, request_id)

    bench.engine.llm.generate = forgetful
    with pytest.raises(EngineError, match="answers with the base model"):
        await check_applied(bench.engine.llm)
    del bench.engine.llm.generate


async def check(base: Path, scratch: Path) -> None:
    bench = Bench(base, scratch)
    first, second = bench.adapters
    try:
        checksums = {bench.base: await bench.engine.start(bench.base, 0)}
        bench.check(await bench.generate(), 0)
        await adapters_change_under_running_requests(bench, "keep", first)
        await adapters_change_under_running_requests(bench, "keep", second)
        await adapters_change_under_running_requests(bench, "abort", first)
        await adapters_change_under_running_requests(bench, "wait", second)
        await an_adapter_that_cannot_be_loaded_leaves_the_old_one_serving(bench)
        await adapters_change_under_running_requests(bench, "keep", bench.base)
        for folder in [first, second, bench.base] * 2:
            update = await bench.load(folder)
            assert checksums.setdefault(folder, update.checksum) == update.checksum
            bench.check(await bench.generate(), bench.version)
        assert len(set(checksums.values())) == 3
        await an_engine_that_answers_with_the_base_model_is_noticed(bench)
    finally:
        await bench.engine.stop()
    print(f"all checks passed; engine and trainer differ by {np.mean(bench.gaps):.1e} nats per token")


if __name__ == "__main__":
    asyncio.run(check(Path(sys.argv[1]), Path(sys.argv[2])))
