"""A run whose store, state folder or `$TMPDIR` is a small disk that fills, and the same command once there is room.

    unshare --map-root-user --mount python -m tests.flows.small_disk FOLDER PLACE LEFT COMMAND …

In: a folder with `store`, `state` and `tmp`, which of them is the disk, the bytes that are left on it when it fills,
and a command that trains. Out: on stdout, JSON with status and output of both starts; the store is copied to
FOLDER/copy. The disk is in memory, and only this process and its children see it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

SIZE = 400 * 2**20
BEGUN_STEPS = 2


def main(folder: Path, place: str, left: int, command: list[str]) -> None:
    disk, filler = folder / place, folder / place / "filler"
    mount(disk)
    first = _start(command, folder / "first.txt")
    policies = folder / "store/runs/scripted/policies"
    while first.poll() is None and (not policies.exists() or len(list(policies.iterdir())) < BEGUN_STEPS):
        time.sleep(0.05)
    fill(filler, left)
    first.wait(300)
    filler.unlink()
    second = _start(command, folder / "second.txt")
    second.wait(300)
    shutil.copytree(folder / "store", folder / "copy")
    ends = {"first": first.returncode, "second": second.returncode}
    print(json.dumps({name: [status, (folder / f"{name}.txt").read_text()] for name, status in ends.items()}))


def _start(command: list[str], output: Path) -> subprocess.Popen[bytes]:
    with open(output, "wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file)


def mount(folder: Path) -> None:
    """Put a disk of `SIZE` bytes in the place of an empty folder."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)], check=True)


def fill(filler: Path, left: int) -> None:
    """Take what is free but `left` bytes, while others write too."""
    with open(filler, "wb", buffering=0) as file:
        while (free := shutil.disk_usage(filler.parent).free - left) > 0:
            try:
                file.write(bytes(min(free, 2**20)))
            except OSError:  # the run was faster
                return


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])
