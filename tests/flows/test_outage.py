"""Prefect's and MLflow's servers die in the middle of a run and come back: training does not notice, both catch up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.services import free_port
from storage.object_store import LocalStore
from storage.run_log import RunLog
from tests.conftest import SCRIPTED, Home

STEPS = 90


class ControlPlane:
    """A Prefect server and an MLflow server, each a process of its own on a port and a database it keeps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.prefect = f"http://127.0.0.1:{free_port(0)}"
        self.mlflow = f"http://127.0.0.1:{free_port(0)}"
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Return once both answer."""
        database = f"sqlite:///{self._folder / 'mlflow.db'}"
        serve = ["mlflow", "server", "--backend-store-uri", database, "--workers", "1"]
        serve += ["--default-artifact-root", str(self._folder / "mlartifacts")]
        self._processes = [
            self._start("prefect", ["prefect", "server", "start"], self.prefect),
            self._start("mlflow", serve, self.mlflow),
        ]
        for url in (f"{self.prefect}/api/health", f"{self.mlflow}/health"):
            _wait_until(lambda url=url: _answers(url), f"{url} answers")

    def kill(self) -> None:
        """kill -9, children included."""
        for process in self._processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes = []

    def _start(self, name: str, command: list[str], url: str) -> subprocess.Popen[bytes]:
        host, port = url.removeprefix("http://").split(":")
        settings = {"PREFECT_HOME": str(self._folder / "prefect"), "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with open(self._folder / f"{name}.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *command, "--host", host, "--port", port],
                env={**os.environ, **settings},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


@pytest.fixture
def control_plane(tmp_path: Path) -> Iterator[ControlPlane]:
    servers = ControlPlane(tmp_path)
    servers.start()
    yield servers
    servers.kill()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except OSError:
        return False


def _wait_until(done: Callable[[], bool], what: str, *, seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.05)


@pytest.mark.timeout(600)
def test_servers_that_are_away_for_a_third_of_a_run_know_everything_afterwards(
    tmp_path: Path, control_plane: ControlPlane, base_model: Path
) -> None:
    home = Home(tmp_path, f"{control_plane.prefect}/api")
    log = RunLog(LocalStore(tmp_path / "store"), "outage")
    tracking = f"tracking={control_plane.mlflow}"
    process = home.start("train", str(SCRIPTED), f"model={base_model}", tracking, "run=outage", f"steps={STEPS}")

    def step() -> int:
        assert process.poll() is None, (tmp_path / "output.txt").read_text()
        return log.refresh().step

    _wait_until(lambda: step() >= STEPS // 3, "the first third")
    control_plane.kill()
    died_at = step()
    _wait_until(lambda: step() >= 2 * STEPS // 3, "the second third")
    assert step() > died_at
    control_plane.start()
    back_at = step()
    print("died", died_at, "back", back_at)
    assert process.wait(timeout=200) == 0, (tmp_path / "output.txt").read_text()
    print((tmp_path / "output.txt").read_text())
    print(_task_runs(control_plane.prefect))
    print(_flow_runs(control_plane.prefect))
    control_plane.kill()
    assert 0


def _flow_runs(url: str) -> Any:
    import httpx
    return [(r["name"], r["state"]["type"]) for r in httpx.post(f"{url}/api/flow_runs/filter", json={}).json()]

def _task_runs(url: str) -> Any:
    import httpx
    found = []
    while True:
        got = httpx.post(f"{url}/api/task_runs/filter", json={"limit": 200, "offset": len(found)}).json()
        if not got:
            break
        found += got
    print(len(found))
    return Counter((r["name"].split("-")[0], r["state_type"]) for r in found)
