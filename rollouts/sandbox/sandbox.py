"""Starts the programs of `sandbox_process.py`: limited, without network, with write access to their own folder only.

In: a program's name and its files. Out: a process to wait for, with a deadline. The rules are in `sandbox_rules.py`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from rollouts.sandbox import usage
from rollouts.sandbox.sandbox_rules import landlock_version
from settings.errors import UserError

_PRODUCT = Path(__file__).parents[2]
_START = "from rollouts.sandbox.sandbox_process import main; main()"


class SandboxUnavailable(UserError, RuntimeError):
    """This machine cannot isolate foreign code. The message says what is missing, and how to go on without it."""


class SandboxedProcess:
    """A running program. Kill it or wait for it before its folder is removed."""

    excess = ""
    """What it was killed for, if it used too much: `more than 64 MiB of files`."""

    def __init__(
        self,
        program: str,
        folder: Path,
        *,
        seconds: float,
        memory_gb: float,
        stdin: IO[bytes] | int = subprocess.DEVNULL,
        stdout: IO[bytes] | int = subprocess.DEVNULL,
        stderr: IO[bytes] | int = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
        function: str = "",
    ) -> None:
        """`function` is the import path of the function that the program `function` calls."""
        self._report, report = os.pipe()
        order: dict[str, Any] = {"program": program, "folder": str(folder), "report": report}
        group = usage.make_cgroup(int(memory_gb * 2**30))
        order |= {"seconds": seconds, "memory_gb": memory_gb, "group": str(group or "")}
        if function:
            order |= {"function": function, "path": [entry or os.getcwd() for entry in sys.path]}
        # What the user's module imports comes with it; our own packages are found first all the same.
        start = f"import sys; sys.path.insert(0, sys.argv[1]); {'import millrace; ' if function else ''}{_START}"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", start, str(_PRODUCT), json.dumps(order), *map(str, pass_fds)],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=folder,
            # Each thread of linear algebra takes a gigabyte of address space.
            env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            pass_fds=[*pass_fds, report],
        )
        os.close(report)
        threading.Thread(target=self._watch, args=[folder, group], daemon=True).start()

    def _watch(self, folder: Path, group: Path | None) -> None:
        while self._process.poll() is None:
            excess = usage.excess(self._process.pid, folder)
            if excess and self._process.poll() is None:
                self.excess = excess
                self._process.kill()
            time.sleep(usage.SECONDS_BETWEEN)
        if group is not None:
            group.rmdir()

    def wait(self, deadline: float) -> int | None:
        """The exit status; None if the process was killed: at `deadline` (`time.monotonic`) or for its `excess`."""
        try:
            status = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            return None
        return None if self.excess else status

    def kill(self) -> None:
        """Kill the process if it still runs. It cannot have started another one."""
        self._process.kill()
        self._process.wait()

    def missing(self) -> list[str] | None:
        """What could not be isolated; None if the process ended before it reported. Call it after the end."""
        with os.fdopen(self._report, "rb") as report:
            line = report.readline()
        return json.loads(line) if line.endswith(b"\n") else None


def run_script(
    code: str, given: str, folder: Path, *, deadline: float, memory_gb: float, shows_errors: bool = False
) -> tuple[int | None, str]:
    """Run a program in a sandbox, with `given` on its standard input. Its files are in `folder`, which may be new, and
    are removed at its end: a reward runs one after the other, and their files must not add up.

    Returns its exit status, None if it was killed at `deadline` (`time.monotonic`) or for using too much, and its
    output; `shows_errors` adds its error output, and how it ended unless with 0. Raises `RuntimeError` if it never
    began.
    """
    seconds = deadline - time.monotonic()
    work = folder / "work"
    work.mkdir(parents=True)
    write_text(work / "solution.py", code)
    write_text(folder / "stdin", given)
    with (folder / "stdin").open("rb") as stdin, (folder / "stdout").open("wb") as stdout:
        process = SandboxedProcess(
            "script",
            work,
            seconds=seconds,
            memory_gb=memory_gb,
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.STDOUT if shows_errors else subprocess.DEVNULL,
        )
        status = process.wait(deadline)
    check_started(process.missing() is not None)
    printed = (folder / "stdout").read_text(encoding="utf-8", errors="replace")
    _remove(folder)
    if status == 0 or not shows_errors:
        return status, printed
    killed = f"stopped: {process.excess}" if process.excess else f"stopped after {seconds:.3g} s"
    end = killed if status is None else f"ended with status {status}"
    return status, f"{printed.rstrip()}\n[{end}]".lstrip()


@contextlib.contextmanager
def own_folder(purpose: str) -> Iterator[Path]:
    """A folder for foreign code, removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix=f"millrace-{purpose}-"))
    try:
        yield folder
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder with whatever foreign code made of it: unreadable folders, or ten thousand in each other, at
    which Python's own removal ends in a `RecursionError`."""
    with contextlib.suppress(OSError, RecursionError):
        shutil.rmtree(folder)
    if folder.exists():
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run([*command, "--", folder], stderr=subprocess.DEVNULL, check=False)


def write_text(file: Path, text: str) -> None:
    """Write any text of a policy."""
    file.write_text(text, encoding="utf-8", errors="replace")  # a reply may end inside a character


def check_started(has_started: bool) -> None:
    """Raise `RuntimeError` if a sandbox ended before its program began."""
    if not has_started:
        raise RuntimeError("a sandbox ended before it ran the code; it may have too little time or memory to start")


@functools.cache
def sandbox_report() -> tuple[str, ...]:
    """What this machine cannot isolate, one sentence each; empty if it can isolate everything."""
    with own_folder("sandbox") as folder:
        process = SandboxedProcess("nothing", folder, seconds=30.0, memory_gb=1.0)
        status = process.wait(time.monotonic() + 30.0)
        missing = process.missing()
    if status != 0 or missing is None:
        return (f"everything: a sandboxed Python ended with status {status} before it ran anything",)
    return tuple(missing)


def kernel_features() -> str:
    """What isolates foreign code on this machine, beside limits of each process."""
    version = landlock_version()
    landlock = f"Landlock {version}" + (
        " with its scope of signals" if version >= 6 else ", without a scope of signals"
    )
    group = usage.delegated_cgroup()
    memory = (
        "a group of cgroup v2" if group else "no group of cgroup v2 is delegated, so memory is limited by address space"
    )
    return f"{landlock}; seccomp; {memory}"


def require_sandbox() -> None:
    """Raise `SandboxUnavailable` unless `sandbox_report` is empty."""
    if missing := sandbox_report():
        raise SandboxUnavailable(
            f"this machine cannot isolate code that a policy wrote: {'; '.join(missing)}. Run where Landlock and "
            "seccomp are allowed, or accept it with allow_unsandboxed=True"
        )
