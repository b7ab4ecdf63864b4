"""The GPU benchmark runs from its file, without the libraries a bare machine lacks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.server
ROOT = Path(__file__).parents[3]
NOT_INSTALLED = ("pydantic", "prefect", "ray", "mlflow", "s3fs", "duckdb", "vllm", "peft", "polars")
BARE = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({NOT_INSTALLED}))  # None: importing it is an error, and looking for it finds nothing
sys.path[:] = [folder for folder in sys.path if folder not in ("", {str(ROOT)!r})]
script, *sys.argv[1:] = sys.argv[1:]
sys.argv[0] = script
runpy.run_path(script, run_name="__main__")
"""


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "benchmarks" / "gpu_train_step.py")
    return subprocess.run([sys.executable, "-c", BARE, script, *arguments], capture_output=True, text=True, cwd="/")


@pytest.mark.parametrize("options", [[], ["--checkpointing"]])
def test_a_tiny_step_runs_with_torch_and_transformers_alone(tmp_path: Path, options: list[str]):
    out = tmp_path / "numbers.json"
    done = _run("--device", "cpu", "--tiny", "--steps", "1", "--tokens", "512", "--json", str(out), *options)
    assert done.returncode == 0, done.stderr[-2000:]
    numbers = json.loads(out.read_text())
    run, of_one_sequence = numbers["runs"]
    # 2 layers: 4 linear maps of attention (64 × 64 twice, 64 × 32 twice) and 3 of 64 × 128; a tied matrix of 512 × 64.
    linear = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) + 512 * 64
    assert run["flops"] >= 8 * linear * 512
    assert run["flops"] <= 8 * linear * 512 + 4 * 2 * (2 * 2 * 32 * 256 * 512)  # no sequence is longer than 256
    assert run["tokens"] == 512 and run["grad_norm"] > 0
    assert of_one_sequence["flops"] == 8 * linear * 512 + 4 * 2 * (2 * 2 * 32 * 512 * 512)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_told_what_runs_there():
    done = _run("--tiny")
    assert done.returncode == 2
    assert "--device cpu --tiny" in done.stderr
