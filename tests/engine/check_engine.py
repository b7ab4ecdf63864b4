"""Run by test_vllm.py in a process of its own: start vLLM once and check everything about it."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollouts.chat_tokens import ChatTokens
from rollouts.engine import EngineError
from rollouts.vllm_engine import VllmEngine
from storage.digests import seal_folder
from storage.records import Message, Sampling


def other_policy(base: Path, folder: Path) -> Path:
    """The same model with every weight moved a little."""
    shutil.copytree(base, folder)
    tensors = load_file(str(folder / "model.safetensors"))
    generator = torch.Generator().manual_seed(1)
    moved = {name: t + 0.05 * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}
    save_file(moved, str(folder / "model.safetensors"), metadata={"format": "pt"})
    seal_folder(folder)
    return folder


def reference_logprobs(folder: Path, prompt: list[int], reply: list[int]) -> list[float]:
    """What transformers says the reply's tokens are worth."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    with torch.no_grad():
        log_p = model(torch.tensor([prompt + reply])).logits[0].log_softmax(-1)
    return [float(log_p[len(prompt) - 1 + i, token]) for i, token in enumerate(reply)]


async def check(base: Path, scratch: Path) -> None:
    tokens = ChatTokens.load(base)
    prompt = tokens.prompt([Message(role="user", content="37+05=")])
    engine = VllmEngine(
        max_model_len=256,
        seed=0,
        clear_cache_on_reload=True,
        arguments={"dtype": "float32", "enforce_eager": True, "max_num_seqs": 8},
    )
    first = await engine.start(base, 3)
    try:
        reply = await engine.generate(prompt, sampling=Sampling(max_tokens=16), request_id="a")
        assert set(reply.weight_versions) == {3}, "the version given at start is stamped on every token"
        assert len(reply.token_ids) == len(reply.logprobs) == len(reply.weight_versions)
        assert reply.logprobs == pytest.approx(reference_logprobs(base, prompt, reply.token_ids), abs=1e-3)

        other = other_policy(base, scratch / "other")
        # Forbid the end token's early arrival by sampling long and hot, so that the swap falls inside replies.
        long = Sampling(max_tokens=240, temperature=1.5)
        running = [asyncio.create_task(engine.generate(prompt, sampling=long, request_id=f"l{i}")) for i in range(8)]
        await asyncio.wait(running, timeout=0.3)
        second = await engine.load_policy(other, 4)
        assert second != first, "the checksum follows the weights"
        replies = await asyncio.gather(*running)
        for spanning in replies:
            assert spanning.weight_versions == sorted(spanning.weight_versions), "versions only grow along a reply"
        after = await engine.generate(prompt, sampling=Sampling(max_tokens=16), request_id="b")
        assert set(after.weight_versions) == {4}
        assert after.logprobs == pytest.approx(reference_logprobs(other, prompt, after.token_ids), abs=1e-3)

        assert await engine.load_policy(base, 5) == first, "the same weights have the same checksum"

        broken = scratch / "broken"
        shutil.copytree(base, broken)
        (broken / "model.safetensors").write_bytes(b"not weights")
        with pytest.raises(EngineError, match="the old one serves"):
            await engine.load_policy(broken, 6)
        still = await engine.generate(prompt, sampling=Sampling(max_tokens=16), request_id="c")
        assert set(still.weight_versions) == {5}, "a failed load leaves the old version serving"
        assert still.logprobs == pytest.approx(reference_logprobs(base, prompt, still.token_ids), abs=1e-3)
        print("replies that span the swap:", sum(len(set(r.weight_versions)) == 2 for r in replies))
    finally:
        await engine.stop()
    print("all checks passed")


if __name__ == "__main__":
    asyncio.run(check(Path(sys.argv[1]), Path(sys.argv[2])))
