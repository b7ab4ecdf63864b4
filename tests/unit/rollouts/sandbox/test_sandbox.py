"""Code in a sandbox reaches no network, no other process and no file but its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rollouts.sandbox import usage
from rollouts.sandbox.sandbox import (
    SandboxUnavailable,
    kernel_features,
    own_folder,
    require_sandbox,
    run_script,
    sandbox_report,
)

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
        *(f"os.remove('{precious}')", f"open('{sys.prefix}/pyvenv.cfg')", f"os.listdir('{sys.prefix}')"),
    ]
    errors = _errors(tmp_path, *statements)
    assert dict(zip(statements, errors, strict=True)) == dict.fromkeys(statements, "PermissionError")
    moved = _errors(tmp_path, f"os.rename('{precious}', 'mine')", f"os.link('{precious}', 'mine')")
    assert set(moved) <= {"PermissionError", "OSError"} and precious.read_text() == "weights"


# Calls of libc that Python has no function for → the numbers of their errors; EPERM if there is none.
CALLS = {
    # signals to other processes by the owner of a file, which is any process of the user
    **{f"fcntl(pipe, {command}, parent)": 1 for command in ("F_SETOWN := 8", "F_SETSIG := 10", "F_NOTIFY := 1026")},
    **{"fcntl(pipe, F_SETOWN_EX := 15, pid(0, parent))": 1, "fcntl(pipe, F_SETLEASE := 1024, 1)": 1},
    **{f"ioctl({at}, {command}, pid(parent))": 1 for at in ("pipe", "pair") for command in (0x8901, 0x8902, 0x5452)},
    **{"timer_create(0, 0, pid(0, 0))": 1, "mq_open(b'/queue', 0o102, 0o600, 0)": 1, "tgkill(parent, parent, 9)": 1},
    # memory outside of the limit, and what is counted or shared by user
    **{"memfd_create(b'hidden', 0)": 1, "syscall(447, 0)": 1, "fcntl(pipe, F_SETPIPE_SZ := 1031, 2**20)": 1},
    **{"setsockopt(pair, 1, 7, pid(2**24), 4)": 1, "shmget(0, 4096, 0o1600)": 1, "semget(0, 1, 0o1600)": 1},
    **{"semop(0, pid(0, 0), 1)": 1, "msgget(0, 0o1600)": 1, "msgrcv(0, pid(0, 0), 4, 0, 0)": 1, "inotify_init1(0)": 1},
    **{"fanotify_init(0, 0)": 1, "mlock(pid(0), 2**14)": 1, "sync_file_range(-1, 0, 0, 0)": 9, "syncfs(pipe)": 1},
    # other processes, and large interfaces of the kernel
    **{"pidfd_open(parent, 0)": 1, "process_vm_readv(parent, 0, 0, 0, 0, 0)": 1, "ptrace(16, parent, 0, 0)": 1},
    # space of the disk past the limit of a file's size, all in one call
    **{"fallocate(pipe, FALLOC_FL_KEEP_SIZE := 1, 0, 4096)": 1, "fallocate(pipe, 0x11, 0, 4096)": 1},
    **{"prctl(PR_SET_PDEATHSIG := 1, 0)": 1, "prctl(PR_SET_DUMPABLE := 4, 0)": 1, "prctl(62, 2, parent, 0, 0)": 1},
    **{"unshare(0x10000000)": 1, "setns(pipe, 0)": 1, "personality(0x40000)": 1, "socketpair(30, 1, 0, pid(0, 0))": 1},
    **{"syscall(425, 8, pid(0))": 1, "syscall(434, parent, 0)": 1, "open_by_handle_at(-100, pid(0), 0)": 1},
    **{
        "syscall(435, pid(0), 64)": 38,
        "syscall(437, -100, b'x', pid(2, 0, 0, 0, 0, 0), 24)": 38,
        "syscall(463, 0)": 38,
    },
    **{"syscall(900, 0)": 38, "open(python, O_TRUNC := 0x200)": 1, "open(python, 3)": 1, "open(python, 0x203)": 1},
}


def test_calls_past_pythons_own_functions_are_refused_too(tmp_path: Path):
    code = """
