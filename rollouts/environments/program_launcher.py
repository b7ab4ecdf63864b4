"""Forks Python programs from a process that has imported their modules. `rollouts.environments.programs` runs it.

In: a socket as file descriptor 0. Each message on it carries four descriptors: a request (JSON: script, arguments,
environment), standard output, standard error, and one for reports. Out: reports, the process id and later the exit
status.

    python rollouts/environments/program_launcher.py SYS_PATH MODULE …

It imports nothing of Millrace: a forked program must find what it would find if Python had started it.
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
    """Fork programs until the other end of the socket is closed. The kernel kills those that still run."""
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
                pid, reports = key.data
                _, status = os.waitpid(pid, 0)
                _report(reports, os.waitstatus_to_exitcode(status))
                os.close(reports)
                selector.unregister(key.fd)
                os.close(key.fd)


def _launch(descriptors: list[int], selector: selectors.BaseSelector) -> None:
    request, output, errors, reports = descriptors
    pid = os.fork()
    if pid == 0:
        # The descriptors of other programs: open here, they would hide the end of this launcher.
        for key in selector.get_map().values():
            for descriptor in (key.fd, key.data[1]) if key.data else (key.fd,):
                os.close(descriptor)
        _become(request, output, errors, reports)
    for descriptor in (request, output, errors):
        os.close(descriptor)
    _report(reports, pid)
    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, reports))


def _become(request: int, output: int, errors: int, reports: int) -> NoReturn:
    """Run the program as if Python had been started with it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    with open(request) as file:
        program = json.load(file)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, standard in ((nothing, 0), (output, 1), (errors, 2)):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.close(reports)
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
    except BaseException:  # noqa: BLE001 - printed as Python prints it
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


def _report(reports: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the attempt has ended
        os.write(reports, b"%d\n" % number)


def main() -> None:
    """Import the modules named as arguments, as a process with that `sys.path` (JSON) finds them; then serve."""
    with socket.socket(fileno=os.dup(0)) as control:
        path = sys.path.copy()
        sys.path[:0] = json.loads(sys.argv[1])
        for module in sys.argv[2:]:
            importlib.import_module(module)
        sys.path[:] = path
        gc.collect()
        gc.freeze()  # a garbage collection in a program would copy every shared page
        serve(control)


if __name__ == "__main__":
    main()
