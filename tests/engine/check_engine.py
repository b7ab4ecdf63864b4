"""Run by test_vllm.py in a process of its own: start vLLM once and check what only the real one can show.

Faults at every step of an update are in `tests/unit/rollouts/engines/vllm/test_vllm_engine.py`.

Replies are endless (see `policies.a_policy`), so a swap falls inside them for certain; a short request that ends says
that every other one has come that far too, since all of them get one token in each of vLLM's steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.weight_broadcast import Broadcast, send
from rollouts.engines.engine import EngineError, UpdateMode, WeightUpdate
from settings.errors import InvalidInput
from storage.log.entries import Policy
from storage.objects.digests import WEIGHTS_FILE, verify_folder
from storage.records import Sampling
from tests.builders import a_broadcast
from tests.engine.bench import LONG, TOLERANCE, Bench
from tests.engine.policies import a_policy, logprobs_of, logprobs_with_kept_cache, spoilt

IN_TIME = 30.0
"""Seconds; generous: what is bounded by it would otherwise never end."""


async def tokens_carry_version_and_logprob_at_any_temperature(bench: Bench) -> None:
    for temperature in (1.0, 0.6, 1.7):
        reply = await bench.generate(Sampling(max_tokens=40, temperature=temperature))
        assert set(reply.weight_versions) == {0}, "the version given at start is stamped on every token"
        assert len(reply.token_ids) == len(reply.logprobs) == len(reply.weight_versions) == 40
        expected = logprobs_of(bench.serving, bench.prompt, reply.token_ids, temperature=temperature)
        assert reply.logprobs == pytest.approx(expected, abs=TOLERANCE), f"log-softmax(logits / {temperature})"
        if temperature != 1.0:
            unscaled = logprobs_of(bench.serving, bench.prompt, reply.token_ids)
            assert reply.logprobs != pytest.approx(unscaled, abs=0.1), "the check would notice a missing division"


async def until_cuts_a_reply_and_changes_none_of_its_tokens(bench: Bench) -> None:
    sampling = Sampling(max_tokens=40, seed=7)
    whole, cut = await asyncio.gather(
        bench.generate(sampling), bench.generate(sampling, until=lambda ids: 9 if len(ids) >= 9 else 0)
    )
    assert (cut.token_ids, cut.finish_reason) == (whole.token_ids[:9], "stop")
    bench.assert_spanning(cut, 0)


async def a_grammar_restricts_the_tokens_and_the_logprobs_are_those_of_what_is_left(bench: Bench) -> None:
    digits = [bench.tokens.tokenizer.convert_tokens_to_ids(digit) for digit in "012"]
    reply = await bench.generate(Sampling(max_tokens=8), constraint='{"regex": "[012]{20}"}')
    assert set(reply.token_ids) <= set(digits) and len(reply.token_ids) == 8
    expected = logprobs_of(bench.serving, bench.prompt, reply.token_ids, among=digits)
    assert reply.logprobs == pytest.approx(expected, abs=TOLERANCE)
    assert reply.logprobs != pytest.approx(logprobs_of(bench.serving, bench.prompt, reply.token_ids), abs=0.1)
    with pytest.raises(InvalidInput, match="vLLM cannot follow this grammar"):
        await bench.generate(constraint='{"regex": "["}')


async def running_requests_span_the_swap(
    bench: Bench, mode: UpdateMode, clear: bool, *, folder: Path | None = None
) -> None:
    """`folder` is the next policy; the one that is not served by default."""
    bench.engine.update_mode, bench.engine.clear_cache_on_reload = mode, clear
    old = bench.version
    async with bench.running(8) as requests:
        update = await bench.load(folder or bench.other)
        replies = await asyncio.gather(*requests)
    assert update.mode == mode and update.cache_cleared == clear and update.paused_seconds > 0
    for reply in replies:
        if mode == "wait":
            bench.assert_spanning(reply, old)  # none was in flight when the weights changed
        elif clear:
            bench.assert_spanning(reply, old, bench.version)
        else:
            assert [version for version, _ in itertools.groupby(reply.weight_versions)] == [old, bench.version]
            expected = logprobs_with_kept_cache(bench.folders, bench.prompt, reply.token_ids, reply.weight_versions)
            # An aborted request finds whole blocks of 32 again; the rest is computed anew.
            if mode == "keep":
                assert reply.logprobs == pytest.approx(expected, abs=TOLERANCE)
    await bench.assert_serving()
    print(f"{mode}, cache {'cleared' if clear else 'kept'}: paused {update.paused_seconds:.3f} s")


async def a_token_is_drawn_by_its_place_whatever_happens_around_it(bench: Bench) -> None:
    """Alone and among others, in a prompt that is computed in parts or found in the cache, across a change of weights
    (to equal ones) that preempts or ends its request; other seeds draw other tokens."""
    asked = [
        (Sampling(max_tokens=60, seed=1000 + number), (bench.prompt * 30)[: 150 * (number % 2)]) for number in range(12)
    ]

    async def together() -> list[list[int]]:
        return [reply.token_ids for reply in await asyncio.gather(*(bench.generate(*each) for each in asked))]

    alone = [(await bench.generate(*each)).token_ids for each in asked]
    assert len({tuple(token_ids) for token_ids in alone}) == 12
    assert await together() == alone
    for mode, clear in itertools.product(("keep", "abort"), (True, False)):
        bench.engine.update_mode, bench.engine.clear_cache_on_reload = mode, clear
        replies = asyncio.create_task(together())
        await bench.generate()
        await bench.load(bench.serving)
        assert await replies == alone


async def what_is_held_is_answered_by_the_next_policy(bench: Bench, mode: UpdateMode) -> None:
    bench.engine.update_mode = mode
    sampling = Sampling(max_tokens=8)
    await bench.engine.hold()
    requests = [asyncio.create_task(bench.generate(sampling)) for _ in range(4)]
    given_up = asyncio.create_task(bench.generate(sampling))
    while len(bench.engine.llm.output_processor.request_states) < 5:  # vLLM's front end has sent them
        await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.wait([given_up])
    await bench.load(bench.other)
    for reply in await asyncio.gather(*requests):
        assert set(reply.weight_versions) == {bench.version} and reply.held_seconds > 0
        expected = logprobs_of(bench.serving, bench.prompt, reply.token_ids)
        assert reply.logprobs == pytest.approx(expected, abs=TOLERANCE)
    await bench.engine.hold()
    request = asyncio.create_task(bench.generate(sampling))
    await bench.engine.release()
    assert set((await request).weight_versions) == {bench.version}
    await bench.assert_serving()


async def the_prefix_cache_is_dropped_or_kept_as_the_setting_says(bench: Bench) -> None:
    """A cleared engine answers a repeated prompt as one that has never seen other weights."""
    bench.engine.update_mode = "keep"
    long_prompt = (bench.prompt * 30)[:176]
    for clear in (True, False):
        bench.engine.clear_cache_on_reload = clear
        for _ in range(2):
            await bench.generate(prompt=long_prompt)  # its blocks are cached now
        await bench.load(bench.other)
        reply = await bench.generate(prompt=long_prompt)
        as_if_fresh = logprobs_of(bench.serving, long_prompt, reply.token_ids) == pytest.approx(
            reply.logprobs, abs=TOLERANCE
        )
        assert as_if_fresh == clear
    bench.engine.clear_cache_on_reload = True
    await bench.load(bench.serving)  # the next checks want a clean cache


async def weights_come_by_broadcast(bench: Bench, *, parts: int = 1) -> None:
    """To every part of the engine, as from a folder; other weights than the log's are refused."""
    folder = bench.other
    expected = (await bench.load(folder)).checksum
    await bench.load(bench.other)
    old, new = bench.version, max(bench.folders) + 1
    digest = verify_folder(folder)
    policy = Policy(version=new, path="", weights_sha256="0" * 64, parent=old)
    async with bench.running() as requests:
        broadcast = a_broadcast(policy, num_receivers=parts)
        with pytest.raises(EngineError, match=f"policy {old} serves on.*other weights than the log's"):
            await sent_and_received(bench, folder, broadcast)
        for reply in await asyncio.gather(*requests):
            bench.assert_spanning(reply, old)
    await bench.assert_serving()
    async with bench.running() as requests:
        broadcast = a_broadcast(dataclasses.replace(policy, weights_sha256=digest), num_receivers=parts)
        update = await sent_and_received(bench, folder, broadcast)
        bench.folders[new], bench.version = folder, new
        assert (update.checksum, update.transfer) == (expected, "gloo")
        for reply in await asyncio.gather(*requests):
            bench.assert_spanning(reply, old, new)
    await bench.assert_serving()


