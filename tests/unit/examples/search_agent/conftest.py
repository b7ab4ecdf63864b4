"""Fixtures of the search agent's tests."""

from __future__ import annotations

import pytest

from examples.search_agent import endpoints


@pytest.fixture
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries come soon."""
    monkeypatch.setattr(endpoints, "_FIRST_DELAY", 0.01)
