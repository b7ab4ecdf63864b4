"""Folders in the cache in which something large is made before it goes to the store.

In: the cache folder, and how much will be written. Out: a folder, removed at the end. `$TMPDIR` may be small or in
memory; the cache is on the disk whose budget (`MILLRACE_MIN_FREE_GB`) counts. What a killed process has left behind is
removed by the next one: the kernel has freed its lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from storage.objects.object_store import reserved_bytes, room_for

_NEW_SECONDS = 60.0
"""A folder as young as this may not have its lock yet."""


@contextlib.contextmanager
def staging_folder(cache: Path, num_bytes: int = 0) -> Iterator[Path]:
    """A folder for `num_bytes`. Raises `StoreFull` if they do not fit beside the reserve, or a write in it does not."""
    parent = cache / "staging"
    remedy = f"Make room there, or set MILLRACE_HOME (the folder above {cache.name}) to a larger disk"
    with room_for(num_bytes, parent, reserve=reserved_bytes(), what=f"the cache folder {cache}", remedy=remedy):
        parent.mkdir(parents=True, exist_ok=True)
        for other in parent.iterdir():
            with contextlib.suppress(OSError), locked_folder(other, fcntl.LOCK_EX | fcntl.LOCK_NB):
                if time.time() - other.stat().st_mtime > _NEW_SECONDS:
                    shutil.rmtree(other)
        with (
            tempfile.TemporaryDirectory(dir=parent, ignore_cleanup_errors=True) as name,
            locked_folder(Path(name), fcntl.LOCK_EX),  # another process may be looking at it right now
        ):
            yield Path(name)


def lock_folder(folder: Path, kind: int) -> int:
    """Lock a folder until the returned descriptor is closed.

    Raises `OSError` if the folder does not exist, or if `kind` does not wait and another process has the lock. On a
    file system without locks only a `kind` that does not wait fails, so nothing is removed there.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, kind)
    except OSError:
        if kind & fcntl.LOCK_NB:
            os.close(descriptor)
            raise
    return descriptor


@contextlib.contextmanager
def locked_folder(folder: Path, kind: int) -> Iterator[None]:
    """Hold a folder inside this context; see `lock_folder`."""
    descriptor = lock_folder(folder, kind)
    try:
        yield
    finally:
        os.close(descriptor)
