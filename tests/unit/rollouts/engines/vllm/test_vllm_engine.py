"""How `VllmEngine` keeps version and weights together, on a stand-in of vLLM; the real one is in tests/engine."""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollouts.engines.engine import EngineError, EngineUnusable, Generation, UpdateMode, WeightUpdate
from rollouts.engines.vllm import core_start
from rollouts.engines.vllm.core_start import cache_bytes
from rollouts.engines.vllm.requests import routes_of
from rollouts.engines.vllm.vllm_engine import TRIES, VllmEngine
from settings.engine import EngineSettings
from settings.errors import InvalidInput
from storage.objects.digests import seal_folder
from storage.records import Sampling
from tests.unit.rollouts.fake_vllm import FakeVllm

STEPS = ["pause_scheduler_async", "reload_policy", "weight_digests", "update_weight_version"]


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names that `VllmEngine` imports, without the ten seconds that the real package takes."""
    fakes = {
        "vllm": {"AsyncEngineArgs": lambda model, **_: Path(model)},
        "vllm.envs": {"enable_envs_cache": lambda: None},
        "vllm.exceptions": {"VLLMClientError": ValueError},
        "vllm.inputs": {"tokens_input": lambda ids: {"type": "token", "prompt_token_ids": ids}},
        "vllm.sampling_params": {
            "RequestOutputKind": SimpleNamespace(CUMULATIVE=0, FINAL_ONLY=2),
            "SamplingParams": SimpleNamespace,
            "StructuredOutputsParams": SimpleNamespace,
        },
        "vllm.model_executor.models": {"registry": SimpleNamespace(_run_in_subprocess=None)},
        "vllm.v1.engine": {"utils": SimpleNamespace(get_mp_context=None)},
        "vllm.v1.engine.async_llm": {"AsyncLLM": SimpleNamespace(from_engine_args=FakeVllm)},
    }
    for name, members in fakes.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**members))
    monkeypatch.setattr("rollouts.engines.vllm.core_start.IMPORTED", [])


class _Bench:
    """An engine that serves version 1, of weights 1."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.engine = VllmEngine(EngineSettings(max_model_len=64), seed=0)
        self.vllm: FakeVllm

    def policy(self, weights: int, name: str = "") -> Path:
        folder = self._folder / (name or str(weights))
        if not folder.exists():
            folder.mkdir()
            (folder / "config.json").write_text('{"eos_token_id": 1}' + " " * len(name))
            (folder / "model.safetensors").write_text(f"{weights}.0" + "0" * len(name))  # other bytes, equal numbers
            seal_folder(folder)
        return folder

    async def start(self, mode: UpdateMode = "keep") -> None:
        self.engine.update_mode = mode
        assert await self.engine.start(self.policy(1), 1)
        self.vllm = self.engine.llm
        self.vllm.calls.clear()

    async def load(self, weights: int, version: int | None = None) -> WeightUpdate:
        return await self.engine.load_policy(self.policy(weights), version or weights)

    async def request(self, name: str, *, max_tokens: int = 6, steps: int = 0, **sampling: Any) -> asyncio.Task[Any]:
        """A request that has `steps` tokens."""
        generating = self.engine.generate([7, 8], sampling=Sampling(max_tokens=max_tokens, **sampling), request_id=name)
        task = asyncio.create_task(generating)
        await _settle()
        await self.step(steps)
        return task

    async def step(self, steps: int) -> None:
        for _ in range(steps):
            self.vllm.step()
            await _settle()

    async def finish(self, request: asyncio.Task[Generation]) -> Generation:
        while not request.done():
            await self.step(1)
        reply = await request
        assert len(reply.token_ids) == len(reply.logprobs) == len(reply.weight_versions)
        return reply

    async def assert_serving(self, version: int) -> None:
        """The version's weights are the number of the version."""
        assert not self.vllm.paused
        reply = await self.finish(await self.request("probe"))
        assert reply.weight_versions == [version] * 6
        assert reply.logprobs == [-float(version)] * 6


