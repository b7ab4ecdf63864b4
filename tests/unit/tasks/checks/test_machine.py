"""In which type a run trains that leaves it to the machine."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from settings.run_file import RunConfig, default_values, make_config
from storage.log.runs import continues, create_run
from storage.objects.object_store import LocalStore
from tasks.checks import machine as module
from tasks.checks.machine import best_precision, for_this_machine, precision_text, trial_seconds
from tests.builders import a_config

STORED = {"dtype": "bfloat16", "hidden_size": 64, "intermediate_size": 128}
"""Of a model stored in bfloat16."""
Machine = Callable[..., list[str]]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Pretend to be a processor with these flags, on which bfloat16 is so many times as fast; returns its trials."""
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(module, "gpus_of", lambda nodes: 0.0)

    def become(flags: str, *, times: float = 1.0) -> list[str]:
        trials: list[str] = []
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nmodel name\t: Chip {flags}\nflags\t\t: fpu {flags} sse\n")
        monkeypatch.setattr(module, "_CPU", tmp_path / "cpuinfo")

        def run(command: list[str], **_: Any) -> Any:
            trials.append(" ".join(command[-2:]))
            out = f'{{"float32": {times}, "bfloat16": 1.0}}'
            return type("Done", (), {"stdout": out})

        monkeypatch.setattr(module.subprocess, "run", run)
        return trials

    return become


def _dtype(config: RunConfig, about: dict[str, Any] = STORED) -> str:
    return for_this_machine(config, about).train.dtype


@pytest.mark.parametrize(
    ("flags", "times", "dtype", "reason"),
    [
        ("avx512f", 2.0, "float32", r"has no products in bfloat16 \(amx_bf16, avx512_bf16\)"),
        ("avx512_bf16", 1.9, "bfloat16", r"\(avx512_bf16\) multiplies 1.9 times as fast in bfloat16"),
        ("amx_bf16 avx512_bf16", 7.5, "bfloat16", r"\(amx_bf16, avx512_bf16\) multiplies 7.5 times"),
        ("avx512_bf16", 0.8, "float32", r"multiplies 0.8 times as fast"),
    ],
)
def test_the_processor_and_a_trial_decide(machine: Machine, flags: str, times: float, dtype: str, reason: str) -> None:
    trials = machine(flags, times=times)
    assert _dtype(a_config()) == _dtype(a_config()) == dtype
    assert len(trials) == ("bf16" in flags) and set(trials) <= {"128 64"}, "once per machine, of the model's shape"
    text = precision_text(for_this_machine(a_config(), STORED), STORED)
    assert text.startswith(f"{dtype}: ")
    assert re.search(reason, text)


def test_a_model_in_float32_a_gpu_and_an_unknown_cluster_are_float32(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = machine("amx_bf16", times=9.0)
    assert _dtype(a_config(), {"dtype": "float32"}) == _dtype(a_config(), {}) == "float32"
    monkeypatch.setattr(module, "gpus_of", lambda nodes: 1.0)
    assert _dtype(a_config()) == "float32" and _dtype(a_config(train={"device": "cpu"})) == "bfloat16"
    monkeypatch.setattr(module, "gpus_of", lambda nodes: 0.0)
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")
    assert _dtype(a_config()) == "float32" and len(trials) == 1


def test_what_the_run_file_says_counts_and_the_start_says_what_would_be_chosen(machine: Machine) -> None:
    machine("amx_bf16", times=3.0)
    config = for_this_machine(a_config(train={"dtype": "float32"}), STORED)
    assert config.train.dtype == "float32"
    assert precision_text(config, STORED).startswith("float32, by train.dtype or the run's record; here bfloat16 would")


@pytest.mark.parametrize(("recorded", "kept"), [("bfloat16", "bfloat16"), ("float32", "float32"), (None, "float32")])
def test_a_run_keeps_the_type_it_began_with_on_every_machine(
    machine: Machine, tmp_path: Path, recorded: str | None, kept: str
) -> None:
    store = LocalStore(tmp_path / "store")
    document = a_config(store=str(store.root), train={"dtype": recorded or "float32"}).model_dump(mode="json")
    if recorded is None:  # of a version that had no such key
        del document["train"]["dtype"]
    log = create_run(store, "run", document)
    machine("amx_bf16" if kept == "float32" else "avx2", times=9.0)
    config = for_this_machine(a_config(run="run", store=str(store.root)), STORED)
    assert config.train.dtype == kept
    now = config.model_dump(mode="json")
    assert continues(log, now, defaults=default_values(now))


def test_a_trial_that_fails_leaves_float32(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("amx_bf16")
    monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: type("Done", (), {"stdout": "no numbers"}))
    assert best_precision(a_config(), STORED).reason.startswith("products in bfloat16 could not be tried on Chip")


def test_the_trial_times_products_in_both_types(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    seconds = trial_seconds("chip", ["flag"], {"hidden_size": 576, "intermediate_size": 1536})
    assert seconds.keys() == {"float32", "bfloat16"} and all(0 < each < 0.5 for each in seconds.values())
    assert trial_seconds("chip", ["flag"], {"hidden_size": 576, "intermediate_size": 1536}) == seconds, "kept"


SMOLLM2 = {"dtype": "bfloat16", "hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536}
SMOLLM2 |= {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("parameters", "longest", "own", "tokens"),
    [
        (135 * 10**6, 128, {}, 1024),
        (135 * 10**6, 2048, {}, 2048),  # a sequence is never cut
        (135 * 10**6, 128, {"tokens_per_microbatch": 8192}, 8192),
        (8 * 10**9, 128, {}, 4096),  # its activations are little beside its weights
    ],
)
def test_a_pack_on_cpus_is_smaller_where_its_activations_would_be_most_of_the_memory(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    parameters: int,
    longest: int,
    own: dict[str, int],
    tokens: int,
) -> None:
    machine("avx512_bf16", times=2.0)
    monkeypatch.setattr("tasks.checks.memory_plan.num_parameters", lambda config: parameters)
    monkeypatch.setattr("tasks.checks.memory_plan.gpu_memory", list)
    config = a_config(engine={"max_model_len": longest}, sampling={"max_tokens": 48}, train=own)
    decided = for_this_machine(config, SMOLLM2)
    assert decided.train.tokens_per_microbatch == tokens
    assert for_this_machine(decided, SMOLLM2) == decided
    assert make_config(decided.model_dump(mode="json"), source="run") == decided, "a run file could say so"


def test_a_run_keeps_the_packs_it_began_with(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("avx512_bf16", times=2.0)
    monkeypatch.setattr("tasks.checks.memory_plan.num_parameters", lambda config: 135 * 10**6)
    config = a_config(
        run="run", store=str(tmp_path / "store"), engine={"max_model_len": 128}, sampling={"max_tokens": 9}
    )
    create_run(LocalStore(tmp_path / "store"), "run", config.model_dump(mode="json"))  # as earlier versions had it
    assert for_this_machine(config, SMOLLM2).train.tokens_per_microbatch == 4096