import ctypes, os, re, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
parent, pipe, pair, python = os.getppid(), os.pipe()[0], socket.socketpair()[0].fileno(), os.__file__.encode()
def pid(*numbers): return (ctypes.c_int * (64 * len(numbers)))(*numbers)
for call in CALLS:
    name, given = re.match(r"(\\w+)\\((.*)\\)", call).groups()
    result = getattr(libc, name)(*eval(f"[{re.sub('[A-Z_]+ := ', '', given)}]"))
    print(result, ctypes.get_errno())
"""
    number = {"x86_64": "clone, socket: 56 41", "aarch64": "clone, socket: 220 198"}[os.uname().machine]
    clone, a_socket = number.split(": ")[1].split()
    calls = {**CALLS, f"syscall({clone}, 17, 0, 0, 0, 0)": 1, f"syscall({a_socket}, 2, 1, 0)": 1}
    status, printed = _run(tmp_path, code.replace("CALLS", repr([*calls])).replace("\\\\", "\\"))
    assert status == 0
    got = dict(zip(calls, printed.splitlines(), strict=True))
    assert got == {call: f"-1 {error}" for call, error in calls.items()}


@pytest.mark.parametrize("version", [1, 2, 4, 6])
def test_an_older_landlock_leaves_no_gap(tmp_path: Path, version: int):
    """This kernel restricts what a kernel of that version can; the filter of calls does the rest."""
    (readable := tmp_path / "python/lib").mkdir(parents=True)
    (module := readable / "module.py").write_text("x = 1")
    victim = subprocess.Popen(["sleep", "60"])
    code = f"""
import ctypes, fcntl, os, signal, sys, tempfile
from pathlib import Path
from rollouts.sandbox import sandbox_rules
version = min({version}, sandbox_rules.landlock_version())
sandbox_rules.landlock_version = lambda: version
sys.base_prefix = {str(readable.parent)!r}
folder = tempfile.mkdtemp(dir={str(tmp_path)!r})
pipe = os.pipe()
if {version} >= 6:
    sandbox_rules.limit, sandbox_rules._restrict_calls = lambda *_: None, lambda: []
print(sandbox_rules.lock_down(Path(folder), seconds=10.0, memory_gb=1.0), open({str(module)!r}).read())
for attempt in (
    lambda: os.kill({victim.pid}, signal.SIGKILL),
    lambda: os.close(os.open({str(module)!r}, os.O_RDONLY | os.O_TRUNC)),
    lambda: open({str(module)!r}, "w"),
):
    try:
        attempt()
        print("done")
    except PermissionError:
        print("refused")
if version >= 6:  # without the filter of calls
    fcntl.fcntl(pipe[0], fcntl.F_SETOWN, {victim.pid})
    fcntl.fcntl(pipe[0], fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe[0], fcntl.F_SETFL, os.O_ASYNC)
    os.write(pipe[1], b"x")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[] x = 1", "refused", "refused", "refused"], done.stderr
    assert victim.poll() is None and module.read_text() == "x = 1"
    victim.kill()
    victim.wait()


def test_memory_files_and_descriptors_are_limited(tmp_path: Path):
    big = "open('big', 'wb').write(bytes(2**25))"
    errors = _errors(tmp_path, "bytearray(2 * 2**30)", big, "[open('solution.py') for _ in range(100)]")
    assert errors == ["MemoryError", "OSError", "OSError"]
    _, printed = _run(tmp_path, "while True:\n    print('x' * 10**6)\n")
    assert len(printed) <= 2**24


_FILE = "open(name, 'w+b') as file:\n        file.write(bytes(2**22))\n        file.flush()"
EXCESSES = {
    f"with {_FILE}": "64 MiB of files",
    f"with {_FILE}\n        kept.append(os.dup(file.fileno()))\n    os.unlink(name)": "64 MiB of files",
    f"with {_FILE}\n        kept.append(mmap.mmap(file.fileno(), 0))\n        os.closerange(file.fileno() + 1, 64)\n"
    "    os.unlink(name)": "64 MiB of files",  # in memory alone: what is mapped keeps a descriptor of its own
    "open(name, 'w')": "200 files",
    "os.mkdir(name)": "200 files",
    "os.symlink('x' * 3000, name)": "200 files",
    "os.link('solution.py', name)": "200 files",
    "os.mkdir(name); os.chdir(name)": "200 files",
    "threading.Thread(target=time.sleep, args=[60]).start()": "256 threads",
}


