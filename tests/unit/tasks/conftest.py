"""Every test has a state folder of its own; `session` is one without processes, on a log in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.session import RunSession
from tests.builders import a_session


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))


@pytest.fixture
def session() -> RunSession:
    return a_session()
