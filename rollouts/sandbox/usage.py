"""What a sandboxed process uses that the limits of a process do not cover: files, space, threads, and all its memory.

In: a process and its folder. Out: what is too much, or nothing; and a group of cgroup v2 for it, if there can be one.

The kernel limits the size of one file, not of all together, and threads and files of a user, not of a process. So the
parent looks every `SECONDS_BETWEEN` and kills a process that uses more. It counts everything that the process can
write: its folder, files that have no name any more, and the file of its output. Until the next look it can go over the
limits by what the disk takes in that time.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import stat
from pathlib import Path

SECONDS_BETWEEN = 0.05
MOST_BYTES = 64 * 2**20
MOST_FILES = 1000
MOST_THREADS = 256
_TRIES = 20
_BLOCK_BYTES = 512  # unit of `st_blocks`, on every file system


def excess(process: int, folder: Path) -> str:
    """What a process uses too much of; empty if there is nothing, or no such process any more."""
    try:
        files = _named(folder)
    except OSError as error:  # a name that is too long for the kernel, or a folder that was made unreadable
        return f"files that cannot be counted: {error.strerror}"
    try:
        files |= _opened(process) | _mapped(process, folder)
        if len(os.listdir(f"/proc/{process}/task")) > MOST_THREADS:
            return f"more than {MOST_THREADS} threads"
    except OSError:
        return ""  # it has ended
    if len(files) > MOST_FILES:
        return f"more than {MOST_FILES} files"
    return f"more than {MOST_BYTES // 2**20} MiB of files" if sum(files.values()) > MOST_BYTES else ""


_Files = dict[tuple[int, int], int]
"""Device and number of a file → the bytes that it takes on disk."""


def _named(folder: Path) -> _Files:
    """Files below a folder, whose other names count as one file each. Raises `OSError` if they cannot be counted."""
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return _named_now(folder)
    raise OSError(errno.ENOENT, "they are moved while they are counted")


def _named_now(folder: Path) -> _Files:
    files: _Files = {}
    folders = [str(folder)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                info = entry.stat(follow_symlinks=False)
                is_other_name = (info.st_dev, info.st_ino) in files
                key = (-1, len(files)) if is_other_name else (info.st_dev, info.st_ino)
                files[key] = 0 if is_other_name else info.st_blocks * _BLOCK_BYTES
                if stat.S_ISDIR(info.st_mode):
                    folders.append(entry.path)
                if len(files) > MOST_FILES:
                    return files
    return files


def _opened(process: int) -> _Files:
    """Files that a process can write by a descriptor, and those that it holds without a name."""
    files: _Files = {}
    for descriptor in os.listdir(f"/proc/{process}/fd"):
        with contextlib.suppress(FileNotFoundError):
            link = f"/proc/{process}/fd/{descriptor}"
            info = os.stat(link)
            is_counted = not info.st_nlink or os.lstat(link).st_mode & stat.S_IWUSR
            if stat.S_ISREG(info.st_mode) and is_counted:
                files[info.st_dev, info.st_ino] = info.st_blocks * _BLOCK_BYTES
    return files


def _mapped(process: int, folder: Path) -> _Files:
    """Files that a process has only in its memory, without a name or a descriptor, as large as what it sees of them."""
    files: _Files = {}
    inside, removed = os.fsencode(f" {folder.resolve()}/"), b" (deleted)"
    memory = Path(f"/proc/{process}/maps").read_bytes()
    for line in memory.splitlines() if removed in memory else []:
        if line.endswith(removed) and inside in line:
            span, _, _, device, number, *_ = line.split(maxsplit=5)
            start, end = (int(address, 16) for address in span.split(b"-"))
            major, minor = (int(part, 16) for part in device.split(b":"))
            file = os.makedev(major, minor), int(number)
            files[file] = files.get(file, 0) + end - start
    return files


# --- cgroup v2: one limit of memory and threads for all that a process makes the kernel keep

_count = itertools.count()


def make_cgroup(memory_bytes: int) -> Path | None:
    """A new group for one process, which has to join it; None if no groups can be made here."""
    if (above := delegated_cgroup()) is None:
        return None
    group = above / f"{_PREFIX}{os.getpid()}-{next(_count)}"
    group.mkdir()
    for name, most in (("memory.max", memory_bytes), ("memory.swap.max", 0), ("pids.max", MOST_THREADS)):
        with contextlib.suppress(FileNotFoundError):  # a kernel without accounting of swap
            (group / name).write_text(str(most))
    return group


_PREFIX = "millrace-sandbox-"


@functools.cache
def delegated_cgroup(proc: Path = Path("/proc")) -> Path | None:
    """The group of cgroup v2 above our own, if we may make groups in it that limit memory and threads.

    The kernel allows that only in a group without processes of its own: systemd's `Delegate=yes` with
    `DelegateSubgroup=main`, or what a container runtime lays out like it.
    """
    try:
        own = next(line[3:] for line in (proc / "self/cgroup").read_text().splitlines() if line.startswith("0::"))
        mounts = [line.split() for line in (proc / "self/mountinfo").read_text().splitlines()]
        mounted = next(Path(mount[4]) for mount in mounts if mount[mount.index("-") + 1] == "cgroup2")
        above = (mounted / own.lstrip("/")).parent
        if not above.is_relative_to(mounted) or not {"memory", "pids"} <= {*_words(above / "cgroup.controllers")}:
            return None
        (above / "cgroup.subtree_control").write_text("+memory +pids")
        with (above / "cgroup.procs").open("a"):  # to move a process, one must be allowed to write here
            pass
        for old in above.glob(f"{_PREFIX}*"):  # of a process that was killed
            if not (proc / old.name.removeprefix(_PREFIX).partition("-")[0]).exists():
                old.rmdir()
    except (OSError, StopIteration):
        return None
    return above


def _words(file: Path) -> list[str]:
    return file.read_text().split()
