"""What is made before it goes to the store is made in the cache, within the disk's budget, and leaves nothing there."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from storage.objects.object_store import StoreFull
from storage.objects.staging import lock_folder, staging_folder


def test_what_does_not_fit_is_said_before_and_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the place, the bytes and what helps. `$TMPDIR` has nothing to do with it."""
    monkeypatch.setenv("TMPDIR", "/nonexistent")
    monkeypatch.setenv("MILLRACE_MIN_FREE_GB", "0.5")
    sentence = f"the cache folder {tmp_path} is full: .*MILLRACE_HOME.*the same command continues"
    with staging_folder(tmp_path, 10**6) as folder:
        (folder / "weights").write_bytes(b"x")
        assert folder.parent == tmp_path / "staging"
    with pytest.raises(StoreFull, match=sentence), staging_folder(tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    full = shutil.disk_usage("/")._replace(free=10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(StoreFull, match="1.0 GB free, 600.0 MB to write and 500.0 MB to be left free"):
        staging_folder(tmp_path, 6 * 10**8).__enter__()
    assert not list((tmp_path / "staging").iterdir())


def test_what_a_killed_process_left_goes_with_the_next_and_what_a_living_one_makes_stays(tmp_path: Path) -> None:
    script = f"""
import os
from pathlib import Path
from storage.objects.staging import staging_folder
with staging_folder(Path({str(tmp_path)!r})) as folder:
    (folder / "weights").write_bytes(b"x")
    print(folder, flush=True)
    os.kill(os.getpid(), 9)
"""
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    left = Path(killed.stdout.strip())
    with staging_folder(tmp_path) as ours:
        for folder in (left, ours):
            os.utime(folder, (0, 0))  # both are old
        with staging_folder(tmp_path):
            assert ours.exists() and not left.exists()


def test_a_folder_that_another_process_is_looking_at_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of one trainer make theirs at the same moment, and each looks for those that a killed process left."""

    class Looked(tempfile.TemporaryDirectory[str]):
        def __enter__(self) -> str:
            name = super().__enter__()
            looking = lock_folder(Path(name), fcntl.LOCK_EX)
            threading.Timer(0.1, os.close, [looking]).start()
            return name

    monkeypatch.setattr(tempfile, "TemporaryDirectory", Looked)
    with staging_folder(tmp_path) as folder:
        (folder / "weights").write_bytes(b"x")
    assert not folder.exists()
