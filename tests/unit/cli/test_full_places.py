"""A disk that fills under what a command makes from a run: the sentence has the path, whichever library was writing."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from storage.objects.object_store import LocalStore
from tests.golden.test_run import FOLDER
from tests.unit.cli.builders import printed

WRITERS = {
    "report golden --out {}/out.html": (Path, "write_text"),
    "traj export golden {}/out.parquet": (pq.ParquetWriter, "write_batch"),
    "export golden --to {}/out": (shutil, "copytree"),
    "train examples/arithmetic.toml model={}/m --dry-run --write {}/out.toml": (Path, "write_text"),
}


def _fail(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, f"Error writing bytes to file. Detail: {os.strerror(errno.ENOSPC)}")


@pytest.fixture
def to(home: Path, store: LocalStore, base_model: Path) -> Path:
    """A folder to write to; the store has run `golden`, and `m` is a model."""
    shutil.copytree(FOLDER, store.root)
    folder = home / "to"
    shutil.copytree(base_model, folder / "m")
    return folder


@pytest.mark.parametrize("line", WRITERS)
def test_the_path_that_does_not_fit_is_named(to: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.setattr(*WRITERS[line], _fail)
    shown = printed(line.format(to, to), status=errno.ENOSPC, columns=None)
    place = line.format(to, to).split()[-1]
    assert f"error: the disk of {place} is full: " in shown, shown
    assert "Make room there, or name another place" in shown and "Detail" not in shown, shown
    assert [path.name for path in to.iterdir()] == ["m"], "nothing is half there"


@pytest.mark.parametrize("line", WRITERS)
def test_so_is_one_on_a_disk_without_room_for_another_file(
    to: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setattr("tempfile.TemporaryFile", _fail)
    place = line.format(to, to).split()[-1]
    shown = printed(line.format(to, to), status=errno.ENOSPC, columns=None)
    assert f"error: the disk of {place} is full: " in shown, shown


@pytest.mark.parametrize("line", WRITERS)
def test_a_folder_that_may_not_be_written_is_named_with_what_to_do(
    to: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    shown = printed(line.format(to, to), status=2, columns=None)
    assert f"{line.format(to, to).split()[-1]}: Read-only file system; name another place" in shown, shown