async def sent_and_received(bench: Bench, folder: Path, broadcast: Broadcast) -> WeightUpdate:
    sending = asyncio.create_task(asyncio.to_thread(send, folder / WEIGHTS_FILE, broadcast))
    try:
        return await bench.engine.receive_policy(broadcast, lambda: folder)
    finally:
        await sending


async def equal_weights_have_equal_checksums_and_others_do_not(bench: Bench, first: str) -> None:
    checksums = {bench.folders[0]: first}
    folders = list(dict.fromkeys([*bench.policies, bench.folders[0]]))
    for folder in [*folders, *folders]:
        update = await bench.load(folder)
        assert checksums.setdefault(folder, update.checksum) == update.checksum
        await bench.assert_serving()
    assert len(set(checksums.values())) == len(folders)


async def a_reply_ends_with_the_end_token(bench: Bench) -> None:
    await bench.load(bench.base)
    replies = await asyncio.gather(*(bench.generate(LONG) for _ in range(8)))
    assert {reply.finish_reason for reply in replies} == {"stop"}
    assert all(len(reply.token_ids) < LONG.max_tokens for reply in replies)
    await bench.load(bench.policies[0])


async def a_policy_that_cannot_be_loaded_leaves_the_old_one_serving(bench: Bench, reasons: dict[str, str]) -> None:
    """`reasons`: how a policy folder is spoilt → a pattern of the error."""
    real, reloads = bench.engine.llm.collective_rpc, []

    async def counting(*args: Any, **kwargs: Any) -> Any:
        reloads.extend(args[:1] if args[0] != "weight_digests" else [])
        return await real(*args, **kwargs)

    for number, (how, reason) in enumerate(reasons.items()):
        broken = spoilt(bench.other, bench.scratch / f"broken{number}", how)
        async with bench.running() as requests:
            reloads.clear()
            try:
                with bench.replaced("collective_rpc", counting):
                    await bench.fail_to_load(broken, reason)
                # The old weights are right at the first try: the broken load left nothing behind that spoils the next.
                assert len(reloads) == (0 if how == "no folder" else 2)
            except BaseException as error:
                error.add_note(f"with {how}")
                raise
            for reply in await asyncio.gather(*requests):
                bench.assert_spanning(reply, bench.version)
        await bench.assert_serving()
    await bench.load(bench.other)
    await bench.assert_serving()


