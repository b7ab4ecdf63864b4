"""Programs that play attempts: started as new processes, or forked from a Python that has imported their modules.

In: a command and environment variables. Out: a running process with pipes for its output.

    start_program:  any program, as a new process
    Launcher:       `python script.py …`, forked; importing a client library takes a second of CPU, a fork milliseconds
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from settings.errors import InvalidInput

_LAUNCHER = Path(__file__).with_name("program_launcher.py")


class LauncherEnded(Exception):
    """The process that programs are forked from has ended. The next attempt starts a new one."""


@dataclass
class ForkedProgram:
    """A child of the launcher, with the part of `asyncio.subprocess.Process` that an attempt needs."""

    pid: int
    stdout: asyncio.StreamReader | None
    stderr: asyncio.StreamReader | None
    reports: asyncio.StreamReader
    """The launcher writes the process id and the exit status here."""

    async def wait(self) -> int:
        """The exit status, negative for a signal."""
        return await _number(self.reports)


Program = asyncio.subprocess.Process | ForkedProgram


async def start_program(command: Sequence[str], environment: dict[str, str]) -> Program:
    """Start a program in a process group of its own."""
    return await asyncio.create_subprocess_exec(
        *command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=environment, start_new_session=True
    )


def kill_group(program: Program) -> None:
    """Kill a program and its children, if any still run."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)


class Launcher:
    """Forks Python programs from one process. It starts with the first one and imports `modules` as this one would."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = list(modules)
        self._control: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()

    async def start(self, command: Sequence[str], environment: dict[str, str]) -> Program:
        """Fork a program; `command` is this Python, a script, and the script's arguments.

        Raises `InvalidInput` for any other command, and `LauncherEnded`.
        """
        if len(command) < 2 or command[0] != sys.executable or not command[1].endswith(".py"):
            raise InvalidInput(f"{list(command)[:2]} cannot be forked: it is to be [sys.executable, 'script.py', …]")
        control = await self._connected()
        program = {"script": command[1], "arguments": command[2:], "environment": environment}
        request = os.memfd_create("request")
        ends = [os.pipe() for _ in range(3)]
        child_ends = [request, *(end[1] for end in ends)]
        try:
            os.write(request, json.dumps(program).encode())
            os.lseek(request, 0, os.SEEK_SET)
            socket.send_fds(control, [b"!"], child_ends)
        except OSError as error:
            for end in ends:
                os.close(end[0])
            self._control = None
            raise LauncherEnded(f"programs cannot be forked: {error}") from error
        finally:
            for descriptor in child_ends:
                os.close(descriptor)
        output, errors, reports = [await _reader(end[0]) for end in ends]
        return ForkedProgram(await _number(reports), output, errors, reports)

    async def _connected(self) -> socket.socket:
        async with self._starting:
            if self._control is None or self._process is None or self._process.returncode is not None:
                self.close()
                self._control, child_end = socket.socketpair()
                with child_end:
                    self._process = await asyncio.create_subprocess_exec(
                        sys.executable, str(_LAUNCHER), json.dumps(sys.path), *self._modules, stdin=child_end.fileno()
                    )
            return self._control

    def close(self) -> None:
        """End the process. An attempt kills its own program."""
        if self._control is not None:
            self._control.close()
            self._control = None


async def _reader(descriptor: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    file = os.fdopen(descriptor, "rb", buffering=0)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
    return reader


async def _number(reports: asyncio.StreamReader) -> int:
    line = await reports.readline()
    if not line:
        raise LauncherEnded("the process that programs are forked from has ended; its errors are in the worker's log")
    return int(line)
