"""The real engine in two parts: tokens, logprobs, versions and failed loads as on one, and a part that dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.arithmetic import Arithmetic
from tests.conftest import PROJECT
from trainers.warmup import make_base_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_an_engine_of_two_parts_in_a_process_of_its_own(tmp_path: Path) -> None:
    """vLLM starts child processes by re-importing `__main__`, so it gets a process that is not pytest."""
    make_base_model(
        tmp_path / "base",
        Arithmetic().demonstrations(200, seed=0),
        hidden_size=64,  # two heads: each part has one
        num_layers=2,
        target_loss=0.1,
        num_steps=2,
        batch_size=16,
        learning_rate=1e-3,
        seed=0,
    )
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.check_parallel", str(tmp_path / "base"), str(tmp_path)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=400,
        env={
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
        },
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "all checks passed" in done.stdout
