"""A finished run that several files of tests read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import SCRIPTED, Home


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, prefect_api: str, base_model: Path, fork_source: str) -> Home:
    """One finished run of six steps with a scripted engine; add to it, but change nothing."""
    home = Home(tmp_path_factory.mktemp("finished"), prefect_api, forks=fork_source)
    home.run("train", str(SCRIPTED), f"model={base_model}")
    return home
