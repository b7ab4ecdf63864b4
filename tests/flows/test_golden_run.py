"""A run that an earlier version recorded goes on, through the real command."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from storage.log.runs import open_run
from storage.objects.object_store import LocalStore
from tests.conftest import MILLRACE, PROJECT, Home

GOLDEN = PROJECT / "tests" / "golden"


def test_a_run_recorded_by_an_earlier_version_is_trained_on(tmp_path: Path, prefect_api: str) -> None:
    home = Home(tmp_path, prefect_api)
    shutil.copytree(GOLDEN / "run", tmp_path / "store")
    shutil.copytree(GOLDEN / "run/models/tiny-be726b61", tmp_path / "tiny")  # a run keeps its model's path
    done = subprocess.run(
        [MILLRACE, "train", GOLDEN / "run.toml"],
        env={**home.environment, "PYTHONPATH": os.pathsep.join([str(PROJECT), os.environ.get("PYTHONPATH", "")])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{home.worker_logs()}"
    assert "continuing run golden at step 16" in done.stdout
    state = open_run(LocalStore(tmp_path / "store"), "golden").state
    assert state.step == 17 and len(state.sessions) == 4 and state.outcomes["0.25+49"] == "trained"
    assert state.steps[-1].claim.base_version == state.steps[-2].policy.version == 16
