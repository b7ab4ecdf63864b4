"""Code in a sandbox reaches no network, no other process and no file but its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rollouts.sandbox.sandbox import SandboxUnavailable, require_sandbox, run_script, sandbox_report

ROOT = Path(__file__).parents[4]

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(bool(sandbox_report()), reason="; ".join(sandbox_report())),
]


def _run(folder: Path, code: str, *, seconds: float = 20.0) -> tuple[int | None, str]:
    """Exit status and output of a script."""
    deadline = time.monotonic() + seconds
    return run_script(code, "", Path(tempfile.mkdtemp(dir=folder)), deadline=deadline, memory_gb=1.0)


def _errors(folder: Path, *statements: str) -> list[str]:
    """The name of the error that each of some statements ends with, all in one sandbox; `done` without one."""
    code = "import os, resource, signal, socket, subprocess\n" + "".join(
        f"try:\n    {statement}\n    print('done')\nexcept BaseException as error: print(type(error).__name__)\n"
        for statement in statements
    )
    status, printed = _run(folder, code)
    assert status == 0
    return printed.splitlines()


def test_python_runs_with_its_packages_threads_and_event_loop_and_an_empty_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SECRET_KEY", "sk-123")
    code = """
import asyncio, os
import numpy
async def main():
    return await asyncio.to_thread(lambda: int(numpy.arange(4).sum()))
with open("notes", "w") as file:
    file.write(str(asyncio.run(main())))
print(open("notes").read(), __name__, {"SECRET_KEY", "PATH"} & os.environ.keys())
"""
    assert _run(tmp_path, code) == (0, "6 __main__ set()\n")


def test_what_is_none_of_its_business_is_refused(tmp_path: Path):
    precious = tmp_path / "precious"
    precious.write_text("weights")
    statements = [
        *("socket.socket()", "socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)", "socket.socket(socket.AF_UNIX)"),
        *("socket.create_connection(('127.0.0.1', 9))", "socket.socketpair()[0].connect('/run/systemd/notify')"),
        *("socket.socketpair()[0].sendto(b'x', '/run/systemd/notify')", "os.fork()", "subprocess.run(['true'])"),
        *("os.execv('/bin/true', ['true'])", "os.kill(os.getppid(), signal.SIGTERM)", "os.kill(0, signal.SIGTERM)"),
        *("os.kill(-1, signal.SIGTERM)", "os.setsid()", "os.setpgid(0, 0)"),
        *("os.setpriority(os.PRIO_USER, os.getuid(), 10)", "open('/etc/passwd')", "open('/proc/self/environ')"),
        "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (4, 4))",
        *("open(f'/proc/{os.getppid()}/environ')", "os.listdir('/')", "os.remove('/etc/hostname')"),
        *("os.chmod('/', 0o777)", "os.chown('/', 1, 1)", "os.truncate('/etc/hostname', 0)", "os.utime('/')"),
        *("os.mknod('device', 0o20600, 259)", f"open('{precious}', 'w')", f"open('{precious}')"),
        f"os.remove('{precious}')",
    ]
    errors = _errors(tmp_path, *statements)
    assert dict(zip(statements, errors, strict=True)) == dict.fromkeys(statements, "PermissionError")
    moved = _errors(tmp_path, f"os.rename('{precious}', 'mine')", f"os.link('{precious}', 'mine')")
    assert set(moved) <= {"PermissionError", "OSError"} and precious.read_text() == "weights"


def test_calls_past_pythons_own_functions_are_refused_too(tmp_path: Path):
    numbers = {"x86_64": (56, 41, 425, 101), "aarch64": (220, 198, 425, 117)}[os.uname().machine]
    # clone, socket, io_uring_setup, ptrace
    arguments = ("17, 0, 0, 0, 0", "2, 1, 0", "8, 0", "0, 0, 0, 0")
    code = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    for number, given in zip(numbers, arguments, strict=True):
        code += f"print({number}, libc.syscall({number}, {given}), ctypes.get_errno())\n"
    code += "print('outlive the parent', libc.prctl(1, 0, 0, 0, 0), ctypes.get_errno())\n"
    status, printed = _run(tmp_path, code)
    assert status == 0
    assert {line.rsplit(maxsplit=2)[1:] == ["-1", "1"] for line in printed.splitlines()} == {True}, printed


def test_memory_files_and_descriptors_are_limited(tmp_path: Path):
    big = "open('big', 'wb').write(bytes(2**25))"
    errors = _errors(tmp_path, "bytearray(2 * 2**30)", big, "[open('solution.py') for _ in range(100)]")
    assert errors == ["MemoryError", "OSError", "OSError"]
    _, printed = _run(tmp_path, "while True:\n    print('x' * 10**6)\n")
    assert len(printed) <= 2**24


def test_a_process_that_does_not_end_is_killed(tmp_path: Path):
    status, _ = _run(tmp_path, "import signal\nsignal.signal(15, signal.SIG_IGN)\nwhile True: pass\n", seconds=1.5)
    assert status is None


def test_a_machine_without_landlock_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rollouts.sandbox.sandbox.sandbox_report", lambda: ("files: this kernel has no Landlock",))
    with pytest.raises(SandboxUnavailable, match="files: this kernel has no Landlock.*allow_unsandboxed=True"):
        require_sandbox()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_users_without_any_privilege_get_the_same_sandbox():
    code = """
import os, socket, tempfile
from pathlib import Path
from rollouts.sandbox.sandbox_rules import lock_down
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
    if os.fork() == 0:
        print(lock_down(Path(folder), seconds=10.0, memory_gb=1.0))
        for refused in (socket.socket, os.fork, lambda: open("/etc/passwd"), lambda: Path(other, "x").write_text("x")):
            try:
                refused()
            except PermissionError:
                print("refused")
        print(Path(folder, "own").write_text("mine"), flush=True)
        os._exit(0)
    os.wait()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\nrefused\nrefused\nrefused\nrefused\n4\n", done.stderr