@pytest.mark.parametrize("statement", EXCESSES)
def test_all_files_together_and_threads_are_limited_and_nothing_stays(statement: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(usage, "MOST_FILES", 200)  # making and removing thousands takes seconds on a busy disk
    count = 40 if "MiB" in EXCESSES[statement] else 2000  # there are fewer descriptors than 64
    code = "import mmap, os, threading, time\nthreading.stack_size(2**15)\nkept = []\n"
    code += f"for name in map(str, range({count})):\n    {statement}\ntime.sleep(60)\n"
    with own_folder("test") as folder:
        deadline = time.monotonic() + 30.0
        status, printed = run_script(code, "", folder / "0", deadline=deadline, memory_gb=1.0, shows_errors=True)
        assert not [*folder.iterdir()], "files of several runs do not add up"
    assert (status, printed.splitlines()[-1]) == (None, f"[stopped: more than {EXCESSES[statement]}]")
    assert not folder.exists()


def test_files_that_cannot_be_counted_are_too_many():
    code = "import os, time\nfor _ in range(60):\n    os.mkdir('d' * 200)\n    os.chdir('d' * 200)\ntime.sleep(60)"
    with own_folder("test") as folder:
        deadline = time.monotonic() + 30.0
        assert run_script(code, "", folder, deadline=deadline, memory_gb=1.0, shows_errors=True) == (
            None,
            "[stopped: files that cannot be counted: File name too long]",
        )
    assert not folder.exists()


def test_a_group_of_cgroup_v2_is_made_where_one_is_delegated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The layout of files that the kernel has; no kernel is behind it."""
    own, above = tmp_path / "cgroup/user/main", tmp_path / "cgroup/user"
    own.mkdir(parents=True)
    (proc := tmp_path / "proc/self").mkdir(parents=True)
    (proc / "cgroup").write_text("4:memory:/elsewhere\n0::/user/main\n")
    (proc / "mountinfo").write_text(f"31 24 0:27 / {tmp_path}/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n")
    (above / "cgroup.procs").touch()
    for controllers, result in (("cpu memory", None), ("cpu memory pids", above)):
        (above / "cgroup.controllers").write_text(controllers)
        usage.delegated_cgroup.cache_clear()
        (left_over := above / "millrace-sandbox-0-7").mkdir(exist_ok=True)
        assert usage.delegated_cgroup(tmp_path / "proc") == result
        assert left_over.exists() == (result is None)
    assert (above / "cgroup.subtree_control").read_text() == "+memory +pids"
    monkeypatch.setattr(usage, "delegated_cgroup", lambda: above)
    group = usage.make_cgroup(2**30)
    assert group is not None and {file.name: file.read_text() for file in group.iterdir()} == {
        "memory.max": str(2**30),
        "memory.swap.max": "0",
        "pids.max": "256",
    }
    assert "a group of cgroup v2" in kernel_features()
    monkeypatch.setattr(usage, "delegated_cgroup", lambda: None)
    assert usage.make_cgroup(2**30) is None and "no group of cgroup v2 is delegated" in kernel_features()


def test_a_process_that_does_not_end_is_killed(tmp_path: Path):
    status, _ = _run(tmp_path, "import signal\nsignal.signal(15, signal.SIG_IGN)\nwhile True: pass\n", seconds=1.5)
    assert status is None


def test_a_machine_without_landlock_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rollouts.sandbox.sandbox.sandbox_report", lambda: ("files: this kernel has no Landlock",))
    with pytest.raises(SandboxUnavailable, match="files: this kernel has no Landlock.*allow_unsandboxed=True"):
        require_sandbox()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_users_without_any_privilege_get_the_same_sandbox():
    code = """
import os, socket, tempfile
from pathlib import Path
from rollouts.sandbox.sandbox import own_folder
from rollouts.sandbox.sandbox_rules import lock_down
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
with own_folder("test") as unreadable:
    (unreadable / "a").mkdir(0o300)
    (unreadable / "a" / "b").mkdir(0o300)
print(unreadable.exists(), flush=True)
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
    assert done.stdout == "False\n[]\nrefused\nrefused\nrefused\nrefused\n4\n", done.stderr