async def _settle() -> None:
    """Let every task run until it waits for a step."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
def bench(tmp_path: Path) -> _Bench:
    return _Bench(tmp_path)


@pytest.mark.parametrize(("mode", "length"), [("keep", 4), ("abort", 4), ("keep", 1)])
async def test_until_ends_a_reply_and_leaves_its_tokens_and_versions_as_they_were(
    bench: _Bench, mode: UpdateMode, length: int
):
    await bench.start(mode)
    sampling = Sampling(max_tokens=6)
    seen: list[int] = []

    def until(ids: list[int]) -> int:
        seen.append(len(ids))
        return length if len(ids) >= length else 0

    task = asyncio.create_task(bench.engine.generate([7, 8], sampling=sampling, request_id="a", until=until))
    await _settle()
    await bench.step(1)
    await bench.load(2)  # in the middle of the reply, unless it has ended
    reply = await bench.finish(task)
    versions = ([1] + [2] * 5)[:length]
    assert (reply.finish_reason, reply.weight_versions) == ("stop", versions)
    assert reply.logprobs == [-float(version) for version in versions]
    assert not bench.vllm.requests and max(seen) <= length + 1


async def test_a_grammar_that_vllm_cannot_follow_is_the_agents_fault_and_a_good_one_reaches_it(bench: _Bench):
    await bench.start()
    constraint = '{"json": {"type": "object"}}'
    task = asyncio.create_task(
        bench.engine.generate([7], sampling=Sampling(max_tokens=1), request_id="a", constraint=constraint)
    )
    await bench.finish(task)
    assert bench.vllm.parts[-1].parameters.structured_outputs == SimpleNamespace(json={"type": "object"})
    bench.vllm.refuses = ValueError("no such keyword")
    with pytest.raises(InvalidInput, match="vLLM cannot follow this grammar: no such keyword"):
        await bench.engine.generate([7], sampling=Sampling(), request_id="b", constraint=constraint)
    with pytest.raises(EngineError, match="ValueError: no such keyword"):
        await bench.engine.generate([7], sampling=Sampling(), request_id="c")


@pytest.mark.parametrize("logprob", [math.nan, 0.01, math.inf, -math.inf, 1e-5, -2.0])
async def test_a_logprob_that_no_distribution_has_is_the_engines_fault(bench: _Bench, logprob: float):
    await bench.start()
    request = await bench.request("a", steps=3)
    bench.vllm.weights = -logprob
    if logprob in (1e-5, -2.0):
        assert (await bench.finish(request)).logprobs == [-1.0] * 3 + [min(0.0, logprob)] * 3
    else:
        with pytest.raises(EngineError, match=f"log-probability of token 4 of 6 is {logprob}: its weights or its"):
            await bench.finish(request)


async def test_a_reply_stops_at_the_models_end_tokens_and_at_those_of_the_template(bench: _Bench):
    assert await bench.engine.start(bench.policy(1), 1, stop_ids=[5, 1])
    asked: list[Any] = []
    generate = bench.engine.llm.generate
    bench.engine.llm.generate = lambda prompt, parameters, *rest, **options: (
        asked.append(parameters) or generate(prompt, parameters, *rest, **options)
    )
    bench.vllm = bench.engine.llm
    await bench.finish(await bench.request("a"))
    assert [parameters.stop_token_ids for parameters in asked] == [[1, 5]]


@pytest.mark.parametrize(("mode", "versions"), [("keep", [1, 1, 2, 2, 2, 2]), ("wait", [1] * 6)])
async def test_an_update_pauses_reloads_verifies_names_and_resumes(
    bench: _Bench, mode: UpdateMode, versions: list[int]
):
    await bench.start(mode)
    request = await bench.request("a", steps=2)
    updating = asyncio.create_task(bench.load(2))
    await _settle()
    reply = await bench.finish(request)
    update = await updating
    assert bench.vllm.calls == [*STEPS, "resume_generation"]
    assert (update.mode, update.cache_cleared) == (mode, True) and update.paused_seconds > 0
    assert reply.weight_versions == versions
    assert reply.logprobs == [-float(version) for version in versions]
    assert len(bench.vllm.parts) == 1
    await bench.assert_serving(2)


@pytest.mark.parametrize(
    ("mode", "then"), [*itertools.product(("keep", "wait", "abort"), ("load",)), ("keep", "release"), ("keep", "fail")]
)
async def test_what_an_engine_holds_is_answered_by_the_next_policy_or_if_none_comes_by_the_old_one(
    bench: _Bench, mode: UpdateMode, then: str
):
    await bench.start(mode)
    await bench.engine.hold()
    began = time.perf_counter()
    request = await bench.request("a", steps=2)
    is_held = time.perf_counter()
    assert not bench.vllm.parts[-1].tokens
    bench.vllm.calls.clear()
    held_for = time.perf_counter() - is_held
    match then:
        case "load":
            await bench.load(2)
            assert bench.vllm.calls == [*STEPS[1:], "resume_generation"], "paused already, and no request is aborted"
        case "release":
            await bench.engine.release()
        case "fail":
            bench.vllm.faults["reload_policy"] = ["before"]
            with pytest.raises(EngineError, match="policy 1 serves on"):
                await bench.load(2)
    reply = await bench.finish(request)
    assert reply.weight_versions == [2 if then == "load" else 1] * 6 and len(bench.vllm.parts) == 1
    assert held_for <= reply.held_seconds <= time.perf_counter() - began
    assert (await bench.finish(await bench.request("b"))).held_seconds == 0
    await bench.load(3)
    assert bench.vllm.calls.count("pause_scheduler_async") == 1
    await bench.assert_serving(3)


@pytest.mark.parametrize("draws", ["ours", "hashed", "streamed"])
async def test_abort_continues_each_request_from_the_tokens_it_has(
    bench: _Bench, draws: str, monkeypatch: pytest.MonkeyPatch
):
    """And its draws go on: no part repeats those of the part before it."""
    monkeypatch.setattr(FakeVllm, "draws", draws, raising=False)
    await bench.start("abort")
    early = await bench.request("early", max_tokens=8, steps=2, seed=40)
    late = await bench.request("late", steps=1)
    unstarted = await bench.request("unstarted")
    await bench.load(2)
    await bench.step(2)
    await bench.load(3)
    replies = [await bench.finish(request) for request in (early, late, unstarted)]
    versions = [[1] * 3 + [2] * 2 + [3] * 3, [1] + [2] * 2 + [3] * 3, [2] * 2 + [3] * 4]
    assert [reply.weight_versions for reply in replies] == versions
    for reply in replies:
        assert reply.token_ids == list(range(102, 102 + len(reply.token_ids)))
        assert reply.logprobs == [-float(version) for version in reply.weight_versions]
        assert reply.finish_reason == "length"
    asked = [part.parameters for part in bench.vllm.parts]
    parts = [(part.prompt[2:], part.parameters.max_tokens) for part in bench.vllm.parts]
    assert parts == [
        *(([], 8), ([], 6), ([], 6)),
        *(([102, 103, 104], 5), ([102], 5), ([], 6)),
        *(([102, 103, 104, 105, 106], 3), ([102, 103, 104], 3), ([102, 103], 4)),
    ]
    drawn = [getattr(each, "extra_args", {}).get("draw") or getattr(each, "seed", None) for each in asked]
    expected = {"ours": [(40, 0), (40, 3), (40, 5)], "hashed": [40, 40, 40], "streamed": [40, 43, 45]}
    assert drawn[::3] == expected[draws] and set(drawn[1::3] + drawn[2::3]) == {None}


@pytest.mark.parametrize("mode", ["keep", "abort"])
async def test_a_request_that_something_else_ended_and_whatever_vllm_raises_is_an_error(
    bench: _Bench, mode: UpdateMode
):
    def refuse(*_: Any, **__: Any) -> Any:
        raise Exception("the prompt is too long")  # vLLM's ValidationError is no ValueError either

    await bench.start(mode)
    await bench.load(2)  # an abort that is over explains nothing
    request = await bench.request("a", steps=2)
    await bench.vllm.abort(["a"])
    with pytest.raises(EngineError, match="request a was ended by the engine: abort"):
        await request
    bench.vllm.generate = refuse  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="Exception: the prompt is too long"):
        await (await bench.request("b"))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("mode", ["keep", "abort"])
async def test_a_fault_at_any_step_leaves_the_old_policy_serving(bench: _Bench, mode: UpdateMode, step: str, when: str):
    await bench.start(mode)
    request = await bench.request("a", steps=2)
    bench.vllm.faults = {step: [when]}
    with pytest.raises(EngineError, match=f"policy 2 .* policy 1 serves on: .*{step} was cut off") as error:
        await bench.load(2)
    assert not isinstance(error.value, EngineUnusable)
    assert (await bench.finish(request)).weight_versions == [1] * 6
    await bench.assert_serving(1)
    bench.vllm.faults = {"resume_generation": [when] * (TRIES - 1)}  # it is tried again
    await bench.load(2)
    await bench.assert_serving(2)


@pytest.mark.parametrize(
    "faults",
    [
        {"reload_policy": ["after"] * (1 + TRIES)},
        {"update_weight_version": ["after"] * (1 + TRIES)},
        {"resume_generation": ["before"] * TRIES},
    ],
    ids=lambda faults: "".join(faults),
)
async def test_an_engine_that_cannot_be_put_right_refuses_until_a_policy_loads(
    bench: _Bench, faults: dict[str, list[str]]
):
    await bench.start()
    [step] = faults
    request = await bench.request("a", steps=2)
    bench.vllm.faults = faults
    with pytest.raises(EngineUnusable, match=f"{step} was cut off"):
        await bench.load(2)
    with pytest.raises(EngineUnusable, match=f"{step} was cut off"):
        await request
    with pytest.raises(EngineUnusable, match=f"{step} was cut off"):
        await (await bench.request("b"))
    await bench.load(3)
    await bench.assert_serving(3)


WAKE = ["wake weights", "reset_weights", *STEPS[1:], "wake kv_cache", "resume_generation"]


@pytest.mark.parametrize(("mode", "versions"), [("keep", [1, 1, 2, 2, 2, 2]), ("abort", [1, 1, 2, 2, 2, 2])])
async def test_an_engine_that_sleeps_is_woken_by_the_next_policy(bench: _Bench, mode: UpdateMode, versions: list[int]):
    await bench.start(mode)
    request = await bench.request("a", steps=2)
    await bench.engine.sleep()
    await bench.engine.sleep()
    assert bench.vllm.asleep == {"weights", "kv_cache"} and bench.vllm.calls == [STEPS[0], "sleep"]
    late = await bench.request("late")
    await bench.step(3)
    bench.vllm.calls.clear()
    update = await bench.load(2)
    assert bench.vllm.calls == WAKE and update.cache_cleared
    assert [(await bench.finish(each)).weight_versions for each in (request, late)] == [versions, [2] * 6]
    await bench.assert_serving(2)


async def test_an_engine_that_no_policy_wakes_serves_the_one_of_before(bench: _Bench):
    await bench.start()
    await bench.engine.wake()
    assert bench.vllm.calls == []
    await bench.engine.sleep()
    await bench.engine.wake()
    await bench.engine.wake()
    assert bench.vllm.calls == [STEPS[0], "sleep", *WAKE]
    await bench.assert_serving(1)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_an_engine_that_does_not_fall_asleep_serves_on_or_not_at_all(bench: _Bench, when: str):
    await bench.start()
    request = await bench.request("a", steps=2)
    bench.vllm.faults = {"pause_scheduler_async": [when]}
    with pytest.raises(EngineError, match="the engine did not fall asleep: .*pause_scheduler_async was cut") as error:
        await bench.engine.sleep()
    assert not isinstance(error.value, EngineUnusable)
    assert (await bench.finish(request)).weight_versions == [1] * 6
    await bench.assert_serving(1)
    request = await bench.request("b", steps=2)
    bench.vllm.faults = {"sleep": [when]}  # a part of its memory may be gone
    with pytest.raises(EngineUnusable, match="the engine did not fall asleep: .*sleep was cut off"):
        await bench.engine.sleep()
    with pytest.raises(EngineUnusable, match="did not fall asleep"):
        await request
    await bench.load(2)
    await bench.assert_serving(2)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", WAKE[:5])
async def test_a_fault_at_any_step_of_waking_leaves_the_old_policy_serving(bench: _Bench, step: str, when: str):
    await bench.start()
    request = await bench.request("a", steps=2)
    await bench.engine.sleep()
    bench.vllm.faults = {step: [when]}
    with pytest.raises(EngineError, match=f"policy 2 .* policy 1 serves on: .*{step} was cut off"):
        await bench.load(2)
    assert (await bench.finish(request)).weight_versions == [1] * 6
    await bench.assert_serving(1)
    await bench.engine.sleep()
    bench.vllm.faults = {"wake kv_cache": [when] * (TRIES - 1)}  # it is tried again
    await bench.load(2)
    await bench.assert_serving(2)


async def test_a_policy_without_its_folder_wakes_the_old_one(bench: _Bench):
    await bench.start()
    await bench.engine.sleep()
    with pytest.raises(EngineError, match="policy 2 .* policy 1 serves on: DigestMismatch"):
        await bench.engine.load_policy(bench.policy(1).parent / "nowhere", 2)
    await bench.assert_serving(1)


async def test_weights_that_did_not_come_back_from_a_sleep_are_noticed(bench: _Bench, monkeypatch: pytest.MonkeyPatch):
    await bench.start()
    real, new = bench.vllm.collective_rpc, str(bench.policy(2))

    async def idle(method: str, args: tuple[str, ...] = ()) -> Any:
        return [(None, "")] if args == (new,) else await real(method, args)

    monkeypatch.setattr(bench.vllm, "collective_rpc", idle)
    await bench.engine.sleep()
    with pytest.raises(EngineError, match="policy 1 serves on: .*1 tensors did not come back from a sleep, one is we"):
        await bench.load(2)
    await bench.assert_serving(1)


async def test_an_engine_that_cannot_be_woken_ends_its_process(bench: _Bench, monkeypatch: pytest.MonkeyPatch):
    """A process that only sleeps would hold a part of the GPU for nothing."""
    ended: list[int] = []
    monkeypatch.setattr("rollouts.engines.vllm.vllm_engine.os._exit", ended.append)
    bench.engine._ends_process = True
    bench.vllm = FakeVllm(bench.policy(1))
    await bench.start()
    bench.vllm.errored = False  # type: ignore[attr-defined]
    await bench.engine.sleep()
    bench.vllm.faults = {"wake weights": ["before"] * (1 + TRIES)}
    with pytest.raises(EngineUnusable, match="policy 1 could not be put back: .*wake weights was cut off"):
        await bench.load(2)
    assert ended and set(ended) == {1}


async def test_an_engine_that_is_to_sleep_tries_it_when_it_starts(bench: _Bench, monkeypatch: pytest.MonkeyPatch):
    settings = EngineSettings(max_model_len=64, vllm={"enable_sleep_mode": True})
    bench.engine = VllmEngine(settings, seed=0)
    checksum = await bench.engine.start(bench.policy(1), 1)
    bench.vllm = bench.engine.llm
    assert checksum.startswith("tensors-1:") and bench.vllm.calls[-8:] == ["sleep", *WAKE]
    await bench.assert_serving(1)

    async def forgets(self: FakeVllm, *, tags: list[str]) -> None:
        self.asleep -= set(tags)
        self.buffers = {"rotary_emb.cos_sin_cache": "whatever"}

    monkeypatch.setattr(FakeVllm, "wake_up", forgets)
    with pytest.raises(EngineError, match="vLLM does not bring rotary_emb.cos_sin_cache back after a sleep; set engin"):
        await VllmEngine(settings, seed=0).start(bench.policy(1), 1)


async def test_old_weights_that_come_back_different_are_not_served_and_later_right_ones_are(bench: _Bench):
    await bench.start()
    weights = bench.policy(1) / "model.safetensors"
    weights.write_text("5.0")  # behind the engine's back
    (bench.policy(2) / "model.safetensors").unlink()
    with pytest.raises(EngineUnusable, match="policy 2 from .* was not loaded, and policy 1 could not be put back"):
        await bench.load(2)
    weights.write_text("1.0")
    bench.vllm.faults = {"pause_scheduler_async": ["before"]}
    with pytest.raises(EngineUnusable):  # policy 1 does not serve on
        await bench.load(2)
    with pytest.raises(EngineError, match="policy 2 .* policy 1 serves on"):
        await bench.load(2)
    await bench.assert_serving(1)


async def test_other_files_with_equal_weights_are_no_error(bench: _Bench):
    """A small update may round to nothing in the engine's precision."""
    await bench.start()
    update = await bench.engine.load_policy(bench.policy(1, name="same"), 2)
    assert bench.vllm.calls.count("reload_policy") == 2 and "reset_weights" in bench.vllm.calls
    assert update.checksum == (await bench.load(1, 3)).checksum
    reply = await bench.finish(await bench.request("a"))
    assert reply.logprobs == [-1.0] * 6 and reply.weight_versions == [3] * 6


