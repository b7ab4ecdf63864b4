"""A run that commands find in the state folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.log.run_log import RunLog
from storage.log.runs import create_run
from storage.objects.object_store import LocalStore
from tests.builders import BASE


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLog:
    """Run `run`, which has its base policy and nothing more."""
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    log = create_run(LocalStore(tmp_path / "store"), "run", {})
    log.append(BASE)
    return log
