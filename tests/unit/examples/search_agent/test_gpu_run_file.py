"""The run file for a 7B model, checked by `--dry-run` on a model that has the shapes and no numbers."""

from __future__ import annotations

import itertools
import json
import math
import re
import string
import struct
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.main import app
from examples.search_agent.dataset import Problem, write_dataset
from examples.search_agent.passages import Passage

_FOLDER = Path(__file__).parents[4] / "examples" / "search_agent"
_RUN_FILE = _FOLDER / "search_agent_7b.toml"
_BF16_BYTES = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2.5-7B's sizes; the file of its weights is a hole of 15 GB that takes no space on the disk."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from trainers.model.warmup import character_tokenizer

    folder = tmp_path_factory.mktemp("qwen")
    config = Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    config.save_pretrained(folder)
    character_tokenizer(set(string.printable)).save_pretrained(folder)  # the references of a dry run are played
    with torch.device("meta"):
        shapes = {name: list(p.shape) for name, p in AutoModelForCausalLM.from_config(config).named_parameters()}
    ends = list(itertools.accumulate((_BF16_BYTES * math.prod(shape) for shape in shapes.values()), initial=0))
    header = json.dumps(
        {
            name: {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
            for (name, shape), offsets in zip(shapes.items(), itertools.pairwise(ends), strict=True)
        }
    ).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + ends[-1])
    return folder


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Questions, and the name of a server that nobody asks yet."""
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "home"))
    problems = {split: [Problem(id=split, question="Where?", answer="Rome")] for split in ("train", "test")}
    write_dataset(tmp_path / "data", [Passage(id="1", title="", text="Rome.")], problems)
    (tmp_path / "data" / "services.toml").write_text('search = ["http://search-1:8765", "http://search-2:8765"]')
    return tmp_path / "data"


def _dry_run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["train", str(_RUN_FILE), "--dry-run", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout


def _values(*overrides: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(_dry_run("--json", *overrides))
    return values


def test_it_fits_the_two_gpus_it_is_made_for(data: Path, model: Path):
    values = _values(f"model={model}", f"dataset={data}")
    assert values["parameters"] == 7_615_616_512
    assert values["attempts_per_step"] == 256 and values["most_groups_ahead"] == 64
    trainer = sum(value for name, value in values.items() if name.startswith("trainer_"))
    assert values["engine_weights_bytes"] < 0.85 * 80e9 and trainer < 80e9


def test_all_weights_fit_six_ranks_and_not_one(data: Path, model: Path, tmp_path: Path):
    """The copy without `lora` that README speaks of."""
    copied = tmp_path / "my_7b.toml"
    copied.write_text(re.sub(r"^lora = .*\n", "", _RUN_FILE.read_text(), flags=re.MULTILINE))
    found = {}
    for ranks in (1, 6):
        overrides = [f"model={model}", f"dataset={data}", f"train.num_ranks={ranks}", "rollout.num_workers=2"]
        run = ["train", str(copied), "--dry-run", "--json", *overrides, "learning_rate=1e-6"]
        result = CliRunner().invoke(app, run)
        assert result.exit_code == 0, result.output
        values = json.loads(result.stdout)
        found[ranks] = sum(value for name, value in values.items() if name.startswith("trainer_"))
    assert found[6] < 80e9 < found[1]


def test_readme_says_what_the_dry_run_prints(data: Path, model: Path):
    printed = _dry_run(f"model={model}", f"dataset={data}").splitlines()
    readme = (_FOLDER / "README.md").read_text()
    for line in printed:
        if line.startswith(("parameters", "trainer", "engine weights", "attempts per step", "most tokens per step")):
            assert " ".join(line.split()) in [" ".join(shown.split()) for shown in readme.splitlines()], line


def test_nothing_is_fetched_where_the_model_is_not_here(data: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(data / "hub"))
    values = _values(f"dataset={data}")
    assert values["model"] == "Qwen/Qwen2.5-7B-Instruct" and values["parameters"] is None
    assert values["train_tasks"] == 1 and not (data / "hub").exists()
