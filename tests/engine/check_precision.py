"""Run by test_vllm.py in a process of its own: engines that compute otherwise than the trainer, on CPUs.

Quantised weights are served, and how far they are off is measured; drafted tokens, whose log-probabilities vLLM's CPU
build reports wrongly, are refused; an adapter merged in bfloat16 is as near as any policy in it.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest

from rollouts.production.engine_choice import QUANTISED_ON_CPUS
from settings.errors import InvalidInput
from settings.train import SUSPICIOUS_GAPS, TrainSettings
from storage.records import Sampling
from tests.engine.bench import Bench
from tests.engine.policies import logprobs_of

N_GRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


async def gaps(bench: Bench) -> list[float]:
    """Mean |engine − transformers in float32|, nats per token, of the base and of a policy loaded after it."""
    measured = []
    try:
        await bench.start()
        for folder in (None, bench.policies[0], bench.policies[1]):
            if folder is not None:
                await bench.load(folder)
            replies = [await bench.generate(Sampling(max_tokens=40)) for _ in range(4)]
            differences = [
                np.abs(np.subtract(reply.logprobs, logprobs_of(bench.serving, bench.prompt, reply.token_ids))).mean()
                for reply in replies
            ]
            measured.append(float(np.mean(differences)))
    finally:
        await bench.engine.stop()
    return measured


async def check(base: Path, scratch: Path) -> None:
    folders = {name: scratch / name for name in ("plain", "quantised", "drafts", "merged")}
    for folder in folders.values():
        folder.mkdir()
    plain = await gaps(Bench(base, folders["plain"], dtype="bfloat16"))
    quantised = await gaps(Bench(base, folders["quantised"], dtype="bfloat16", quantization=QUANTISED_ON_CPUS))
    merged = await gaps(Bench(base, folders["merged"], adapters=True, dtype="bfloat16"))
    print(f"nats per token in bfloat16: plain {plain}, {QUANTISED_ON_CPUS} {quantised}, merged adapters {merged}")
    assert max(plain + merged) < SUSPICIOUS_GAPS["bfloat16"]
    assert max(plain) < max(quantised) < TrainSettings().max_gap, "off by more than rounding, and not quarantined"
    drafts = Bench(base, folders["drafts"], speculative_config=N_GRAMS)
    with pytest.raises(InvalidInput, match="speculative_config: .*log-probabilit.*leave it out"):
        await drafts.start()
    await drafts.engine.stop()
    print("all checks passed")


if __name__ == "__main__":
    asyncio.run(check(Path(sys.argv[1]), Path(sys.argv[2])))
