from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from infra.services import end_orphaned_servers

WAITS = "import sys; print('here', flush=True); sys.stdin.read()"


def _server(home: Path, *, orphan: bool) -> subprocess.Popen[bytes]:
    """A process that looks like the server Prefect starts beside a flow; an orphan's parent is no Python process."""
    variables = {**os.environ, "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT_HOME": str(home / "prefect")}
    command = [sys.executable, "-c", WAITS]
    shell = ["/bin/sh", "-c", '"$@"; exit', "sh"]
    process = subprocess.Popen(
        [*shell, *command] if orphan else command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"here\n"
    return process


@pytest.mark.server
def test_the_server_of_a_killed_driver_is_ended_and_no_other(tmp_path: Path) -> None:
    orphan, elsewhere = _server(tmp_path, orphan=True), _server(tmp_path / "another", orphan=True)
    in_use = _server(tmp_path, orphan=False)
    child = psutil.Process(orphan.pid).children()[0].pid
    try:
        # The shell around the orphan has the same variables and stays: its parent is a Python process.
        assert end_orphaned_servers(tmp_path) == [child]
        assert orphan.wait(timeout=30) is not None
        assert in_use.poll() is None and elsewhere.poll() is None
        assert end_orphaned_servers(tmp_path) == []
    finally:
        for process in (in_use, elsewhere):
            process.communicate(timeout=30)
