"""The real engine with adapters: versions, logprobs, the echoed digest, swaps under running requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.processes import run_checks

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]


def test_adapters_on_the_engine_in_a_process_of_its_own(base_model: Path, tmp_path: Path) -> None:
    run_checks("tests.engine.check_lora", base_model, tmp_path)
