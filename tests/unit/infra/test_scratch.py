"""The scratch folder of a session: short enough for sockets, gone at the end, also after a session that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infra.scratch import LONGEST, LONGEST_TMPDIR, scratch_folder, worker_environment

LEAVE = """
import os, sys
from pathlib import Path
from infra.scratch import scratch_folder
with scratch_folder(Path(sys.argv[1])) as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("name", ["h", "x" * 200])
def test_it_is_in_the_state_folder_by_a_short_path_and_gone_at_the_end(tmp_path: Path, name: str):
    home = tmp_path / name
    with scratch_folder(home) as folder, scratch_folder(home) as other:
        (folder / "file").touch()
        assert len(os.fsencode(folder)) <= LONGEST and folder != other and not (other / "file").exists()
        assert folder.resolve().parent == (home / "scratch").resolve() and (folder.resolve() / "file").exists()
    assert not list((home / "scratch").iterdir()) and not os.path.lexists(folder) and not os.path.lexists(other)


def test_the_next_session_removes_what_a_killed_one_has_left_and_nothing_of_one_at_work(tmp_path: Path):
    home = tmp_path / ("x" * 100)
    with scratch_folder(home) as at_work:
        killed = subprocess.run([sys.executable, "-c", LEAVE, str(home)], capture_output=True, text=True)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        left = Path(killed.stdout.strip())
        assert (left / "file").exists()
        with scratch_folder(home):
            assert not os.path.lexists(left) and at_work.resolve().is_dir()


@pytest.mark.parametrize(
    ("chosen", "variables"),
    [
        ("", {"VLLM_RPC_BASE_PATH", "TMPDIR"}),
        ("/fast", {"VLLM_RPC_BASE_PATH"}),
        ("/" + "x" * LONGEST_TMPDIR, {"VLLM_RPC_BASE_PATH", "TMPDIR"}),
    ],
)
def test_workers_have_temporary_files_there_unless_the_user_names_a_short_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str, variables: set[str]
):
    monkeypatch.setenv("TMPDIR", chosen)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    environment = worker_environment(tmp_path)
    listening = {name: environment.pop(name) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP")}
    assert [*listening.values()] == ["lo", "eth1", "127.0.0.1"]
    assert environment == dict.fromkeys(variables, str(tmp_path / "tmp")) and (tmp_path / "tmp").is_dir()
