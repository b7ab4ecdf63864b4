"""Run by test_vllm.py in a process of its own: log-probabilities that do not depend on the batch, on one engine.

The last line has a digest of all replies: engines with other limits must print the same one.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from rollouts.engines.engine import Generation
from rollouts.engines.vllm.batch_probe import check_batches
from rollouts.engines.vllm.vllm_engine import VllmEngine
from settings.engine import EngineSettings
from settings.errors import InvalidInput
from storage.objects.digests import sha256_of_json
from storage.records import Sampling

LIMITS: dict[str, dict[str, Any]] = {
    "wide": {"max_num_seqs": 64, "enable_prefix_caching": True, "block_size": 32},
    "narrow": {"max_num_seqs": 5, "enable_prefix_caching": False, "max_num_batched_tokens": 48, "block_size": 64},
}
REPLIES = 40
NEW = 60
"""Most tokens of a reply; the model has learnt nothing, and ends one in about sixteen."""


class Asked:
    """The same prompts with the same seeds, whatever the engine."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        draws = random.Random(0)
        self.prompts = [[draws.randrange(3, 11) for _ in range(draws.choice([3, 17, 60, 150]))] for _ in range(REPLIES)]
        self._names = (f"request{number}" for number in itertools.count())

    async def reply(self, number: int) -> tuple[list[int], list[float]]:
        generation: Generation = await self.engine.generate(
            self.prompts[number], sampling=Sampling(max_tokens=NEW, seed=number), request_id=next(self._names)
        )
        return generation.token_ids, generation.logprobs

    async def replies(self, order: list[int]) -> dict[int, tuple[list[int], list[float]]]:
        return dict(zip(order, await asyncio.gather(*map(self.reply, order)), strict=True))


async def bits_belong_to_their_token(asked: Asked, folder: Path) -> str:
    """In any batch, in any order, alone, and in a reply that is computed anew in its middle."""
    order = list(range(REPLIES))
    together = await asked.replies(order)
    assert sum(len(token_ids) for token_ids, _ in together.values()) > 8 * REPLIES
    random.Random(1).shuffle(order)
    assert await asked.replies(order) == together, "another order"
    for number in order[:6]:
        assert await asked.reply(number) == together[number], "alone"
    for version, (mode, clear) in enumerate(itertools.product(("keep", "abort"), (True, False)), start=1):
        asked.engine.update_mode, asked.engine.clear_cache_on_reload = mode, clear
        running = asyncio.create_task(asked.replies(order))
        await asked.reply(0)
        await asked.engine.load_policy(folder, version)  # equal weights
        assert await running == together, f"interrupted, {mode}, cache {'cleared' if clear else 'kept'}"
    return sha256_of_json([together[number] for number in range(REPLIES)])


async def the_probe_names_a_layer_of_an_engine_left_alone(base: Path) -> None:
    """On a machine whose products and attention are faithful by themselves this would have to be another check."""
    arguments = {"dtype": os.environ["DTYPE"], "enforce_eager": True, **LIMITS["wide"]}
    engine = VllmEngine(EngineSettings(max_model_len=256, vllm=arguments), seed=0)
    try:
        await engine.start(base, 0)
        with pytest.raises(
            InvalidInput, match=r"does not hold on this machine: model\.layers\.\d.* computes other bits"
        ):
            await check_batches(engine.generate, engine._layers_of, max_model_len=256)
    finally:
        await engine.stop()
    print("all checks passed")


async def check(base: Path, limits: str) -> None:
    if limits == "none":
        return await the_probe_names_a_layer_of_an_engine_left_alone(base)
    settings = EngineSettings(max_model_len=256, vllm={"dtype": os.environ["DTYPE"], **LIMITS[limits]})
    engine = VllmEngine(settings, seed=0, reproducible=True)
    try:
        await engine.start(base, 0)
        digest = await bits_belong_to_their_token(Asked(engine), base)
    finally:
        await engine.stop()
    print("all checks passed")
    print(digest)


if __name__ == "__main__":
    asyncio.run(check(Path(sys.argv[1]), os.environ["LIMITS"]))
