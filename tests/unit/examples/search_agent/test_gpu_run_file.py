"""The run file for a 7B model, checked by `--dry-run` on a model that has the shapes and no numbers."""

from __future__ import annotations

import dataclasses
import json
import re
import string
import struct
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from examples.search_agent.dataset import write_dataset
from infra.devices import GpuMemory
from tasks.checks.memory_plan import Memory
from tests.unit.examples.search_agent.episodes import FOLDER, PASSAGES, PROBLEM, write_folder

_RUN_FILE = FOLDER / "search_agent_7b.toml"
_PARAMETERS = 7_615_616_512
"""Of Qwen2.5-7B, counted over what transformers makes of its configuration."""
_PROMPTS = 32
"""Of a step, by the run file."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2.5-7B's sizes; the file of its weights is a hole of 15 GB that takes no space on the disk."""
    from trainers.model.warmup import character_tokenizer

    folder = tmp_path_factory.mktemp("qwen")
    sizes = {"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "intermediate_size": 18944}
    sizes |= {"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "dtype": "bfloat16"}
    sizes |= {"tie_word_embeddings": False, "max_position_embeddings": 32768}
    (folder / "config.json").write_text(json.dumps(sizes))
    character_tokenizer(set(string.printable)).save_pretrained(folder)  # the references of a dry run are played
    end = 2 * _PARAMETERS  # bfloat16
    header = json.dumps({"all": {"dtype": "BF16", "shape": [_PARAMETERS], "data_offsets": [0, end]}}).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)
    return folder


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Questions for a batch, and the names of servers that are not asked yet."""
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "home"))
    gpus = [GpuMemory(name=str(number), total=80 * 2**30, free=80 * 2**30) for number in range(8)]
    here = Memory(gpus=gpus, machine=512 * 2**30)
    monkeypatch.setattr(Memory, "of_this_machine", lambda: here)
    folder = tmp_path / "data"
    write_folder(folder, services='search = ["http://search-1:8765", "http://search-2:8765"]')
    train = [dataclasses.replace(PROBLEM, id=str(number)) for number in range(_PROMPTS)]
    write_dataset(folder, PASSAGES, {"train": train, "test": [PROBLEM]})
    return folder


def _dry_run(*arguments: str, run_file: Path = _RUN_FILE, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["train", str(run_file), "--dry-run", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == status, result.output
    return result.output


def test_adapters_fit_its_two_gpus_and_all_weights_fit_six_ranks(data: Path, model: Path, tmp_path: Path):
    overrides = ["--json", f"model={model}", f"dataset={data}"]
    values = json.loads(_dry_run(*overrides))
    assert values["parameters"] == _PARAMETERS
    assert values["attempts_per_step"] == 256 and values["most_groups_ahead"] == 64
    assert all(device["needed"] < device["free"] for device in values["devices"].values())

    without_lora = tmp_path / "my_7b.toml"  # the copy that README speaks of
    without_lora.write_text(re.sub(r"^lora = .*\n", "", _RUN_FILE.read_text(), flags=re.MULTILINE))
    overrides += ["rollout.num_workers=2", "learning_rate=1e-6"]
    _dry_run(*overrides, "train.num_ranks=6", run_file=without_lora)
    refusal = _dry_run(*overrides, "train.num_ranks=1", run_file=without_lora, status=2)
    assert "needs 133.6 GB" in refusal and "of GPU 2" in refusal and "train.offload_optimizer = true" in refusal


def test_readme_says_what_the_dry_run_prints(data: Path, model: Path):
    printed = _dry_run(f"model={model}", f"dataset={data}").splitlines()
    readme = [" ".join(shown.split()) for shown in (FOLDER / "README.md").read_text().splitlines()]
    for line in printed:
        if line.startswith(("parameters", "trainer", "engine", "attempts per step", "most tokens per step", "GPU")):
            assert " ".join(line.split()) in readme, line


def test_nothing_is_fetched_if_the_model_is_not_here(data: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tasks.checks.preflight.check_on_hub", lambda name, kind: None)  # no network here
    monkeypatch.setenv("HF_HUB_CACHE", str(data / "hub"))
    values = json.loads(_dry_run("--json", f"dataset={data}"))
    assert values["model"] == "Qwen/Qwen2.5-7B-Instruct" and values["parameters"] is None
    assert values["train_tasks"] == _PROMPTS and not (data / "hub").exists()
