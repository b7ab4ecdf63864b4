"""`millrace export`: a folder that other tools load, or a sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoTokenizer
from typer.testing import CliRunner

from cli.main import app
from storage.log.entries import Policy
from storage.log.run_log import RunLog
from storage.log.runs import create_run
from storage.objects.digests import DIGEST_FILE, WEIGHTS_FILE, seal_folder, verify_folder
from storage.objects.object_store import LocalStore
from storage.policies.adapters import ADAPTER_WEIGHTS
from tests.builders import a_shard, a_step, a_summary
from tests.unit.trainers.builders import (
    load_causal_lm,
    logprobs_alone,
    random_rows,
    samples_of,
    take_step,
    tiny_model,
    trainer_of,
    weights,
)
from trainers.checkpoint import save_policy, save_state
from trainers.model.lora import adapter_weights, add_adapters, saved_name, write_adapter

_SEQUENCE = [2, 7, 8, 4, 9, 3, 5]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture
def log(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> RunLog:
    """Policy 0 is the base model, 1 is an adapter."""
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    log = create_run(LocalStore(tmp_path / "store"), "run", {})
    log.store.put_folder(base, "models/tiny", last=DIGEST_FILE)
    log.append(Policy(version=0, path="models/tiny", weights_sha256=verify_folder(base), parent=None))
    log.append(a_shard("s1", [a_summary(1)]))
    step = a_step(log.state, trained=["0.task1"])
    write_adapter(_trained(base), tmp_path / "adapter", base="tiny")
    digest = seal_folder(tmp_path / "adapter")
    log.store.put_folder(tmp_path / "adapter", step.policy.path, last=DIGEST_FILE)
    log.append(replace(step, policy=replace(step.policy, weights_sha256=digest)))
    return log


def _trained(base: Path) -> torch.nn.Module:
    causal_lm, generator = load_causal_lm(base), torch.Generator().manual_seed(1)
    add_adapters(causal_lm, rank=2, alpha=8.0, target_modules="all-linear", seed=0)
    for weight in adapter_weights(causal_lm).values():
        weight.data = 0.3 * torch.randn(weight.shape, generator=generator)
    return causal_lm


@torch.no_grad()
def _logprobs(causal_lm: torch.nn.Module) -> torch.Tensor:
    return logprobs_alone(causal_lm, _SEQUENCE)


def _export(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["export", *arguments], env={"COLUMNS": "300"})
    return result.exit_code, result.output


def test_merged_it_is_a_model_that_transformers_loads(log: RunLog, base: Path, tmp_path: Path) -> None:
    code, output = _export("run", "--to", str(tmp_path / "out"), "--merge")
    assert code == 0 and "policy 1 of run run, adapters merged into the base model" in output
    merged = load_causal_lm(tmp_path / "out")
    torch.testing.assert_close(_logprobs(merged), _logprobs(_trained(base)), atol=1e-5, rtol=0)
    assert (_logprobs(merged) - _logprobs(load_causal_lm(base))).abs().max() > 0.1
    verify_folder(tmp_path / "out")
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again.encode("1+2=") == AutoTokenizer.from_pretrained(base).encode("1+2=")


def test_unmerged_it_is_an_adapter_that_peft_loads(log: RunLog, base: Path, tmp_path: Path) -> None:
    code, output = _export("run", "--to", str(tmp_path / "out"), "--json")
    assert code == 0
    exported = json.loads(output)
    assert exported["kind"] == "adapter" and exported["base"] == f"{log.store.uri}/models/tiny"
    assert exported["weights_sha256"] == exported["policy_sha256"] == verify_folder(tmp_path / "out")
    by_peft = PeftModel.from_pretrained(load_causal_lm(base), str(tmp_path / "out"))
    assert torch.equal(_logprobs(by_peft), _logprobs(_trained(base)))


def test_a_whole_policy_is_copied(log: RunLog, base: Path, tmp_path: Path) -> None:
    code, output = _export("run", "--version", "0", "--to", str(tmp_path / "out"))
    assert code == 0 and "policy 0 of run run, a whole model" in output
    assert not (tmp_path / "out" / ADAPTER_WEIGHTS).exists()
    assert torch.equal(_logprobs(load_causal_lm(tmp_path / "out")), _logprobs(load_causal_lm(base)))


def test_the_average_is_that_of_the_state_saved_with_the_step(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    trainer = trainer_of(base, learning_rate=0.1, ema=0.5)
    after: list[dict[str, torch.Tensor]] = []
    for number in range(1, 3):
        take_step(trainer, samples_of(random_rows(base)), step=number, max_staleness=2)
        after.append({saved_name(name): tensor for name, tensor in weights(trainer).items()})
    log = create_run(LocalStore(tmp_path / "store"), "run", {})
    log.store.put_folder(base, "models/tiny", last=DIGEST_FILE)
    log.append(Policy(version=0, path="models/tiny", weights_sha256=verify_folder(base), parent=None))
    log.append(a_shard("s1", [a_summary(1)]))
    step = a_step(log.state, trained=["0.task1"])
    save_policy(trainer.model, base, tmp_path / "policy", dtype=torch.float32)
    save_state(trainer, tmp_path / "state", step=1)
    log.store.put_folder(tmp_path / "policy", step.policy.path, last=DIGEST_FILE)
    log.store.put_folder(tmp_path / "state", "runs/run/state/1-a", last=DIGEST_FILE)
    policy = replace(step.policy, weights_sha256=verify_folder(tmp_path / "policy"))
    log.append(replace(step, policy=policy, state_path="runs/run/state/1-a"))

    code, output = _export("run", "--average", "--to", str(tmp_path / "out"))
    assert code == 0 and "policy 1 of run run, a whole model, moving average" in output, output
    found, start = load_file(tmp_path / "out" / WEIGHTS_FILE), load_file(base / WEIGHTS_FILE)
    for name, tensor in found.items():
        expected = 0.25 * start[name] + 0.25 * after[0][name] + 0.5 * after[1][name]
        torch.testing.assert_close(tensor, expected, atol=1e-6, rtol=0)
        assert not torch.equal(tensor, after[1][name])
    verify_folder(tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("1+2=")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["other"], "no run 'other'"),
        (["run", "--version", "7"], "has no policy version 7; it has 0 to 1"),
        (["run", "--average"], "has no saved optimizer state, which holds the average; there is none"),
        (["run", "--version", "0", "--merge"], "has no adapters to merge; leave --merge out"),
    ],
)
def test_what_cannot_be_exported_is_one_sentence_and_leaves_nothing(
    log: RunLog, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    before = set(tmp_path.iterdir())
    code, output = _export(*arguments, "--to", str(tmp_path / "out"))
    assert code == 2 and sentence in output, output
    assert set(tmp_path.iterdir()) == before


def test_a_folder_that_exists_is_left_alone(log: RunLog, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    code, output = _export("run", "--to", str(tmp_path / "out"))
    assert code == 2 and "is there already; remove it, or choose another folder" in output
    assert not list((tmp_path / "out").iterdir())


def test_altered_files_are_not_exported(log: RunLog, tmp_path: Path) -> None:
    path = log.state.policies[1].path
    log.store.put(f"{path}/{ADAPTER_WEIGHTS}", b"other")
    code, output = _export("run", "--to", str(tmp_path / "out"))
    assert code == 2 and "differs from its digest" in output and not (tmp_path / "out").exists()
