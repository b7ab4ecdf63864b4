"""`pytest -m gpu` on a machine that was lent with a card: few packages, and no minute for what needs none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PROJECT

_MISSING = ("moto", "datasets", "duckdb", "gguf", "lancedb", "s3fs", "smolagents", "trl", "wandb")
"""Packages that other tests import."""


@pytest.mark.slow
def test_what_is_for_a_gpu_needs_few_packages_and_begins_with_what_takes_seconds(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({_MISSING}))\n")
    path = os.pathsep.join([str(tmp_path), str(PROJECT)])
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-qq", "-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=PROJECT, env={**environment, "PYTHONPATH": path}, capture_output=True, text=True)
    assert not done.returncode, done.stdout[-3000:]
    files = [line.split("::")[0] for line in done.stdout.splitlines() if "::" in line]
    marked = {str(file.relative_to(PROJECT)) for file in (PROJECT / "tests").rglob("test_*.py") if _is_marked(file)}
    assert set(files) == marked
    first_engine = files.index("tests/engine/test_vllm.py")
    assert first_engine >= 10 and set(files[first_engine:]) == {"tests/engine/test_vllm.py"}


def _is_marked(file: Path) -> bool:
    return bool(re.search(r"^@pytest\.mark\.gpu$|marks=\[pytest\.mark\.gpu", file.read_text(), re.MULTILINE))
