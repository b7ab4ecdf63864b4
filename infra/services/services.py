"""The long-running services of one machine: Prefect server, MLflow server, a Prefect worker.

In: a state folder. Out: detached processes, and `services.json`, which identifies them by pid and start time, so that
`stop_services` never stops another process that has got the same pid.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import psutil

from infra.devices import num_gpus
from infra.environment import local_tracking_uri, make_home
from infra.ports import free_port
from infra.services.prefect_database import prepare_prefect_database
from infra.user_code import PRODUCT
from settings.errors import UserError

POOL = "local"
TRAINING_VIEW = "?workflowType=machine_learning"
"""End of the address of a page of MLflow's: its menus for training, and not those for agents."""
GPU_QUEUE = "gpu"
"""Queue of the deployments that use GPUs. A run takes every visible GPU, so the queue runs one at a time."""
GPU_RUNS = "MILLRACE_GPU_RUNS"
"""Environment variable of `python -m tasks.prefect.flow_runs`: how many runs of the queue at a time."""
NOTIFY = "MILLRACE_NOTIFY"
"""Environment variable: the address of notifications. It may hold a token, so services and flow runs do not get it."""

SECONDS_TO_START = 300.0
"""A server that ends is noticed at once; a busy machine needs minutes."""


class ServiceFailed(UserError):
    """A service did not start; the message names its log."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """One running process."""

    name: str
    pid: int
    started_at: float
    """Start time by the kernel, which identifies the process."""
    url: str = ""

    @property
    def port(self) -> int:
        """The port it listens on; 0 if it does not listen."""
        return httpx.URL(self.url).port or 0

    def process(self) -> psutil.Process | None:
        """The process, or None if it has ended."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started_at) < 1 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return None
        return process if same else None


def running_services(home: Path) -> dict[str, Service]:
    """The services of this state folder that are alive, by name."""
    return {name: service for name, service in _recorded_services(home).items() if service.process() is not None}


