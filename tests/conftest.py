"""Fixtures several folders of tests share: a tiny base model, one set of services, runs of the real command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from infra.environment import TELEMETRY_OFF

PROJECT = Path(__file__).resolve().parent.parent
MILLRACE = Path(sys.executable).parent / "millrace"
SCRIPTED = PROJECT / "tests" / "flows" / "scripted.toml"


def pytest_configure() -> None:
    os.environ.update(TELEMETRY_OFF)


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An arithmetic base model after two supervised steps: the right shape, and knowing nothing."""
    from examples.arithmetic import Arithmetic
    from trainers.warmup import make_base_model

    folder = tmp_path_factory.mktemp("base") / "tiny"
    make_base_model(
        folder,
        Arithmetic().demonstrations(200, seed=0),
        hidden_size=32,
        num_layers=2,
        target_loss=0.1,
        num_steps=2,
        batch_size=16,
        learning_rate=1e-3,
        seed=0,
    )
    return folder


class Home:
    """A state folder of its own, and the real command run against it."""

    def __init__(self, path: Path, prefect_api: str) -> None:
        self.path = path
        self.environment = {**os.environ, "MILLRACE_HOME": str(path), "PREFECT_API_URL": prefect_api, "COLUMNS": "200"}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `millrace …` in a process group of its own."""
        log = open(self.path / "output.txt", "a")  # noqa: SIM115 - the child keeps it
        return subprocess.Popen(
            [str(MILLRACE), *arguments],
            env=self.environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            cwd=PROJECT,
        )

    def run(self, *arguments: str, check: bool = True, timeout: float = 400) -> subprocess.CompletedProcess[str]:
        """Run `millrace …` to its end."""
        done = subprocess.run(
            [str(MILLRACE), *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            cwd=PROJECT,
            timeout=timeout,
        )
        assert not check or done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{self.worker_logs()}"
        return done

    def status(self, run: str) -> dict[str, object]:
        """`millrace status --json`."""
        return dict(json.loads(self.run("status", run, "--json").stdout))

    def worker_logs(self) -> str:
        """The end of every worker's log, for a failing test's message."""
        return "\n".join(f"== {f}\n{f.read_text()[-2000:]}" for f in self.path.glob("logs/*/*.log"))


@pytest.fixture(scope="session")
def services_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state folder of the shared services."""
    return tmp_path_factory.mktemp("services")


@pytest.fixture(scope="session")
def prefect_api(services_home: Path) -> Iterator[str]:
    """A real Prefect server, MLflow server and worker, started as `make up` does and stopped at the end."""
    home = services_home
    environment = {**os.environ, "MILLRACE_HOME": str(home)}
    environment.pop("PREFECT_API_URL", None)
    up = subprocess.run(
        [str(MILLRACE), "up"], env=environment, capture_output=True, text=True, cwd=PROJECT, timeout=200
    )
    assert up.returncode == 0, up.stdout + up.stderr
    services = [psutil.Process(service["pid"]) for service in json.loads((home / "services.json").read_text())]
    url = next(s["url"] for s in json.loads((home / "services.json").read_text()) if s["name"] == "prefect")
    family = [p for service in services for p in [service, *service.children(recursive=True)]]
    yield f"{url}/api"
    family += [p for service in services if service.is_running() for p in service.children(recursive=True)]
    subprocess.run([str(MILLRACE), "down"], env=environment, check=True, capture_output=True, timeout=60)
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE], f"`make down` left {alive}"


@pytest.fixture
def home(tmp_path: Path, prefect_api: str) -> Home:
    """A fresh state folder, reporting to the shared Prefect server."""
    return Home(tmp_path, prefect_api)
