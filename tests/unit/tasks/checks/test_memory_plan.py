"""What a run takes of each device: counted where that can be counted, and refused where it is too much."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from infra.devices import GpuMemory, gpu_memory
from settings.errors import InvalidInput
from settings.run_file import RunConfig, load_run_file
from tasks.checks import memory_plan as plans
from tasks.checks.memory_plan import Memory, above_plan, check_memory, memory_plan, planned, with_engine_share
from tests import gpus_page

GIB = 2**30
QWEN = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}
QWEN |= {"num_hidden_layers": 24, "vocab_size": 151936, "dtype": "bfloat16", "max_position_embeddings": 32768}
"""Qwen2.5-0.5B."""
PARAMETERS = 494_032_768


@pytest.fixture(autouse=True)
def _model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "num_parameters", lambda config: PARAMETERS)


def _gsm8k(**overrides: Any) -> RunConfig:
    return load_run_file(Path("examples/gsm8k.toml"), overrides)


def _cards(*sizes: float, free: float | None = None, machine: float = 128) -> Memory:
    gpus = [
        GpuMemory(name=str(number), total=int(size * GIB), free=int((free or size) * GIB))
        for number, size in enumerate(sizes)
    ]
    return Memory(gpus=gpus, machine=int(machine * GIB))


def test_engine_and_trainer_share_a_card_and_the_cache_has_what_is_left() -> None:
    config, here = _gsm8k(), _cards(48)
    gpu, machine = memory_plan(config, QWEN, here)
    assert [demand.process for demand in gpu.demands] == ["engine", "trainer"]
    engine, trainer = (demand.parts for demand in gpu.demands)
    assert trainer["weights"] == 4 * PARAMETERS and trainer["gradients and moments"] == 12 * PARAMETERS
    assert engine["weights"] == 2 * PARAMETERS
    counts = 512 * QWEN["vocab_size"] * 4  # of tokens that each sequence has had, which vLLM's newer runner keeps
    assert engine["activations"] > 4 * counts
    token = 2 * 24 * 128 * 2  # keys and values, layers, width of two heads, bytes
    assert engine["keys and values"] == 512 * 1024 * token  # so many at a time, each of at most 1,024 tokens
    assert gpu.needed < gpu.free and machine.needed < 2 * GIB
    vllm = with_engine_share(config, QWEN, here).engine.vllm
    assert vllm["kv_cache_memory_bytes"] == engine["keys and values"]
    assert vllm["gpu_memory_utilization"] == round(sum(engine.values()) / gpu.total, 3) < 0.3
    crowded, _ = memory_plan(config, QWEN, _cards(24))
    assert crowded.needed == pytest.approx((1 - plans.MARGIN) * 24 * GIB, rel=1e-6)


def test_what_a_step_should_find_is_what_its_trainer_has_beside_the_engine() -> None:
    for staleness in (0, 1):
        devices = memory_plan(_gsm8k(max_staleness=staleness), QWEN, _cards(48))
        engine, trainer = devices[0].demands
        beside = engine.parts["libraries"] if staleness == 0 else engine.total  # an engine that sleeps keeps those
        held = trainer.total - trainer.parts["libraries"]
        assert planned(devices) == {"trainer_gpu_bytes": held, "gpu_bytes": trainer.total + beside}
    first, second, _ = devices = memory_plan(_gsm8k(), QWEN, _cards(48, 48))
    assert planned(devices)["gpu_bytes"] == second.needed != first.needed
    machine = memory_plan(_gsm8k(), QWEN, _cards())
    assert planned(machine) == {"peak_memory_bytes": machine[0].needed}
    assert planned([]) == {} == planned(memory_plan(_gsm8k(), QWEN, _cards(48), trains=False))


@pytest.mark.parametrize(("share", "names"), [(0.4, []), (1.1, []), (1.11, ["gpu_bytes"])])
def test_a_tenth_more_than_planned_is_told(share: float, names: list[str]) -> None:
    metrics = {"gpu_bytes": share * 40e9, "planned_gpu_bytes": 40e9, "trainer_gpu_bytes": 9e9, "peak_memory_bytes": 1e9}
    told = above_plan(metrics)
    assert list(told) == names
    assert not names or told["gpu_bytes"] == "memory of the trainer's GPU in all processes: 44.4 GB, planned 40.0 GB"


def test_who_takes_turns_needs_the_larger_of_two_parts_and_leaves_the_rest_in_the_machines_memory() -> None:
    split, by_turns = _gsm8k(max_staleness=1), _gsm8k(max_staleness=0)
    gpu, machine = memory_plan(by_turns, QWEN, _cards(17))
    engine, trainer = gpu.demands
    assert gpu.by_turns and gpu.needed == max(
        engine.total + trainer.parts["libraries"], trainer.total + engine.parts["libraries"]
    )
    assert gpu.needed <= 17 * GIB < memory_plan(split, QWEN, _cards(17))[0].needed
    offloaded = next(demand for demand in machine.demands if demand.process == "offloaded")
    assert offloaded.total == 16 * PARAMETERS, "weights, gradients and moments wait there"
    with pytest.raises(InvalidInput, match="the run needs .* of GPU 0, which has"):
        check_memory(split, QWEN, _cards(17))
    check_memory(by_turns, QWEN, _cards(17))
    with pytest.raises(InvalidInput, match=r'fits: .*engine\.share = "phases"'):
        check_memory(_gsm8k(**{"max_staleness": 0, "engine.share": "split"}), QWEN, _cards(17))
    vllm = with_engine_share(by_turns, QWEN, _cards(17)).engine.vllm
    assert vllm["kv_cache_memory_bytes"] == engine.parts["keys and values"]
    assert engine.total + trainer.parts["libraries"] <= (1 - plans.MARGIN) * 17 * GIB + 1


@pytest.mark.parametrize(
    ("overrides", "here"),
    [
        ({}, _cards(24, 24)),  # a card each
        ({"engine.vllm.gpu_memory_utilization": 0.5}, _cards(80)),
        ({"engine.vllm.kv_cache_memory_bytes": GIB}, _cards(80)),
        ({}, _cards()),
    ],
)
def test_an_engine_alone_or_one_whose_share_is_set_is_left_as_it_is(overrides: dict[str, Any], here: Memory) -> None:
    config = _gsm8k(**overrides)
    assert with_engine_share(config, QWEN, here) == config


def test_an_engine_beside_another_program_takes_what_is_free() -> None:
    alone = with_engine_share(_gsm8k(), QWEN, _cards(24), trains=False)
    beside = with_engine_share(_gsm8k(), QWEN, _cards(24, free=6), trains=False)
    assert alone == _gsm8k() and beside.engine.vllm["gpu_memory_utilization"] < 0.25


@pytest.mark.parametrize(
    ("overrides", "here", "words"),
    [
        ({}, _cards(16), ["of GPU 0, which has 17.2 GB: engine", "fits: train.tokens_per_microbatch = 1024"]),
        ({}, _cards(24, free=12), ["which has 25.8 GB, 12.9 GB of which others hold"]),
        ({"engine.vllm.gpu_memory_utilization": 0.9}, _cards(24), ["engine.vllm.gpu_memory_utilization left out"]),
        ({}, _cards(9), ["these together fit: train.tokens_per_microbatch = 1024, train.activation_checkpointing"]),
        ({}, _cards(3), ["no setting makes it fit"]),
        ({}, _cards(machine=18), ["of this machine, which has 19.3 GB", "any of these fits: train.tokens"]),
        ({"train.offload_optimizer": True}, _cards(24, machine=6), ["of this machine", "offloaded 7.9 GB"]),
        ({"rollout.num_workers": 3}, _cards(24, 16), ["of GPU 1, which has 17.2 GB: engine"]),
    ],
)
def test_what_does_not_fit_is_refused_with_both_numbers_and_what_would(
    overrides: dict[str, Any], here: Memory, words: list[str]
) -> None:
    config = _gsm8k(**overrides)
    with pytest.raises(InvalidInput) as refusal:
        check_memory(config, QWEN, here)
    assert all(word in str(refusal.value) for word in words), refusal.value
    for change in str(refusal.value).partition("fits: ")[2].split(", "):
        if " = " in change:  # another is to be left out
            key, _, value = change.partition(" = ")
            check_memory(_gsm8k(**{**overrides, key: json.loads(value)}), QWEN, here)


def test_replicas_take_weights_again_and_offloaded_activations_are_the_machine_s() -> None:
    many = {"train.num_ranks": 4, "train.sequence_parallel": 2, "rollout.num_workers": 0, "evaluation.every": 0}
    here = _cards(24, 24, 24, 24)

    def parts(**overrides: Any) -> list[dict[str, int]]:
        plan = memory_plan(_gsm8k(**many, **overrides), QWEN, here)
        return [demand.parts for device in plan for demand in device.demands if "driver" not in demand.process]

    rank = parts()[0]
    assert rank["weights"] == PARAMETERS
    replicated = parts(**{"train.num_replicas": 2})[0]
    assert replicated == {**rank, **{name: 2 * rank[name] for name in ("weights", "gradients and moments")}}
    *ranks, offloaded = parts(**{"train.offload_activations": True})
    assert len(ranks) > 4 and offloaded == {"activations": rank["activations"]}
    assert ranks[0] == {**rank, "activations": ranks[0]["activations"]}
    assert ranks[0]["activations"] < rank["activations"] / 10


def test_a_model_that_is_not_here_and_another_cluster_have_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_plan(_gsm8k(), {}, _cards(24)) == []
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")
    assert memory_plan(_gsm8k(), QWEN) == []
    check_memory(_gsm8k(), QWEN)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_what_layers_keep_is_what_hooks_on_saved_tensors_count(tmp_path: Path, family: str, dtype: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from trainers.model.layout import Layout
    from trainers.model.model import load_model

    sizes = {"hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4, "num_key_value_heads": 2}
    about = AutoConfig.for_model(family, **sizes, num_hidden_layers=4, vocab_size=64, head_dim=32)
    AutoModelForCausalLM.from_config(about).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=getattr(torch, dtype)).train()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens, layout = torch.zeros(512, dtype=torch.int64), Layout([64] * 8, device=torch.device("cpu"))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model.hidden(tokens, torch.arange(64).repeat(8), layout)
    short = {"sampling.max_tokens": 64}
    config = _gsm8k(**{"train.dtype": dtype, "train.tokens_per_microbatch": 512, "engine.max_model_len": 512, **short})
    [machine] = memory_plan(config, about.to_dict(), _cards())
    planned = machine.demands[1].parts["activations"]
    assert planned == pytest.approx(sum(kept.values()), rel=0.15)


_SHAPES = {"0.6B": (596_049_920, 1024, 3072), "1.7B": (1_720_574_976, 2048, 6144)}
_MEASURED = [
    (run["shape"], run["tokens"], run["peak_bytes"])
    for run in json.loads(Path("docs/gpu_train_step.json").read_text())["runs"]
    if run["peak_bytes"] and (run["sequences"] == "many" or run["tokens"] == 16384)
]


@pytest.mark.parametrize(("shape", "tokens", "measured"), _MEASURED)
def test_the_plan_of_a_step_is_what_was_measured_on_a_card(
    shape: str, tokens: int, measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters, hidden, inner = _SHAPES[shape]
    monkeypatch.setattr(plans, "num_parameters", lambda config: parameters)
    about = {**QWEN, "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": 16, "head_dim": 128}
    about |= {"num_key_value_heads": 8, "num_hidden_layers": 28}
    overrides = {"train.tokens_per_microbatch": 16384, "engine.max_model_len": 4096, "rollout.num_workers": 0}
    overrides["evaluation.every"] = 0
    gpu, _ = memory_plan(_gsm8k(**overrides), about, _cards(141))
    [trainer] = gpu.demands
    assert trainer.total - trainer.parts["libraries"] == pytest.approx(measured, rel=0.1)


def test_gpus_are_those_that_this_process_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '0, GPU-a, 24576, 24000\\n1, GPU-b, 81920, 500\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    first = GpuMemory(name="0", total=24 * GIB, free=24000 * 2**20)
    second = GpuMemory(name="1", total=80 * GIB, free=500 * 2**20)
    for visible, expected in {None: [first, second], "1": [second], "GPU-b,0": [second, first], "": []}.items():
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gpu_memory() == expected
    assert dataclasses.asdict(first)["free"] == 24000 * 2**20


def test_the_page_says_of_the_usual_sizes_what_the_plan_says() -> None:
    assert {shape.name: round(shape.parameters / 1e7) / 100 for shape in gpus_page.SHAPES} == {
        **{"0.6B": 0.6, "1.7B": 1.72, "4B": 4.02, "8B": 8.19, "14B": 14.77, "32B": 32.76}
    }
    text = gpus_page.PAGE.read_text()
    assert gpus_page.page(text) == text, "run `python -m tests.gpus_page`"
