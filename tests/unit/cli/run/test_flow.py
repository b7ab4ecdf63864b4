"""The order of a start: session and engines first, then Prefect's server, then the flow run, which misses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cli.run import flow
from cli.run.flow import HeadStart
from infra.ray.cluster import Cluster
from infra.services import prefect_server
from infra.services.prefect_server import ServerBeside
from infra.services.services import ServiceFailed
from tasks.session import OPENED, RunSession, in_flow_run
from tests.builders import a_log, a_session
from tests.conftest import PROJECT

_SERVES = """#!{python}
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/api/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-2])), Handler).serve_forever()
"""


class _Beside:
    def __init__(self, order: list[str]) -> None:
        self._order = order

    def start(self) -> None:
        self._order.append("server starts")

    async def answers(self) -> None:
        self._order.append("server answers")


@pytest.mark.parametrize("fails", [False, True])
def test_work_begins_while_the_server_starts_and_its_errors_are_raised_in_the_flow_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    order: list[str] = []
    session = a_session(a_log(), id="", cluster=Cluster(log_folder=tmp_path))
    monkeypatch.setattr(flow, "_beside", _Beside(order))

    @contextlib.asynccontextmanager
    async def opening() -> AsyncIterator[RunSession]:
        order.append("opened")
        yield session
        order.append("closed")

    async def work() -> str:
        order.append("work")
        if fails and order.count("work") == 1:
            raise ValueError("why")
        return "reply"

    async def begin(session: RunSession) -> None:
        with session.before_flow_run():
            assert await session.once("task", work) == "reply"

    async def flow_run() -> list[Any]:
        assert OPENED.get() is session
        async with in_flow_run(opening()) as own:
            tries: list[Any] = []
            for _ in range(2 if fails else 1):
                try:
                    tries.append(await own.once("task", work))
                except ValueError as error:
                    tries.append(str(error))
        order.append("flow run ends")
        return tries

    tries = asyncio.run(flow._in_order(flow_run, HeadStart(open=opening, begin=begin)))
    assert tries == (["why", "reply"] if fails else ["reply"])
    assert [*dict.fromkeys(order)] == ["opened", "server starts", "work", "server answers", "flow run ends", "closed"]
    assert order.count("work") == 1 + fails and order.count("opened") == 1


def test_a_session_that_cannot_be_opened_is_opened_in_the_flow_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "_beside", None)

    @contextlib.asynccontextmanager
    async def opening() -> AsyncIterator[RunSession]:
        raise ValueError("no room")
        yield  # type: ignore[unreachable]

    async def flow_run() -> None:
        async with in_flow_run(opening()):
            pytest.fail("it is open")

    async def begin(_: RunSession) -> None:
        pytest.fail("it has begun")

    with pytest.raises(ValueError, match="no room"):
        asyncio.run(flow._in_order(flow_run, HeadStart(open=opening, begin=begin)))


@pytest.mark.parametrize(("script", "problem"), [(_SERVES, ""), ("#!/bin/sh\necho why; exit 3\n", "ended")])
def test_the_server_beside_a_command_answers_or_the_command_says_where_its_log_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, problem: str
) -> None:
    executable = tmp_path / "python"
    executable.write_text(script.format(python=sys.executable))
    executable.chmod(0o755)
    monkeypatch.setattr(prefect_server.sys, "executable", str(executable))
    server = ServerBeside(tmp_path)
    server.start()
    try:
        if problem:
            with pytest.raises(ServiceFailed, match=f"{problem} while starting, see {tmp_path}/logs/prefect.log"):
                asyncio.run(server.answers())
            assert (tmp_path / "logs" / "prefect.log").read_text() == "why\n"
        else:
            asyncio.run(server.answers())
    finally:
        server.stop()


_STARTS = """
import asyncio, os, sys
from pathlib import Path
from infra.services.prefect_server import ServerBeside
server = ServerBeside(Path(sys.argv[1]))
server.start()
asyncio.run(server.answers())
print(server._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.server
def test_the_server_beside_a_command_that_is_killed_ends_with_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _STARTS, str(tmp_path)]
    variables = {**os.environ, "PREFECT_HOME": str(tmp_path / "prefect")}
    started = subprocess.run(command, cwd=PROJECT, env=variables, capture_output=True, check=False)
    assert started.returncode == -signal.SIGKILL, started.stderr
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(started.stdout)).wait(timeout=60)
