"""Run by test_vllm.py in a process of its own: the experts that vLLM says it gave a token are those it computed with.

In float32 the trainer's routers choose the same ones by themselves, under the weights that sampled the next token.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from pathlib import Path

import numpy as np
import torch

from rollouts.chat.chat import Chat
from rollouts.engines.engine import Generation, UpdateMode
from storage.records import Message, Routes, Sampling
from tests.engine.bench import LONG, Bench
from tests.engine.policies import with_experts
from trainers.data.packing import position_ids
from trainers.model.layout import Layout
from trainers.model.model import load_model


def as_array(routes: Routes | None) -> np.ndarray:
    """Shape [tokens, layers, choices], choices sorted: their order says nothing."""
    assert routes is not None
    shape = (routes.num_tokens, routes.layers, routes.choices)
    return np.sort(np.frombuffer(routes.ids, f"<u{routes.id_bytes}").reshape(shape), -1)


@torch.no_grad()
def chosen_by(folder: Path, ids: list[int]) -> np.ndarray:
    """The experts that the trainer's routers choose by themselves, as `as_array`."""
    model = load_model(folder)
    layout = Layout([len(ids)], device=torch.device("cpu"))
    model.hidden(torch.tensor(ids), position_ids([len(ids)]), layout)
    return np.stack([np.sort(routed.chosen.numpy(), -1) for routed in model.routers.seen], 1)


def assert_routed(bench: Bench, prompt: list[int], reply: Generation) -> None:
    """Every token but the last has the experts of the policy that sampled the token after it."""
    ids, found = [*prompt, *reply.token_ids], as_array(reply.routes)
    version_T = np.array([reply.weight_versions[0]] * (len(prompt) - 1) + reply.weight_versions)
    assert len(found) == len(ids) - 1 == len(version_T)
    for version in set(reply.weight_versions):
        expected = chosen_by(bench.folders[version], ids[:-1])
        assert (found[version_T == version] == expected[version_T == version]).all()
    assert len(np.unique(found)) > 2, "not one and the same everywhere"


async def every_token_has_its_experts_whatever_is_cached_or_computed_in_parts(bench: Bench) -> None:
    long = list(itertools.islice(itertools.cycle(bench.prompt), 150))  # longer than a step, and than a block
    prompts = [bench.prompt, long, long, [*long, *bench.prompt]]
    for _ in range(2):  # all of a prompt but its last block is cached the second time
        replies = await asyncio.gather(*(bench.generate(Sampling(max_tokens=30), prompt) for prompt in prompts))
        for prompt, reply in zip(prompts, replies, strict=True):
            assert_routed(bench, prompt, reply)


async def a_request_that_is_preempted_and_computed_again_has_them_too(bench: Bench) -> None:
    """The cache holds 1,536 tokens, and these want twice as many."""
    for reply in await asyncio.gather(*(bench.generate(LONG) for _ in range(16))):
        assert_routed(bench, bench.prompt, reply)


async def a_reply_that_is_cut_has_those_of_what_is_left(bench: Bench) -> None:
    sampling = Sampling(max_tokens=40, seed=7)
    whole, cut = await asyncio.gather(
        bench.generate(sampling), bench.generate(sampling, until=lambda ids: 9 if len(ids) >= 9 else 0)
    )
    assert cut.token_ids == whole.token_ids[:9]
    assert (as_array(cut.routes) == as_array(whole.routes)[: len(bench.prompt) + 8]).all()


async def a_swap_of_weights_changes_experts_from_the_next_token_on(bench: Bench, mode: UpdateMode) -> None:
    bench.engine.update_mode = mode
    async with bench.running(4) as requests:
        await bench.load(bench.other)
        replies = await asyncio.gather(*requests)
    for reply in replies:
        assert len(set(reply.weight_versions)) == (1 if mode == "wait" else 2)
        assert_routed(bench, bench.prompt, reply)


async def turns_record_each_token_of_a_conversation_once(bench: Bench) -> None:
    chat = Chat(
        engine=bench.engine,
        tokens=bench.tokens,
        sampling=Sampling(max_tokens=20),
        max_model_len=256,
        request_id="chat",
    )
    for question in ("37+05=", "12+12=", "10+10="):
        await chat.ask(question)
    edited = [Message(role="user", content="37+05="), Message(role="assistant", content="1"), chat.messages[2]]
    await chat.complete(edited)
    for sequence in (0, 1):
        turns = [turn for turn in chat.turns if turn.sequence_idx == sequence]
        ids = [token for turn in turns for token in (*turn.context_ids, *turn.sampled_ids)]
        found = np.concatenate([as_array(turn.routes) for turn in turns])
        assert (found == chosen_by(bench.serving, ids[:-1])).all()


async def check(base: Path, scratch: Path) -> None:
    (scratch / "experts").mkdir()
    limits = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 48}
    bench = Bench(with_experts(base, scratch / "base"), scratch / "experts", captures_routes=True, **limits)
    try:
        await bench.start()
        await every_token_has_its_experts_whatever_is_cached_or_computed_in_parts(bench)
        await a_request_that_is_preempted_and_computed_again_has_them_too(bench)
        await a_reply_that_is_cut_has_those_of_what_is_left(bench)
        modes: tuple[UpdateMode, ...] = ("keep", "abort", "wait")
        for mode in modes:
            await a_swap_of_weights_changes_experts_from_the_next_token_on(bench, mode)
        await turns_record_each_token_of_a_conversation_once(bench)
    finally:
        await bench.engine.stop()
    print("all checks passed")


if __name__ == "__main__":
    asyncio.run(check(Path(sys.argv[1]), Path(sys.argv[2])))
