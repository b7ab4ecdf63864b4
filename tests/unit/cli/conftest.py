"""A state folder for every test of the command, and a run in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.log.run_log import RunLog
from storage.log.runs import create_run
from storage.objects.object_store import LocalStore
from tests.builders import BASE


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh state folder; no other store or server is named."""
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    for name in ("MILLRACE_STORE", "MILLRACE_TRACKING", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def store(home: Path) -> LocalStore:
    """The default store."""
    return LocalStore(home / "store")


@pytest.fixture
def log(store: LocalStore) -> RunLog:
    """Run `run`, which has its base policy and nothing more."""
    log = create_run(store, "run", {})
    log.append(BASE)
    return log
