"""Workers as forks of one process, which imports their libraries while the command still checks the run.

    command ─┬▶ source: imports torch, transformers, vLLM ──fork──▶ Ray's worker
             └▶ Ray's raylet ──▶ forked_worker.py: asks the source ──┘
                                 vLLM's front end asks it too  ──fork──▶ fork server of vLLM's core

In: names of modules. Out: processes that have them, with the environment, folder and output of the process that asked,
and jemalloc in place of glibc's allocator.
Without a source, on another machine or after a failure, Ray starts its workers as usual.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from infra.environment import adopt_malloc, allocator
from infra.user_code import own_command

SOURCE = "MILLRACE_FORKS_FROM"
"""Environment variable: the source's name, an abstract address of a Unix socket; `forked_worker.py` has it too."""
_HIDDEN = ("ray", "sklearn")
"""What libraries import if it is there, though we use nothing that needs it: vLLM Ray, which is lost in a fork, and
transformers scikit-learn with pandas, for a second of processor time. Forks can import them."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LENGTH = struct.Struct("!I")
_MOST_DESCRIPTORS = 8


@contextlib.contextmanager
def imported_early(modules: Sequence[str], *, log: Path) -> Iterator[None]:
    """Workers that Ray starts on this machine inside this context are forks of a process that has these modules, or
    wait until it has."""
    # Python 3.14's fork server wants a key; a cluster's workers are other processes' children.
    if SOURCE in os.environ or "RAY_ADDRESS" in os.environ or sys.version_info >= (3, 14):
        yield
        return
    name = f"millrace/forks/{secrets.token_hex(16)}"
    log.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listener, open(log, "ab") as output:
        listener.bind(f"\0{name}")
        listener.listen(128)
        source = subprocess.Popen(
            [*own_command("infra.forks:serve"), str(listener.fileno()), *modules],
            env=os.environ | allocator(),
            stdin=subprocess.PIPE,  # its end is ours
            stdout=output,
            stderr=output,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    os.environ[SOURCE] = name
    try:
        yield
    finally:
        del os.environ[SOURCE]
        source.kill()  # and with it, by the kernel, what is left of its forks
        source.communicate()


def serve() -> None:
    """The source's life, in a process of its own; its forks leave this function to live theirs."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    sys.modules.update(dict.fromkeys(_HIDDEN))  # type: ignore[arg-type] # None: it cannot be imported
    for module in sys.argv[2:]:
        importlib.import_module(module)
    for module in _HIDDEN:
        del sys.modules[module]
    gc.collect()
    gc.freeze()  # or each collection of a fork would copy every page
    request = _next_request(int(sys.argv[1]))
    if request is None:
        return
    adopt_environment()
    if request["kind"] == "fork server":
        from multiprocessing import forkserver

        os.setpgid(0, request["group"])  # ends with it
        listener, alive = request["descriptors"]
        forkserver.main(listener, alive, [])
    else:
        sys.argv = request["argv"]
        runpy.run_path(sys.argv[0], run_name="__main__")


def _find_place_of_title() -> None:
    """Let vLLM name its core, by which `liveness` finds it: the place of a process's title is found only as long as the
    environment is the first. Ray's workers have a name from Ray, which looks for that place itself."""
    with contextlib.suppress(ImportError):
        import setproctitle

        setproctitle.getproctitle()


def end_with_parent() -> None:
    """Let the kernel kill this process when the one that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_environment() -> None:
    """Let libraries follow variables that they have read when they were imported, and draw numbers of their own."""
    adopt_malloc(os.environ)
    tempfile.tempdir = None
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or torch.get_num_threads()))
    dynamo: Any = sys.modules.get("torch._dynamo.config")
    if dynamo:
        dynamo.disable = os.environ.get("TORCHDYNAMO_DISABLE", "0") == "1"
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


def become_fork_server() -> bool:
    """Let the fork server of `multiprocessing` in this process be a fork of the source; False if there is none."""
    from multiprocessing import forkserver, resource_tracker, util

    if SOURCE not in os.environ:
        return False
    server: Any = forkserver._forkserver
    address = f"{util.get_temp_dir()}/forks"
    alive, own_end = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        os.chmod(address, 0o600)
        listener.listen()
        try:
            _send({"kind": "fork server", "group": os.getpgrp()}, [0, 1, 2, listener.fileno(), alive])
        except OSError:
            os.close(own_end)
            return False
        finally:
            os.close(alive)
    server._forkserver_address, server._forkserver_alive_fd = address, own_end
    server.ensure_running = resource_tracker.ensure_running  # it would start another, as that one is no child
    return True


def _send(request: dict[str, Any], descriptors: Sequence[int]) -> None:
    message = json.dumps({**request, "environment": dict(os.environ), "folder": os.getcwd()}).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{os.environ[SOURCE]}")
        socket.send_fds(connection, [_LENGTH.pack(len(message))], descriptors)
        connection.sendall(message)
        connection.recv(1)  # it has forked


def _next_request(listener_fd: int) -> dict[str, Any] | None:
    """In a fork, the request to follow; None in the source itself, once the command has ended."""
    with socket.socket(fileno=listener_fd) as listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        while True:
            if any(key.fileobj == 0 for key, _ in selector.select()):
                return None
            with contextlib.suppress(OSError, ValueError), listener.accept()[0] as connection:
                # Other users of this machine see the address.
                user = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
                if user != os.getuid():
                    continue
                length, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, _MOST_DESCRIPTORS)
                with connection.makefile("rb") as stream:
                    request: dict[str, Any] = json.loads(stream.read(*_LENGTH.unpack(length)))
                if os.fork():
                    for descriptor in descriptors:
                        os.close(descriptor)
                    continue
                end_with_parent()
                os.setpgid(0, 0)  # when a worker ends, Ray kills the group that it was in
                for number in range(3):
                    os.dup2(descriptors[number], number)
                    os.close(descriptors[number])
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                if request["kind"] == "fork server":
                    _find_place_of_title()
                os.environ.clear()
                os.environ.update(request["environment"])
                os.chdir(request["folder"])
                return {**request, "descriptors": descriptors[3:]}
