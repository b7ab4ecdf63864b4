"""The real engine with adapters: versions, logprobs, the echoed digest, swaps under running requests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PROJECT

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_adapters_on_the_engine_in_a_process_of_its_own(base_model: Path, tmp_path: Path) -> None:
    """vLLM starts child processes by re-importing `__main__`, so it gets a process that is not pytest."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.check_lora", str(base_model), str(tmp_path)],
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
