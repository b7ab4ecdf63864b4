"""Architectures that vLLM computes or reloads in other ways than Llama are trained and served exactly, and experts are
the engine's if they are replayed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PROJECT

_KINDS = ["gpt_oss", "lfm2", "deepseek_v3", "qwen3_moe"]
"""Experts and sinks that are copied; heads that are rotated apart; latent attention; experts one by one."""


@pytest.mark.slow
def test_a_row_of_the_table_comes_out_again(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.models",
        *_KINDS,
        "--without",
        "slot",
        "--json",
        str(tmp_path / "models.json"),
    ]
    environment = {**os.environ, "HOME": str(tmp_path)}
    subprocess.run(command, check=True, timeout=900, cwd=PROJECT, env=environment)
    rows = json.loads((tmp_path / "models.json").read_text())
    columns = ("packed", "all", "ranks", "adapters", "served")
    assert {name: row[column] for name, row in rows.items() for column in columns if row[column].startswith("no")} == {}
    assert rows.keys() == set(_KINDS)
    assert {name: row["replay"] for name, row in rows.items()} == {**dict.fromkeys(_KINDS, "yes"), "lfm2": "no experts"}


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_replayed_experts_bring_engine_and_trainer_together(tmp_path: Path) -> None:
    out = tmp_path / "routes.json"
    command = [sys.executable, "-m", "benchmarks.router_replay", "Qwen3-MoE, 2 of 128", "--json", str(out)]
    subprocess.run(command, check=True, timeout=500, cwd=PROJECT, env={**os.environ, "HOME": str(tmp_path)})
    rows = {row["dtype"]: row for row in json.loads(out.read_text())["models"]}
    assert {row["equal_choices_replayed"] for row in rows.values()} == {1.0}
    assert rows["bfloat16"]["equal_choices"] < 0.95 and rows["float32"]["gap_replayed"] < 1e-4
    assert rows["bfloat16"]["gap_replayed"] * 5 < rows["bfloat16"]["gap"]
