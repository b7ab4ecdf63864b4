"""A benchmark that is too short to measure anything says so before it starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.documents import PROJECT


@pytest.mark.parametrize(
    ("command", "said"),
    [("staleness --steps 2", "at least 3"), ("trl_speed --workload arithmetic --steps 3", "at least 4")],
)
def test_too_few_steps_are_refused(command: str, said: str) -> None:
    words = [sys.executable, "-m", *f"benchmarks.{command}".split()]
    done = subprocess.run(words, cwd=PROJECT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "--steps" in done.stderr and said in done.stderr, done.stderr