def broken_policies(loaded: str) -> dict[str, str]:
    """`loaded`: elements of a fused layer that one worker gets, of those it needs, if the key projection is missing."""
    return {
        "no folder": "digest.json",
        "no weights": "no_weights|Cannot find any model weights",
        "cut short": "incomplete",
        "not weights": "header",
        "a wrong shape": "assert|shape|size",
        "a tensor missing": f"lacks tensors; .*model.layers.1.self_attn.qkv_proj {loaded}",
        "an unknown layer": "layers.9",
    }


async def a_load_that_did_nothing_is_noticed(bench: Bench) -> None:
    fresh = a_policy(bench.base, bench.scratch / "fresh", end_id=0, seed=3)
    real, calls = bench.engine.llm.collective_rpc, []

    async def idle(method: str, **kwargs: Any) -> Any:
        calls.extend([method] if method != "weight_digests" else [])
        served = kwargs.get("args") != (str(fresh),)
        return await real(method, **kwargs) if served else [(None, "")]

    with bench.replaced("collective_rpc", idle):
        await bench.fail_to_load(fresh, "checksum is")
    assert calls == ["reload_policy", "reset_weights", "reload_policy", "reload_policy"]
    await bench.assert_serving()


async def a_cancelled_request_leaves_its_slot_in_the_engine(bench: Bench) -> None:
    async with bench.running(15):  # with the one that says so as many as the engine takes
        pass  # leaving cancels them
    await nothing_runs(bench)


