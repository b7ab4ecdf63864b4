"""A run that an earlier version recorded goes on, through the real command and without a Prefect server."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from pathlib import Path

from storage.log.runs import open_run
from storage.objects.object_store import LocalStore
from tests.conftest import MILLRACE, PROJECT, Home

GOLDEN = PROJECT / "tests" / "golden"


def test_a_recorded_run_is_trained_on_and_its_history_survives_the_in_process_api(tmp_path: Path) -> None:
    """Prefect's API in the command's process ends with it, and must have written every flow run and task run."""
    home = Home(tmp_path, prefect_api="")
    del home.environment["PREFECT_API_URL"]
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
    assert "continuing run golden after step 16" in done.stdout
    state = open_run(LocalStore(tmp_path / "store"), "golden").state
    assert state.step == 17 and len(state.sessions) == 4 and state.outcomes["0.25+49"] == "trained"
    assert state.steps[-1].claim.base_version == state.steps[-2].policy.version == 16

    with sqlite3.connect(tmp_path / "prefect" / "prefect.db") as database:
        flows = database.execute("select name, state_type from flow_run").fetchall()
        tasks = dict(database.execute("select name, state_type from task_run").fetchall())
    assert flows == [("golden", "COMPLETED")]
    assert {"train-17", "publish-17"} <= tasks.keys()
    assert set(tasks.values()) == {"COMPLETED"}
    assert len(tasks) <= 10, "at most ten task runs a round"