async def test_a_folder_loaded_before_must_give_the_checksum_it_gave_then(bench: _Bench):
    await bench.start()
    first = await bench.load(2)
    await bench.load(3)
    assert (await bench.load(2, 4)).checksum == first.checksum
    (bench.policy(3) / "model.safetensors").write_text("4.0")  # under the seal of 3
    with pytest.raises(EngineError, match="policy 5 .* policy 4 serves on: .*checksum is"):
        await bench.load(3, 5)
    reply = await bench.finish(await bench.request("a"))
    assert reply.logprobs == [-2.0] * 6 and reply.weight_versions == [4] * 6


async def test_a_cancelled_caller_does_not_stop_the_update_half_way(bench: _Bench):
    await bench.start()
    updating = asyncio.create_task(bench.load(2))
    while "reload_policy" not in bench.vllm.calls:
        await asyncio.sleep(0)
    updating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await updating
    await _settle()
    await bench.assert_serving(2)


@pytest.mark.parametrize(
    ("config", "arguments", "mebibytes"),
    [
        # SmolLM2-135M: 128 sequences of 128 tokens, 30 layers × 2 × 3 heads × 64 numbers of 2 bytes
        ({}, {}, 360),
        ({}, {"dtype": "float32"}, 720),
        ({"text_config": {"num_hidden_layers": 60}}, {"max_num_seqs": 64}, 360),
        ({}, {"max_model_len": 129}, 720),  # a block more
        ({"num_hidden_layers": 2}, {}, 64),
        ({}, {"max_model_len": 4096}, 1024),
        ({"num_hidden_layers": None}, {}, 1024),  # a config that says nothing
    ],
)
def test_the_cache_of_an_engine_on_cpus_has_room_for_all_that_may_run_at_once(
    config: dict[str, Any], arguments: dict[str, Any], mebibytes: int
) -> None:
    smollm2 = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    smollm2 |= {"torch_dtype": "bfloat16"}
    both = {"text_config": {**smollm2, **config["text_config"]}} if "text_config" in config else {**smollm2, **config}
    assert cache_bytes({"max_model_len": 128, **arguments}, both) == mebibytes * 2**20


