"""A whole run on a machine as some are: a proxy that never answers, no home, temporary space with a long path, and a
folder whose name means something in URIs. Nothing of it shows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from storage.log.runs import open_run
from storage.objects.object_store import LocalStore
from tests.conftest import MILLRACE, PROJECT, SCRIPTED


@pytest.mark.server
@pytest.mark.slow
def test_a_run_behind_a_dead_proxy_without_a_home_in_a_folder_of_any_name(tmp_path: Path, base_model: Path) -> None:
    folder = tmp_path / "50% off" / "why?"
    temporary = (
        tmp_path / "slurm-job.1234567" / "node-with-a-long-name-0001" / "scratch" / "users" / "somebody" / "step.0"
    )
    for made in (folder, temporary):
        made.mkdir(parents=True)
    shutil.copy(SCRIPTED, folder / "run.toml")
    given = {"HOME": "/dev/null", "TMPDIR": str(temporary), "PYTHONPATH": str(PROJECT), "COLUMNS": "300"}
    given |= dict.fromkeys(["HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"], "http://127.0.0.1:9")
    unset = ("NO_PROXY", "no_proxy", "MILLRACE_HOME", "MILLRACE_STORE", "PREFECT_API_URL", "PREFECT_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in unset} | given
    command = [str(MILLRACE), "train", "run.toml", "steps=2", "evaluation.every=0", f"model={base_model}"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    output = done.stdout + done.stderr
    assert done.returncode == 0 and "Traceback" not in output, output
    assert not re.search("did not take everything|does not answer|could not be told", output), "no service was away"
    assert open_run(LocalStore(folder / ".millrace" / "store"), "scripted").state.step == 2
    assert {path.name for path in folder.iterdir()} == {"run.toml", ".millrace"}, "every database is in its folder"
    assert (folder / ".millrace" / "mlflow.db").exists() and (folder / ".millrace" / "prefect" / "prefect.db").exists()
    assert not [path for path in temporary.rglob("*") if path.is_file()]
    assert not list((folder / ".millrace" / "cache" / "staging").iterdir())