async def nothing_runs(bench: Bench) -> None:
    """Ask vLLM's core. In the time that a few questions take, a long request would not have ended; the step that was
    scheduled beside the last token of a reply has."""
    assert bench.engine.llm.get_num_unfinished_requests() == 0
    await bench.generate(Sampling(max_tokens=4))
    for _ in range(20):
        if not await bench.engine.llm.engine_core.call_utility_async("has_work"):
            return
    raise AssertionError("requests that were cancelled are still running")


async def a_stuck_engine_makes_requests_time_out_and_recovers(bench: Bench) -> None:
    async with bench.running(2) as requests:
        with suspended():
            for request in [*requests, asyncio.create_task(bench.generate())]:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await request
    await nothing_runs(bench)
    await bench.assert_serving()


@contextlib.contextmanager
def suspended() -> Iterator[list[psutil.Process]]:
    """vLLM's core and workers do not run."""
    family = psutil.Process().children(recursive=True)
    for process in family:
        process.suspend()
    try:
        yield family
    finally:
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


async def a_dead_engine_fails_everything_at_once(bench: Bench) -> None:
    async with bench.running(2) as requests, asyncio.timeout(IN_TIME):
        with suspended() as family:
            updating = asyncio.create_task(bench.load(bench.other))
            await asyncio.sleep(0)
            for process in family:
                os.kill(process.pid, signal.SIGKILL)
        for waiting in [*requests, updating]:
            with pytest.raises(EngineError):
                await waiting
        with pytest.raises(EngineError):
            await bench.generate()
        with pytest.raises(EngineError):
            await bench.load(bench.other)


async def adapters_change_as_whole_weights_do(bench: Bench, first: str, broken: dict[str, str]) -> None:
    for mode in ("keep", "keep", "abort", "wait"):
        await running_requests_span_the_swap(bench, mode, True)
    bench.engine.update_mode = "keep"
    await a_policy_that_cannot_be_loaded_leaves_the_old_one_serving(bench, broken)
    await running_requests_span_the_swap(bench, "keep", True, folder=bench.folders[0])
    await equal_weights_have_equal_checksums_and_others_do_not(bench, first)


async def check(base: Path, scratch: Path) -> None:
    bench = Bench(base, scratch, guided_decoding=True, max_num_batched_tokens=64)
    first = await bench.start()
    try:
        await tokens_carry_version_and_logprob_at_any_temperature(bench)
        await until_cuts_a_reply_and_changes_none_of_its_tokens(bench)
        await a_grammar_restricts_the_tokens_and_the_logprobs_are_those_of_what_is_left(bench)
        await a_token_is_drawn_by_its_place_whatever_happens_around_it(bench)
        for mode, clear in itertools.product(("keep", "wait", "abort"), (True, False)):
            await running_requests_span_the_swap(bench, mode, clear)
        for mode in ("keep", "wait", "abort"):
            await what_is_held_is_answered_by_the_next_policy(bench, mode)
        await the_prefix_cache_is_dropped_or_kept_as_the_setting_says(bench)
        await weights_come_by_broadcast(bench)
        await equal_weights_have_equal_checksums_and_others_do_not(bench, first)
        await a_reply_ends_with_the_end_token(bench)
        await a_policy_that_cannot_be_loaded_leaves_the_old_one_serving(bench, broken_policies("2144 of 3168"))
        await a_load_that_did_nothing_is_noticed(bench)
        await a_cancelled_request_leaves_its_slot_in_the_engine(bench)
        await a_stuck_engine_makes_requests_time_out_and_recovers(bench)
        await a_dead_engine_fails_everything_at_once(bench)
    finally:
        await bench.engine.stop()
    print("all checks passed")


if __name__ == "__main__":
    asyncio.run(check(Path(sys.argv[1]), Path(sys.argv[2])))