def start_services(home: Path, *, announce: Callable[[str], None]) -> dict[str, Service]:
    """Start what is not running yet and deploy `prefect.yaml`. Raises `ServiceFailed`, with all stopped again."""
    services = running_services(home)
    logs = home / "logs"
    make_home()
    logs.mkdir(parents=True, exist_ok=True)
    try:
        deploying = "worker" not in services
        if deploying or "prefect" not in services:
            prepare_prefect_database(home)
            announce("starting the Prefect server")
            if "prefect" in services:
                _end(services.pop("prefect"))
            # The same port: a worker, or flow runs that have outlived theirs, still report to it.
            before = _recorded_services(home).get("prefect")
            port = free_port(before.port if before is not None else 4200)
            services["prefect"] = _start_prefect(port, logs, evaluates_triggers=not deploying)
        if "mlflow" not in services:
            announce("starting the MLflow server")
            port = free_port(5000)
            services["mlflow"] = _start(
                "mlflow",
                ["-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
                + ["--backend-store-uri", local_tracking_uri(), "--default-artifact-root", str(home / "mlartifacts")],
                logs,
                url=f"http://127.0.0.1:{port}",
                extra={"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            )
        _wait_until_up(services["prefect"], "/api/health", logs)
        api = {"PREFECT_API_URL": f"{services['prefect'].url}/api"}
        if deploying:
            announce("deploying prefect.yaml and starting a worker")
            _run(["-m", "prefect", "work-pool", "create", POOL, "--type", "process", "--overwrite"], logs, api)
            _run(["-m", "prefect", "--no-prompt", "deploy", "--all"], logs, api)
            limit = {GPU_RUNS: os.environ.get(GPU_RUNS, "1")} if num_gpus() else {}
            _run(["-m", "tasks.prefect.flow_runs"], logs, {**api, **limit})
            _end(services["prefect"])
            services["prefect"] = _start_prefect(services["prefect"].port, logs, evaluates_triggers=True)
            _wait_until_up(services["prefect"], "/api/health", logs)
            worker = ["-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process"]
            # Its flow runs begin with one of our modules, so they look in our folder first.
            path = os.pathsep.join(filter(None, [str(PRODUCT), os.environ.get("PYTHONPATH")]))
            settings = {"PREFECT_WORKER_QUERY_SECONDS": "5", "PREFECT_WORKER_HEARTBEAT_SECONDS": "10"}
            services["worker"] = _start("worker", worker, logs, extra={**api, **settings, "PYTHONPATH": path})
        _wait_until_up(services["mlflow"], "/health", logs)
    except BaseException:
        stop_services(home, services)
        raise
    temporary = home / "services.json.tmp"
    temporary.write_text(json.dumps([asdict(service) for service in services.values()], indent=1))
    os.replace(temporary, home / "services.json")
    return services


def stop_services(home: Path, services: dict[str, Service] | None = None) -> list[str]:
    """Stop exactly what `start_services` started, children included; returns the names."""
    services = running_services(home) if services is None else services
    _end(*services.values())
    (home / "services.json").unlink(missing_ok=True)
    return list(services)


def _recorded_services(home: Path) -> dict[str, Service]:
    """The services that `start_services` started last, alive or not, by name."""
    file = home / "services.json"
    if not file.exists():
        return {}
    return {record["name"]: Service(**record) for record in json.loads(file.read_text())}


def _start_prefect(port: int, logs: Path, *, evaluates_triggers: bool) -> Service:
    """Start Prefect's server. Make and change automations only while it does not evaluate triggers.

    On SQLite, Prefect 3.7.7's server deadlocks if an automation is committed while the service that evaluates triggers
    reads it: `update_cache_after_commit` and `reconcile_automations` wait for each other.
    """
    return _start(
        "prefect",
        ["-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
        logs,
        url=f"http://127.0.0.1:{port}",
        extra={
            "PREFECT_LOGGING_SERVER_LEVEL": "ERROR",
            "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": str(evaluates_triggers).lower(),
            # Otherwise the pages ask port 4200, whichever server listens there.
            "PREFECT_UI_API_URL": f"http://127.0.0.1:{port}/api",
            # In memory, slots would not survive a restart, and a flow run that cannot renew its slot ends itself.
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        },
    )


def _end(*services: Service) -> None:
    """Stop services and their children, all at the same time."""
    processes = [process for service in services if (process := service.process()) is not None]
    alive = [member for process in processes for member in [process, *process.children(recursive=True)]]
    for number, seconds in ((signal.SIGTERM, 10), (signal.SIGKILL, 5)):
        for member in alive:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
                member.send_signal(number)
        _, alive = psutil.wait_procs(alive, timeout=seconds)


def _start(
    name: str, arguments: list[str], logs: Path, *, url: str = "", extra: dict[str, str] | None = None
) -> Service:
    with open(logs / f"{name}.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={key: value for key, value in os.environ.items() if key != NOTIFY} | (extra or {}),
            start_new_session=True,  # it outlives this command and the terminal
            restore_signals=True,
        )
    return Service(name=name, pid=process.pid, started_at=psutil.Process(process.pid).create_time(), url=url)


def _run(arguments: list[str], logs: Path, extra: dict[str, str]) -> None:
    """Run a Prefect command to its end, in the folder of prefect.yaml."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=PRODUCT,
        env={**os.environ, **extra, "PWD": str(PRODUCT)},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    with open(logs / "deploy.log", "a") as log:
        log.write(done.stdout + done.stderr)
    if done.returncode:
        command, output = " ".join(arguments[1:]), (done.stdout + done.stderr)[-800:]
        raise ServiceFailed(f"`{command}` failed, see {logs / 'deploy.log'}:\n{output}")


def _wait_until_up(service: Service, path: str, logs: Path) -> None:
    log, deadline = logs / f"{service.name}.log", time.monotonic() + SECONDS_TO_START
    while time.monotonic() < deadline:
        if service.process() is None:
            raise ServiceFailed(f"{service.name} ended while starting, see {log}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(service.url + path, timeout=2, follow_redirects=True).is_success:
                return
        time.sleep(0.2)  # polling a port: nothing would wake us
    raise ServiceFailed(f"{service.name} did not answer within {SECONDS_TO_START:.0f} s, see {log}")
