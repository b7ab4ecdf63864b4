"""Fixtures several folders of tests share: a tiny base model, one set of services, runs of the real command."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from cli.run.flow import imported_early
from infra.environment import TELEMETRY_OFF, prepare_environment
from infra.forks import SOURCE
from settings.places.hints import COMMAND
from tests.apt import CannotInstall
from tests.ceph import Ceph, ceph_server

PROJECT = Path(__file__).resolve().parent.parent
MILLRACE = Path(sys.executable).parent / "millrace"
SCRIPTED = PROJECT / "tests" / "flows" / "scripted.toml"

pytest.register_assert_rewrite("tests.store_behaviour")
# The machine may be busy with other work: a slow example is no failure. Read where a test is defined, so set here.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


def pytest_configure() -> None:
    os.environ.update(TELEMETRY_OFF)
    os.environ[COMMAND] = "millrace"  # in hints, however the tests were started
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's threads must not spin beside other tests


def _is_for_a_gpu(config: pytest.Config) -> bool:
    """True for `pytest -m gpu`. A card is lent by the minute, and its machine may have few of the tests' packages."""
    return str(config.option.markexpr) == "gpu"


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """No two tests share the memory of a GPU."""
    if _is_for_a_gpu(config):
        config.option.numprocesses = 0
        config.option.verbose += 1  # a line for each, as it ends


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files without a test for a GPU are not imported for one."""
    is_test = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    return True if is_test and _is_for_a_gpu(config) and "mark.gpu" not in collection_path.read_text() else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The seconds of kernels and trainers before the minutes of engines."""
    if _is_for_a_gpu(config):
        items.sort(key=lambda item: item.get_closest_marker("engine") is not None)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def test_…` in an event loop of its own, for at most two minutes."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}), 120))
    return True


class ServersInTurn(LoadScopeScheduling):
    """Tests that start servers and runs come one after another, in two rows; behind the row that ends first the others,
    file by file. Machines of two cores have no time for more at once."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        if file.startswith(("tests/unit/", "tests/golden/")):
            return file
        return "runs" if file.startswith(("tests/engine/", "tests/flows/")) else "faults, stores and the like"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ServersInTurn:
    return ServersInTurn(config, log)


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_base_model(tmp_path_factory.mktemp("base") / "tiny")


def a_base_model(folder: Path, *, hidden_size: int = 32) -> Path:
    """An arithmetic base model after two supervised steps: the right shape, and knowing nothing."""
    from examples.arithmetic import Arithmetic
    from settings.warmup import WarmupSettings
    from trainers.model.warmup import make_base_model

    settings = WarmupSettings(hidden_size=hidden_size, target_loss=0.1, num_steps=2, batch_size=16, learning_rate=1e-3)
    make_base_model(folder, Arithmetic().demonstrations(200, seed=0), settings, seed=0)
    return folder


def _environment(home: Path) -> dict[str, str]:
    """For a command with this state folder, whatever a test in this process has filled in for a folder of its own."""
    return {**os.environ, "MILLRACE_HOME": str(home), "PREFECT_HOME": str(home / "prefect")}


class Home:
    """A state folder of its own, and the real command run against it."""

    def __init__(self, path: Path, prefect_api: str, *, forks: str = "") -> None:
        """`forks` is the process that workers are forks of, as `fork_source` says it; else each command has its own."""
        self.path = path
        # So wide that no sentence is broken in two.
        self.environment = {**_environment(path), "PREFECT_API_URL": prefect_api, "COLUMNS": "1000"}
        if forks:
            self.environment[SOURCE] = forks

    def alone(self) -> Home:
        """The same, with workers that are processes below each command."""
        self.environment.pop(SOURCE, None)
        return self

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

    def run(self, *arguments: str, check: bool = True, timeout: float = 900) -> subprocess.CompletedProcess[str]:
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

    def wait(self, process: subprocess.Popen[str], met: Callable[[], bool], *, seconds: float = 240) -> None:
        """Until something is so. Fails at once where the command ends before, with what it and its workers said.

        Looks for a tenth of the time, however long a look takes: what is waited for needs the processor.
        """
        deadline = time.monotonic() + seconds
        while True:
            looked = time.monotonic()
            if met():
                return
            assert process.poll() is None, f"it ended with {process.returncode}\n{self.said()}"
            assert time.monotonic() < deadline, f"not within {seconds:g} s\n{self.said()}"
            time.sleep(max(0.01, 9 * (time.monotonic() - looked)))

    def said(self) -> str:
        """What `start`ed commands have written, and their workers."""
        return f"{(self.path / 'output.txt').read_text()}\n{self.worker_logs()}"

    def process_of(self, run: str, worker: str) -> psutil.Process:
        """The newest process whose output goes to a worker's log; not the engine's below it."""
        log = str(self.path / "logs" / run / f"{worker}.log")
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if os.readlink(f"/proc/{process.pid}/fd/1") == log and "ray" in process.name():
                    found.append((process.create_time(), process))
        assert found, f"no process writes to {log}"
        return max(found, key=lambda pair: pair[0])[1]

    def worker_logs(self) -> str:
        """The end of every worker's log, for a failing test's message."""
        return "\n".join(f"== {f}\n{f.read_text()[-2000:]}" for f in self.path.glob("logs/*/*.log"))


@pytest.fixture(scope="session")
def services_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state folder of the shared services."""
    return tmp_path_factory.mktemp("services")


@pytest.fixture(scope="session")
def prefect_api(services_home: Path) -> Iterator[str]:
    """A real Prefect server, MLflow server and worker, started as `make up` does and stopped at the end.

    Prefect's usual port is taken, as it is on a machine where another one runs.
    """
    home = services_home
    environment = _environment(home)
    environment.pop("PREFECT_API_URL", None)
    with contextlib.ExitStack() as taken:
        with contextlib.suppress(OSError):
            taken.enter_context(socket.create_server(("127.0.0.1", 4200)))
        up = subprocess.run(
            [str(MILLRACE), "up"], env=environment, capture_output=True, text=True, cwd=PROJECT, timeout=400
        )
    assert up.returncode == 0, up.stdout + up.stderr
    services = [psutil.Process(service["pid"]) for service in json.loads((home / "services.json").read_text())]
    url = next(s["url"] for s in json.loads((home / "services.json").read_text()) if s["name"] == "prefect")
    assert httpx.get(f"{url}/ui-settings", timeout=60).json()["api_url"] == f"{url}/api", (
        "its pages show another server"
    )
    family = [p for service in services for p in [service, *service.children(recursive=True)]]
    yield f"{url}/api"
    family += [p for service in services if service.is_running() for p in service.children(recursive=True)]
    subprocess.run([str(MILLRACE), "down"], env=environment, check=True, capture_output=True, timeout=60)
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE], f"`make down` left {alive}"


@pytest.fixture(scope="session")
def fork_source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The process that all commands' workers are forks of: it imports torch and vLLM once, not once per command.

    What depends on who a worker's parent is overrides it with the empty string, and then commands have their own.
    """
    before = dict(os.environ)
    os.environ["MILLRACE_HOME"] = str(tmp_path_factory.mktemp("forks"))
    prepare_environment()
    with imported_early(engine="vllm", trains=True):
        name = os.environ.get(SOURCE, "")  # there is none on GPUs, nor on a cluster
        os.environ.clear()  # commands prepare their own
        os.environ.update(before)
        yield name
        os.environ[SOURCE] = name


@pytest.fixture
def home(tmp_path: Path, prefect_api: str, fork_source: str) -> Home:
    """A fresh state folder, reporting to the shared Prefect server, with workers that the shared source forks."""
    return Home(tmp_path, prefect_api, forks=fork_source)


@pytest.fixture(scope="session")
def moto() -> Iterator[dict[str, str]]:
    """The AWS variables of a mock S3 server in this process."""
    from botocore.loaders import JSONFileLoader
    from moto.s3.responses import S3Response
    from moto.server import ThreadedMotoServer

    # Every new client reads the description of S3 anew, which takes longer than most tests.
    load = functools.cache(JSONFileLoader().load_file)
    JSONFileLoader.load_file = lambda self, file_path: load(file_path)
    put, one_at_a_time = S3Response.put_object, threading.Lock()

    def put_alone(self: S3Response) -> Any:
        """moto looks for the key and writes it in two steps: of two conditional writes at once both would win."""
        with one_at_a_time:
            return put(self)

    S3Response.put_object = put_alone
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "AKMOTO0123456789",
        "AWS_SECRET_ACCESS_KEY": "secret-of-the-mock-server",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    server.stop()
    S3Response.put_object = put


@pytest.fixture
def server(moto: dict[str, str]) -> dict[str, str]:
    """The AWS variables of the S3 server of `bucket`; a test module may have another."""
    return moto


@pytest.fixture(scope="session")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ceph]:
    """A real S3 server; its tests are skipped where it is not installed and cannot be."""
    folder = tmp_path_factory.mktemp("ceph")
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(ceph_server(folder))
        except CannotInstall as reason:
            pytest.skip(str(reason))
        yield server
    shutil.rmtree(folder)


@pytest.fixture
def bucket(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """A new bucket on `server`; only the environment says where, as on a cluster."""
    import boto3

    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_MAX_ATTEMPTS", "AWS_RETRY_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # it keeps the credentials of the server before
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    boto3.client("s3").create_bucket(Bucket=name)
    return name
