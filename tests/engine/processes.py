"""Checks of the engine in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import PROJECT


def run_checks(module: str, base: Path, scratch: Path) -> None:
    """Run `module` with a base model and a folder to write in, and see that all its checks passed.

    vLLM starts child processes by re-importing `__main__`, so it gets a process that is not pytest.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, str(base), str(scratch)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=1100,
        env={
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
        },
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "all checks passed" in done.stdout
