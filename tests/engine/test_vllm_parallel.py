"""The real engine in two parts: tokens, logprobs, versions and failed loads as on one, and a part that dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.arithmetic import Arithmetic
from tests.engine.processes import run_checks
from trainers.model.warmup import make_base_model

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_an_engine_of_two_parts_in_a_process_of_its_own(tmp_path: Path) -> None:
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
    run_checks("tests.engine.check_parallel", tmp_path / "base", tmp_path)
