"""A disk that fills, while a run trains or one part of it writes: one sentence with the place, and it goes on later."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from storage.log.run_log import RunLog
from storage.objects.object_store import LocalStore
from tests.chaos.outcomes import check_trained_once
from tests.conftest import MILLRACE, PROJECT, SCRIPTED, Home

STEPS = 30
_PRIVATE = ["unshare", "--map-root-user", "--mount"]
PLACES = ("store", "state", "tmp")


def _can_mount() -> bool:
    return shutil.which("unshare") is not None and not subprocess.run([*_PRIVATE, "true"], check=False).returncode


def _with_own_disk(program: list[str], environment: dict[str, str], *, seconds: float) -> Any:
    """The JSON that a module prints which may mount a disk that only it and its children see."""
    command = [*_PRIVATE, sys.executable, "-m", *program]
    done = subprocess.run(command, env=environment, cwd=PROJECT, capture_output=True, text=True, timeout=seconds)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(not _can_mount(), reason="this kernel gives no user namespaces")
@pytest.mark.parametrize("left", [0, 3_000_000])
def test_each_part_that_writes_names_the_full_disk_leaves_nothing_half_and_writes_again(
    tmp_path: Path, left: int
) -> None:
    program = ["tests.flows.filled_parts", str(tmp_path), str(left)]
    rows = _with_own_disk(program, {**os.environ, "MILLRACE_MIN_FREE_GB": "0"}, seconds=200)
    assert list(rows) == ["committing", "publishing", "staging", "indexing"]
    free = f"is full: {'3.0 MB' if left else '0 B'} free, "
    for name, row in rows.items():
        assert str(tmp_path / "disk") in row["sentence"] and free in row["sentence"], (name, row)
        assert "the same command continues" in row["sentence"], (name, row)
        assert not row["is_half_there"], name
        assert row["is_there"] == (name != "staging"), name


@pytest.mark.slow
@pytest.mark.skipif(not _can_mount(), reason="this kernel gives no user namespaces")
@pytest.mark.parametrize("left", [0, 3_000_000])
@pytest.mark.parametrize("place", PLACES)
def test_a_run_on_a_full_disk_says_so_and_goes_on_when_there_is_room(
    home: Home, base_model: Path, tmp_path: Path, place: str, left: int
) -> None:
    folder = tmp_path / "disks"
    for name in PLACES:
        (folder / name).mkdir(parents=True)
    of_home = {"MILLRACE_HOME": str(folder / "state"), "PREFECT_HOME": str(folder / "state/prefect")}
    places = {"MILLRACE_STORE": str(folder / "store"), "TMPDIR": str(folder / "tmp"), "MILLRACE_MIN_FREE_GB": "0"}
    settings = [f"model={base_model}", f"steps={STEPS}", "evaluation.every=0", "train.checkpoint_every=1"]
    command = [str(MILLRACE), "train", str(SCRIPTED), *settings]
    program = ["tests.flows.small_disk", str(folder), place, str(left), *command]
    ends = _with_own_disk(program, {**home.environment, **of_home, **places}, seconds=700)
    status, said = ends["first"]
    if status:  # with 3 MB left a small run may come to its end
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        assert status == errno.ENOSPC and len(errors) == 1, said
        assert str(folder / place) in errors[0] and " full: " in errors[0], said
        assert "Nothing that was committed is lost: the same command continues" in errors[0], said
        assert "Traceback" not in said, said
    else:
        assert left or place == "tmp", f"it wrote nothing to {place}?\n{said}"
    assert ends["second"][0] == 0, ends["second"][1]
    check_trained_once(RunLog(LocalStore(folder / "copy"), "scripted").refresh(), steps=STEPS)
