"""One real engine, policies that take turns, and what must be true of all of them at any time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollouts.chat.chat_tokens import ChatTokens
from rollouts.engines.engine import EngineError, EngineUnusable, Generation, WeightUpdate
from rollouts.engines.vllm.vllm_engine import VllmEngine
from settings.engine import EngineSettings
from storage.objects.digests import verify_folder
from storage.policies.adapters import has_adapter
from storage.records import Message, Sampling
from tests.engine.policies import RANK, a_policy, an_adapter, logprobs_by_version

TOLERANCE = 2e-3
"""Of a logprob, between vLLM in float32 and transformers in it."""
_WIDEST = {"float32": (TOLERANCE, 1e-4), "bfloat16": (0.1, 0.02)}
"""The same of one token and of the mean, by the type that vLLM computes in. Policies differ by nats."""
LONG = Sampling(max_tokens=200)
MOMENT = Sampling(max_tokens=12)
_STARTS_FAST: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 16, "block_size": 32}
"""Arguments of vLLM for a tiny model."""
if torch.cuda.is_available():  # else vLLM makes millions of blocks for the keys and values of a whole GPU
    _STARTS_FAST |= {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 2**28}


class Bench:
    """One engine, two policies that take turns, and the version that must be served."""

    def __init__(
        self,
        base: Path,
        scratch: Path,
        *,
        adapters: bool = False,
        guided_decoding: bool = False,
        captures_routes: bool = False,
        **arguments: Any,
    ) -> None:
        """With `adapters` version 0 is a base model and the two policies are adapters of it.

        `arguments` go to vLLM, beside those with which a tiny model starts fast.
        """
        self.tokens = tokens = ChatTokens.load(base)
        self.base, self.scratch = base, scratch
        self.prompt = tokens.prompt([Message(role="user", content="37+05=")])
        self.policies = [a_policy(base, scratch / f"policy{s}", end_id=tokens.end_id, seed=s) for s in (1, 2)]
        self.folders = {0: self.policies[0]}
        if adapters:
            self.policies = [an_adapter(self.folders[0], scratch / f"adapter{seed}", seed=seed) for seed in (1, 2)]
        self.version = 0
        vllm = _STARTS_FAST | arguments
        self._widest, self._widest_mean = _WIDEST[vllm["dtype"]]
        self.engine = VllmEngine(
            EngineSettings(max_model_len=256, guided_decoding=guided_decoding, vllm=vllm),
            seed=0,
            captures_routes=captures_routes,
            **({"lora_rank": RANK, "base_folder": self.folders[0]} if adapters else {}),
        )
        self._names = (f"request{number}" for number in itertools.count())

    @property
    def serving(self) -> Path:
        return self.folders[self.version]

    @property
    def other(self) -> Path:
        """The policy that is not served."""
        return self.policies[self.serving == self.policies[0]]

    async def start(self) -> str:
        return await self.engine.start(self.folders[0], 0)

    async def load(self, folder: Path) -> WeightUpdate:
        """The next version."""
        wanted = max(self.folders) + 1
        self.folders[wanted] = folder
        update = await self.engine.load_policy(folder, wanted)
        self.version = wanted
        return update

    async def fail_to_load(self, folder: Path, reason: str) -> None:
        """The error names both versions."""
        with pytest.raises(EngineError, match=reason) as error:
            await self.load(folder)
        assert not isinstance(error.value, EngineUnusable)
        assert f"policy {max(self.folders)} " in str(error.value), error.value
        assert f"policy {self.version} serves on" in str(error.value), error.value

    async def generate(
        self, sampling: Sampling = MOMENT, prompt: list[int] | None = None, **options: Any
    ) -> Generation:
        return await self.engine.generate(
            prompt or self.prompt, sampling=sampling, request_id=next(self._names), **options
        )

    @contextlib.asynccontextmanager
    async def running(self, number: int = 4, sampling: Sampling = LONG) -> AsyncIterator[list[asyncio.Task[Any]]]:
        """Long requests that are under way."""
        requests = [asyncio.create_task(self.generate(sampling)) for _ in range(number)]
        await asyncio.create_task(self.generate())  # its turn comes after theirs, so it is the last to be sent
        assert not any(request.done() for request in requests)
        yield requests
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)

    def assert_spanning(self, reply: Generation, *versions: int) -> None:
        """The reply has tokens of exactly these versions, in this order, each with its policy's logprob, and names the
        adapters among them."""
        assert len(reply.token_ids) == len(reply.logprobs) == len(reply.weight_versions)
        assert [version for version, _ in itertools.groupby(reply.weight_versions)] == list(versions)
        expected = logprobs_by_version(self.folders, self.prompt, reply.token_ids, reply.weight_versions)
        assert reply.logprobs == pytest.approx(expected, abs=self._widest)
        assert np.abs(np.subtract(reply.logprobs, expected)).mean() < self._widest_mean, "nats per token"
        used = {version: self.folders[version] for version in versions}
        assert reply.adapters == {v: verify_folder(folder) for v, folder in used.items() if has_adapter(folder)}

    async def assert_serving(self) -> None:
        """Version and weights belong together, and nothing is paused."""
        assert not await self.engine.llm.is_paused()
        self.assert_spanning(await self.generate(), self.version)

    @contextlib.contextmanager
    def replaced(self, method: str, stand_in: Any) -> Iterator[None]:
        """A method of vLLM's client is another one."""
        setattr(self.engine.llm, method, stand_in)
        try:
            yield
        finally:
            delattr(self.engine.llm, method)