def test_routes_are_those_of_the_tokens_that_are_kept_and_too_few_are_the_engines_fault():
    parts = [np.arange(12, dtype=np.uint16).reshape(2, 3, 2), np.arange(12, 30, dtype=np.uint16).reshape(3, 3, 2)]
    routes = routes_of(parts, num_tokens=4)
    assert (routes.num_tokens, routes.layers, routes.choices, routes.id_bytes) == (4, 3, 2, 2)
    assert np.frombuffer(routes.ids, "<u2").tolist() == list(range(24))
    for missing in (parts[:1], []):
        with pytest.raises(EngineError, match=f"has the routes of {sum(map(len, missing))} of 4 tokens"):
            routes_of(missing, num_tokens=4)


@pytest.mark.parametrize(
    ("is_cpu", "runner", "expected"),
    [
        (True, "", {"enforce_eager": True, "scheduler_cls": "rollouts.engines.vllm.routes.RoutingScheduler"}),
        (True, "1", {"enable_return_routed_experts": True}),
        (False, "", {"enable_return_routed_experts": True}),
    ],
)
def test_routes_are_captured_by_vllm_where_it_can(
    monkeypatch: pytest.MonkeyPatch, is_cpu: bool, runner: str, expected: dict[str, Any]
):
    monkeypatch.setattr(core_start, "is_cpu_build", lambda: is_cpu)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    assert core_start.with_routes() == expected
