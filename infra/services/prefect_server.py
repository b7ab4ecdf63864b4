"""Prefect's server beside a command: the one that Prefect itself starts for a flow, without waiting for it.

In: a state folder. Out: `PREFECT_API_URL` for this process and its children at once, and later a server there, which
ends with this process, however that ends. Prefect's own way imports the whole server into the process of the flow,
stops that process until the server answers, and leaves the server behind if the process is killed.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx

from infra.forks import end_with_parent
from infra.ports import free_port
from infra.services.services import SECONDS_TO_START, ServiceFailed
from infra.user_code import own_command

_LOOK_SECONDS = 0.1


class ServerBeside:
    """The server of one state folder; it may be started again when it has ended."""

    def __init__(self, home: Path) -> None:
        """Reserve its address."""
        self.home = home
        self.url = f"http://127.0.0.1:{free_port()}"
        self._log = home / "logs" / "prefect.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, unless it runs; `answers` waits for it."""
        if self._process is not None and self._process.poll() is None:
            return
        host, _, port = self.url.removeprefix("http://").partition(":")
        # These are Prefect's own.
        environment = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [*own_command("infra.services.prefect_server:serve"), host, port, str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"} | environment,
            )
        atexit.register(self.stop)

    async def answers(self) -> None:
        """Return once it answers. Raises `ServiceFailed` if it ends before, or after `SECONDS_TO_START`."""
        deadline = time.monotonic() + SECONDS_TO_START
        async with httpx.AsyncClient(timeout=SECONDS_TO_START) as client:
            while time.monotonic() < deadline:
                if self._process is None or self._process.poll() is not None:
                    raise ServiceFailed(f"Prefect's server ended while starting, see {self._log}")
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get(f"{self.url}/api/health")).is_success:
                        return
                await asyncio.sleep(_LOOK_SECONDS)  # polling a port: nothing would wake us
        raise ServiceFailed(f"Prefect's server did not answer within {SECONDS_TO_START:.0f} s, see {self._log}")

    def stop(self) -> None:
        """End it; a second call does nothing."""
        atexit.unregister(self.stop)
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def serve() -> None:
    """The server's life, in a process of its own; its arguments are host, port and the process that it ends with."""
    host, port, parent = sys.argv[1:]
    end_with_parent()
    if os.getppid() != int(parent):
        return  # it had ended before
    import uvicorn

    uvicorn.run(
        "prefect.server.api.server:create_app",
        factory=True,
        lifespan="on",
        host=host,
        port=int(port),
        log_level="error",
    )
