"""`millrace train --dry-run` says what a run file comes to, and starts and writes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.main import app
from settings.run_file import default_values, load_run_file
from storage.log.runs import create_run
from storage.objects.object_store import LocalStore
from tests.builders import BASE, a_shard, a_step, a_summary
from tests.unit.trainers.builders import tiny_model

RUN_FILE = "examples/arithmetic.toml"
_SHOWN = """
import sys
from pathlib import Path
from cli.run.dry_run import derived_values
from settings.run_file import load_run_file
derived_values(load_run_file(Path("examples/arithmetic.toml")))
print(*sorted({"torch", "vllm", "ray", "prefect", "mlflow", "transformers"} & sys.modules.keys()))
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    return tmp_path


def _values(*overrides: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["train", RUN_FILE, "--dry-run", "--json", *overrides])
    assert result.exit_code == 0, result.output
    values: dict[str, Any] = json.loads(result.stdout)
    return values


def test_batches_are_what_the_settings_multiply_to(home: Path) -> None:
    values = _values(
        "batch_size=10",
        "n_samples=4",
        "train.num_minibatches=2",
        "train.num_epochs=3",
        "train.tokens_per_microbatch=1024",
        "max_staleness=1",
    )
    assert values["attempts_per_step"] == 40 and values["attempts_per_update"] == 20
    assert values["updates_per_step"] == 6
    assert values["most_tokens_per_step"] == 40 * 64 and values["most_sampled_tokens_per_turn"] == 40 * 8
    assert values["most_passes_per_update_and_rank"] == 2  # 1,280 tokens in packs of 1,024
    assert values["most_groups_ahead"] == 20
    assert values["train_tasks"] == 9800 and values["evaluation_tasks"] == 200
    assert values["steps_done"] is None
    assert not (home / "store" / "runs").exists()


def test_parameters_are_counted_in_the_model_folder(home: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_model(home / "tiny")
    model = AutoModelForCausalLM.from_pretrained(folder)
    values = _values(f"model={folder}")
    count = sum(parameter.numel() for parameter in model.parameters())
    assert values["parameters"] == count
    assert values["trainer_weights_bytes"] == 4 * count
    assert values["trainer_gradients_and_moments_bytes"] == 12 * count
    with_critic = _values(f"model={folder}", "train.advantage=gae", "train.num_ranks=2")
    assert with_critic["trainer_weights_bytes"] == 4 * count
    assert with_critic["trainer_gradients_and_moments_bytes"] == 12 * count


def test_a_model_of_the_hub_that_is_not_here_has_no_sizes_yet(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "hub"))
    values = _values("model=nobody/nothing")
    assert values["parameters"] is None and values["attempts_per_step"] == 512


def test_a_run_that_exists_is_compared_and_its_steps_are_said(home: Path) -> None:
    config = load_run_file(Path(RUN_FILE)).model_dump(mode="json")
    log = create_run(LocalStore(home / "store"), "arithmetic", config, defaults=default_values())
    log.append(BASE)
    log.append(a_shard("s", [a_summary(0)]))
    assert _values("batch_size=8")["steps_done"] == 0  # without a step it begins anew
    log.append(a_step(log.refresh()))
    assert _values()["steps_done"] == 1
    result = CliRunner().invoke(app, ["train", RUN_FILE, "--dry-run", "batch_size=8"], env={"COLUMNS": "300"})
    assert result.exit_code == 2 and "batch_size (64 → 8)" in result.output


def test_people_get_a_table_and_the_news_that_nothing_was_started() -> None:
    result = CliRunner().invoke(app, ["train", RUN_FILE, "--dry-run"], env={"COLUMNS": "300"})
    assert "attempts per step" in result.output and "new run" in result.output
    assert "nothing was started" in result.output


def test_a_wrong_setting_is_refused_as_by_a_start() -> None:
    result = CliRunner().invoke(app, ["train", RUN_FILE, "--dry-run", "batch_sise=8"])
    assert result.exit_code == 2 and "did you mean 'batch_size'" in result.output


def test_nothing_heavy_is_imported() -> None:
    shown = subprocess.run([sys.executable, "-c", _SHOWN], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == ""
