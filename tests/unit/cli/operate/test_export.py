"""`millrace export`: a folder that other tools load, or a sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoTokenizer

from storage.log.entries import Policy
from storage.log.run_log import RunLog
from storage.log.runs import create_run
from storage.objects.digests import DIGEST_FILE, WEIGHTS_FILE, seal_folder, verify_folder
from storage.objects.object_store import LocalStore
from storage.policies.adapters import ADAPTER_WEIGHTS
from tests.builders import a_shard, a_step, a_summary
from tests.unit.cli.builders import printed
from tests.unit.trainers import builders
from trainers.checkpoint import save_policy, save_state
from trainers.model.lora import adapter_weights, add_adapters, saved_name, write_adapter

_SEQUENCE = [2, 7, 8, 4, 9, 3, 5]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return builders.tiny_model(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture
def log(store: LocalStore, base: Path, tmp_path: Path) -> RunLog:
    """Policy 0 is the base model, 1 is an adapter."""
    write_adapter(_trained(base), tmp_path / "adapter", base="tiny")
    seal_folder(tmp_path / "adapter")
    return _a_run(store, base, tmp_path / "adapter")


def _a_run(store: LocalStore, base: Path, folder: Path, *, state_path: str | None = None) -> RunLog:
    """A run of one step, which made the policy in a folder."""
    log = create_run(store, "run", {})
    log.store.put_folder(base, "models/tiny", last=DIGEST_FILE)
    log.append(Policy(version=0, path="models/tiny", weights_sha256=verify_folder(base), parent=None))
    log.append(a_shard("s1", [a_summary(1)]))
    step = a_step(log.state, trained=["0.task1"])
    log.store.put_folder(folder, step.policy.path, last=DIGEST_FILE)
    log.append(replace(step, policy=replace(step.policy, weights_sha256=verify_folder(folder)), state_path=state_path))
    return log


def _trained(base: Path) -> torch.nn.Module:
    causal_lm, generator = builders.load_causal_lm(base), torch.Generator().manual_seed(1)
    add_adapters(causal_lm, rank=2, alpha=8.0, target_modules="all-linear", seed=0)
    for weight in adapter_weights(causal_lm).values():
        weight.data = 0.3 * torch.randn(weight.shape, generator=generator)
    return causal_lm


@torch.no_grad()
def _logprobs(causal_lm: torch.nn.Module) -> torch.Tensor:
    return builders.logprobs_alone(causal_lm, _SEQUENCE)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def _export(options: str, out: Path, *, status: int = 0) -> str:
    return printed(f"export run {options} --to", str(out), status=status)


def test_merged_it_is_a_model_that_transformers_loads(log: RunLog, base: Path, out: Path) -> None:
    assert "policy 1 of run run, adapters merged into the base model" in _export("--merge", out)
    merged = builders.load_causal_lm(out)
    torch.testing.assert_close(_logprobs(merged), _logprobs(_trained(base)), atol=1e-5, rtol=0)
    assert (_logprobs(merged) - _logprobs(builders.load_causal_lm(base))).abs().max() > 0.1
    verify_folder(out)
    assert AutoTokenizer.from_pretrained(out).encode("1+2=") == AutoTokenizer.from_pretrained(base).encode("1+2=")


def test_unmerged_it_is_an_adapter_that_peft_loads(log: RunLog, base: Path, out: Path) -> None:
    exported = json.loads(_export("--json", out))
    assert exported["kind"] == "adapter" and exported["base"] == f"{log.store.uri}/models/tiny"
    assert exported["weights_sha256"] == exported["policy_sha256"] == verify_folder(out)
    by_peft = PeftModel.from_pretrained(builders.load_causal_lm(base), str(out))
    assert torch.equal(_logprobs(by_peft), _logprobs(_trained(base)))


def test_a_whole_policy_is_copied(log: RunLog, base: Path, out: Path) -> None:
    assert "policy 0 of run run, a whole model" in _export("--version 0", out)
    assert not (out / ADAPTER_WEIGHTS).exists()
    assert torch.equal(_logprobs(builders.load_causal_lm(out)), _logprobs(builders.load_causal_lm(base)))


def test_the_average_is_that_of_the_state_saved_with_the_step(
    store: LocalStore, base: Path, tmp_path: Path, out: Path
) -> None:
    trainer = builders.trainer_of(base, learning_rate=0.1, ema=0.5)
    after: list[dict[str, torch.Tensor]] = []
    for number in range(1, 3):
        builders.take_step(trainer, builders.samples_of(builders.random_rows(base)), step=number, max_staleness=2)
        after.append({saved_name(name): tensor for name, tensor in builders.weights(trainer).items()})
    save_policy(trainer.model, base, tmp_path / "policy")
    save_state(trainer, tmp_path / "state", step=1)
    store.put_folder(tmp_path / "state", "runs/run/state/1-a", last=DIGEST_FILE)
    _a_run(store, base, tmp_path / "policy", state_path="runs/run/state/1-a")

    assert "policy 1 of run run, a whole model, moving average" in _export("--average", out)
    found, start = load_file(out / WEIGHTS_FILE), load_file(base / WEIGHTS_FILE)
    for name, tensor in found.items():
        expected = 0.25 * start[name] + 0.25 * after[0][name] + 0.5 * after[1][name]
        torch.testing.assert_close(tensor, expected, atol=1e-6, rtol=0)
        assert not torch.equal(tensor, after[1][name])
    verify_folder(out)
    assert AutoTokenizer.from_pretrained(out).encode("1+2=")


def test_what_cannot_be_exported_is_one_sentence_and_leaves_nothing(log: RunLog, home: Path, out: Path) -> None:
    before, refused = set(home.iterdir()), partial(_export, out=out, status=2)
    assert "has no policy version 7; it has 0 to 1" in refused("--version 7")
    assert "has no saved optimizer state, which holds the average; there is none" in refused("--average")
    assert "has no adapters to merge; leave --merge out" in refused("--version 0 --merge")
    log.store.put(f"{log.state.policies[1].path}/{ADAPTER_WEIGHTS}", b"other")
    assert "differs from its digest" in refused("")
    assert set(home.iterdir()) == before
    out.mkdir()
    assert "is there already; remove it, or choose another folder" in refused("")
    assert not list(out.iterdir())
