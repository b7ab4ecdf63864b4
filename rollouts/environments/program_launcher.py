"""Forks Python programs from a process that has their imports behind it. Run as a script, by
`rollouts.environments.programs`.

In: file descriptor 0, a socket; each message on it carries four more: a request (JSON: script, arguments, environment),
standard output, standard error, and where to tell of it. Out, there: the process's number, and its exit status later.

    python rollouts/environments/program_launcher.py MODULE …

It imports nothing of Millrace, because a program is to find what it would find when started by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def serve(control: socket.socket) -> None:
    """Until nobody holds the other end of the socket; the kernel ends with us what still runs."""
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ, None)
    while True:
        for key, _ in selector.select():
            if key.data is None:
                message, descriptors, _, _ = socket.recv_fds(control, 1, 4)
                if not message:
                    return
                _launch(descriptors, selector)
            else:
                pid, told = key.data
                _, status = os.waitpid(pid, 0)
                _tell(told, os.waitstatus_to_exitcode(status))
                os.close(told)
                selector.unregister(key.fd)
                os.close(key.fd)


def _launch(descriptors: list[int], selector: selectors.BaseSelector) -> None:
    request, output, errors, told = descriptors
    pid = os.fork()
    if pid == 0:
        for key in selector.get_map().values():  # of the others: they would not hear of our parent's end
            for descriptor in (key.fd, key.data[1]) if key.data else (key.fd,):
                os.close(descriptor)
        _become(request, output, errors, told)
    for descriptor in (request, output, errors):
        os.close(descriptor)
    _tell(told, pid)
    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, told))


def _become(request: int, output: int, errors: int, told: int) -> NoReturn:
    """Be the program, as if Python had been started with it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    with open(request) as file:
        program = json.load(file)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for ours, usual in ((nothing, 0), (output, 1), (errors, 2)):
        os.dup2(ours, usual)
        os.close(ours)
    os.close(told)
    os.environ.clear()
    os.environ.update(program["environment"])
    script = program["script"]
    sys.argv[:] = [script, *program["arguments"]]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    status = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as exit_:
        status = _status_of(exit_.code)
    except BaseException:  # noqa: BLE001 - said as Python says it
        sys.excepthook(*sys.exc_info())
        status = 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _status_of(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _tell(told: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
        os.write(told, b"%d\n" % number)


def main() -> None:
    """Import what is named, then serve."""
    with socket.socket(fileno=os.dup(0)) as control:
        for module in sys.argv[1:]:
            importlib.import_module(module)
        gc.collect()
        gc.freeze()  # a program that collects would copy every page of what it shares with us
        serve(control)


if __name__ == "__main__":
    main()
