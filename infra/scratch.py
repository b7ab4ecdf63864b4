"""A folder for what Ray and the workers of one session leave lying about, in the state folder, and a short way there.

In: the state folder. Out: a folder, removed at the end; one that a killed session has left is removed by the next. The
paths of sockets have at most 107 bytes, so if the state folder's is longer, a link in a temporary folder leads to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from settings.errors import InvalidInput, path_errors

LONGEST = 41
"""Bytes: Ray appends `/session_2026-11-28_07-07-14_403819_1735012/sockets/plasma_store` and may append a number."""
LONGEST_TMPDIR = 60
"""Bytes: vLLM appends 37, and Python 31."""


@contextlib.contextmanager
def scratch_folder(home: Path) -> Iterator[Path]:
    """A folder of its own, by a path of at most `LONGEST` bytes. Raises `InvalidInput` if there is no place for one."""
    parent, name = home / "scratch", secrets.token_hex(4)
    with path_errors(f"MILLRACE_HOME {home}"):
        parent.mkdir(parents=True, exist_ok=True)
        for other in parent.glob("*.lock"):
            _remove_if_left(other)
        lock = open(parent / f"{name}.lock", "a+")  # noqa: SIM115 - the lock is held until its end
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # before there is a folder: a session beside this one may look for leftovers
        (parent / name).mkdir()
        short = _short(parent / name, name)
        lock.write(str(short))
        lock.flush()
        try:
            yield short
        finally:
            _remove(Path(lock.name), short)


def worker_environment(scratch: Path) -> dict[str, str]:
    """Variables of a worker on this machine: its temporary files are in `scratch`, unless `TMPDIR` is set and short
    enough, and what torch, NCCL and vLLM open for other processes is on loopback, unless the user chose otherwise."""
    folder = scratch / "tmp"
    folder.mkdir(exist_ok=True)
    chosen = os.environ.get("TMPDIR", "")
    keeps = chosen and len(os.fsencode(chosen)) <= LONGEST_TMPDIR
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}
    chosen_ones = {name: os.environ.get(name, value) for name, value in loopback.items()}
    return {"VLLM_RPC_BASE_PATH": str(folder), **chosen_ones} | ({} if keeps else {"TMPDIR": str(folder)})


def _short(folder: Path, name: str) -> Path:
    if len(os.fsencode(folder)) <= LONGEST and _takes_sockets(folder):
        return folder
    for base in dict.fromkeys((tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm")):
        short = Path(base) / f"millrace-{name}"
        if len(os.fsencode(short)) > LONGEST:
            continue
        with contextlib.suppress(OSError):
            short.symlink_to(folder)
            if _takes_sockets(short):
                return short
            short.unlink()  # a file system without sockets
            short.mkdir(mode=0o700)
            if _takes_sockets(short):
                return short
    raise InvalidInput(
        f"no folder for sockets: the path of {folder} is too long or its file system has none, and neither $TMPDIR nor "
        "/tmp can be written; set MILLRACE_HOME to a shorter path"
    )


def _takes_sockets(folder: Path) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / "socket"))
        (folder / "socket").unlink()
        return True
    return False


def _remove_if_left(lock: Path) -> None:
    """Remove the folder of a session that has ended without doing so."""
    with contextlib.suppress(OSError), open(lock) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if short := file.read():
            _remove(lock, Path(short))


def _remove(lock: Path, short: Path) -> None:
    shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
    if short.is_symlink():
        short.unlink()
    elif short.name.startswith("millrace-"):
        shutil.rmtree(short, ignore_errors=True)
    lock.unlink(missing_ok=True)
