"""Faults end processes, and what is below them: each command has its own source of forks."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def fork_source() -> str:
    return ""
