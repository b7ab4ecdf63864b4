"""The services of infra/compose.yaml as processes of this machine: what `docker compose up` would run, without Docker.

In: the compose file, its variables, and where the services that are not ours (PostgreSQL, S3) listen here. Out: the
commands, environments, health checks and start order of the file, executed as they stand there. What is not: images,
networks and volumes. Addresses, the image's folders and ports are exchanged for those of this machine.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from infra.ports import free_port

PROJECT = Path(__file__).resolve().parent.parent
COMPOSE = PROJECT / "infra" / "compose.yaml"
IMAGE = "millrace:"
"""How the names of our own images begin."""
START_SECONDS = 120


class ServiceFailed(Exception):
    """A service ended, or did not become healthy; the message ends with its output."""


def interpolate(value: Any, variables: dict[str, str]) -> Any:
    """`value` with `${NAME}`, `${NAME:-default}` and `${NAME:?message}` filled in, at any depth.

    Raises `ValueError` with the message where a required variable is missing or empty, as Compose does.
    """
    if isinstance(value, dict):
        return {key: interpolate(inner, variables) for key, inner in value.items()}
    if isinstance(value, list):
        return [interpolate(inner, variables) for inner in value]
    if not isinstance(value, str):
        return value

    def fill(match: re.Match[str]) -> str:
        name, operator, rest = match.groups()
        found = variables.get(name, "")
        if not found and operator == ":?":
            raise ValueError(f"{name}: {rest}")
        return found or (rest if operator == ":-" else "")

    return re.sub(r"\$\{(\w+)(?:(:[-?])([^}]*))?\}", fill, value)


def image_environment(dockerfile: Path) -> dict[str, str]:
    """The ENV of a Dockerfile."""
    (block,) = re.findall(r"^ENV ((?:.*\\\n)*.*)", dockerfile.read_text(), flags=re.MULTILINE)
    return dict(word.split("=", 1) for word in block.replace("\\\n", " ").split())


class Composition:
    """The started services of one compose file. `addresses` maps `host:port` of the file to `host:port` here."""

    def __init__(self, folder: Path, *, variables: dict[str, str], addresses: dict[str, str]) -> None:
        self.services = interpolate(yaml.safe_load(COMPOSE.read_text()), variables)["services"]
        self.addresses = dict(addresses)
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        for port in ("prefect:4200", "mlflow:5000", "worker:8080"):
            self.addresses[port] = f"127.0.0.1:{free_port()}"

    def url(self, address: str) -> str:
        """Where a service of the file, such as `prefect:4200`, answers here."""
        return f"http://{self.addresses[address]}"

    def up(self, name: str) -> None:
        """Start a service after those it depends on, each as far as the file wants it."""
        service = self.services[name]
        if not service["image"].startswith(IMAGE) or name in self._running:
            return
        for needed, how in service.get("depends_on", {}).items():
            self.up(needed)
            if self.services[needed]["image"].startswith(IMAGE):
                self._wait(needed, how["condition"])
        # A test run that is killed asks its services to end, children included.
        dies_with_us = ["setpriv", "--pdeathsig", "TERM", "--"] if shutil.which("setpriv") else []
        with open(self._folder / f"{name}.log", "wb") as log:
            self._running[name] = subprocess.Popen(
                [*dies_with_us, "sh", str(PROJECT / "infra" / "entrypoint.sh"), *self._here(service["command"])],
                cwd=PROJECT,
                env=self.environment(name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def environment(self, name: str) -> dict[str, str]:
        """What a service's processes see: the image's ENV and the file's, and nothing of this shell's but Python's."""
        image = image_environment(PROJECT / "infra" / "Dockerfile.cpu")
        mine = {"HOME": str(self._folder), "PWD": str(PROJECT), "LANG": "C.UTF-8"}
        mine |= {key: os.environ[key] for key in ("PYTHONPATH", "OMP_NUM_THREADS") if key in os.environ}
        mine |= self._here(image) | self._here(self.services[name].get("environment", {}))
        return mine | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def wait_until_healthy(self, name: str) -> None:
        """Wait for a started service's own health check.

        Raises `ServiceFailed` when it ends before, or does not pass in time.
        """
        self._wait(name, "service_healthy")

    def wait_until_done(self, name: str) -> None:
        """Wait for a started service that runs to its end. Raises `ServiceFailed` when that is not a good one."""
        self._wait(name, "service_completed_successfully")

    def down(self) -> None:
        """Stop everything, the last first, as `docker compose down` does: SIGTERM, and SIGKILL for what stays."""
        for process in reversed(self._running.values()):
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            with contextlib.suppress(ProcessLookupError):  # what a container's end would take along
                os.killpg(process.pid, signal.SIGKILL)
        self._running.clear()

    def logs(self, *names: str) -> str:
        """The end of what services wrote, for a failing test's message."""
        files = [self._folder / f"{name}.log" for name in names or self._running]
        return "".join(f"\n== {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files)

    def _wait(self, name: str, condition: str) -> None:
        process, deadline = self._running[name], time.monotonic() + START_SECONDS
        if condition == "service_completed_successfully":
            if process.wait(timeout=START_SECONDS) != 0:
                raise ServiceFailed(f"{name} ended with {process.returncode}{self.logs(name)}")
            return
        assert condition == "service_healthy", condition
        kind, *test = self._here(self.services[name]["healthcheck"]["test"])
        assert kind == "CMD", test
        while subprocess.run(test, env=self.environment(name), capture_output=True).returncode != 0:
            if process.poll() is not None or time.monotonic() > deadline:
                raise ServiceFailed(f"{name} did not become healthy in {START_SECONDS} s{self.logs(name)}")
            time.sleep(0.2)  # polling a port: nothing would wake us

    def _here(self, value: Any) -> Any:
        """`value` with this machine's addresses and folders instead of the container's."""
        if isinstance(value, dict):
            return {key: self._here(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self._here(inner) for inner in value]
        text = str(value)
        ports = {}
        for address, here in self.addresses.items():
            host, port = address.split(":")
            ports[port] = here.split(":")[1]
            text = re.sub(rf"\b({re.escape(host)}|localhost|127\.0\.0\.1|0\.0\.0\.0):{port}\b", here, text)
        text = ports.get(text, text)
        text = text.replace("/var/lib/millrace", str(self._folder / "home"))
        return "127.0.0.1" if text == "0.0.0.0" else text
