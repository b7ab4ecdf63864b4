"""A mistake of the user's is one line; every other error is Python's traceback, down to the user's own line."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import typer

from cli.terminal.errors import TRACEBACK, explained
from settings.errors import DiskFull, InvalidInput, check_room
from settings.places.state_folder import written_places
from storage.objects.object_store import StoreFull
from tests.conftest import PROJECT
from tests.unit.cli.builders import printed

ENVIRONMENT = """
from rollouts.workflow import Workflow

class Broken(Workflow):
    def tasks(self, split):
        return _read("x")

    async def run(self, task, chat): ...
    def demonstrations(self, count, seed): ...

def _read(text):
    return [int(text)]
"""


def _ending(error: BaseException, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit status and what is on standard error."""
    with pytest.raises(typer.Exit) as ended, explained():
        raise error
    return ended.value.exit_code, capsys.readouterr().err


def test_only_an_error_that_the_user_can_mend_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert _ending(InvalidInput("write [steps]"), capsys) == (2, "error: write [steps]\n")
    for error in (ValueError("no"), FileNotFoundError("no"), PermissionError("no"), RuntimeError("no")):
        status, shown = _ending(error, capsys)
        assert status == 1 and shown.startswith("Traceback") and shown.endswith(f"{type(error).__name__}: no\n")
    assert _ending(KeyboardInterrupt(), capsys) == (130, "")


@pytest.mark.parametrize(
    ("shell", "status", "shown"),
    [
        ("$MILLRACE config >&-", 0, ""),
        ("$MILLRACE config --json >&- 2>&-", 0, ""),
        ("$MILLRACE status nothing 2>&-", 2, ""),
        ("LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 $MILLRACE config train.kl | grep -c 'KL(policy ?'", 0, "3\n"),
        ("PYTHONIOENCODING=latin-1 $MILLRACE config train.kl | grep -ac 'KL(policy ?'", 0, "3\n"),
        ("COLUMNS=0 $MILLRACE config train.kl | grep -c coefficient", 0, "1\n"),
        (
            "mkdir gone && cd gone && rmdir ../gone && $MILLRACE runs",
            2,
            "error: the current folder was removed; change",
        ),
        (
            "mkdir it && cd it && rmdir ../it && MILLRACE_HOME= $MILLRACE runs",
            2,
            "error: the current folder was removed",
        ),
    ],
)
def test_a_command_needs_neither_terminal_nor_streams_nor_utf_8_nor_a_folder(
    tmp_path: Path, home: Path, shell: str, status: int, shown: str
) -> None:
    command = f"import sys; sys.path.insert(0, {str(PROJECT)!r}); from cli.main import app; app()"
    line = "set -o pipefail; " + shell.replace("$MILLRACE", shlex.join([sys.executable, "-c", command]))
    ended = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == status and "Traceback" not in ended.stderr, ended.stderr
    assert (ended.stderr or ended.stdout).startswith(shown)


def test_a_reader_that_has_read_enough_ends_a_command_quietly() -> None:
    command = "import typer; from cli.terminal.errors import explained\ntry:\n  with explained():\n    while True: "
    command += "print('line', flush=True)\nexcept typer.Exit as ended: raise SystemExit(ended.exit_code)"
    line = f"set -o pipefail; {shlex.join([sys.executable, '-c', command])} | head -n 1"
    ended = subprocess.run(["bash", "-c", line], cwd=PROJECT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + signal.SIGPIPE, "line\n", "")


def test_the_first_error_of_a_group_decides(capsys: pytest.CaptureFixture[str]) -> None:
    mendable, other = InvalidInput("mend me"), KeyError("other")
    nested = ExceptionGroup("tasks", [ExceptionGroup("more", [mendable, other])])
    assert _ending(nested, capsys) == (2, "error: mend me\n")
    status, shown = _ending(ExceptionGroup("tasks", [other, mendable]), capsys)
    assert status == 1 and "KeyError: 'other'" in shown and "error: " not in shown


def _caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def test_a_full_disk_is_one_sentence_with_its_place_and_a_status_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever raises it, with a number or in words, and a server whose database is full and that says only 500."""
    free = {"home": 3_000_000, "tmp": 10**9, "my 50%?": 10**9}
    for name, variable in (("home", "MILLRACE_HOME"), ("tmp", "TMPDIR"), ("my 50%?", "MILLRACE_STORE")):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / name))
    monkeypatch.setattr(tempfile, "tempdir", None)
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free[path.name]))
    home, temporary = f"the state folder (MILLRACE_HOME), {tmp_path / 'home'}", f"(TMPDIR), {tmp_path / 'tmp'}"
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "tmp" / "x" / "y.safetensors"))
    quota = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(tmp_path / "my 50%?" / "z"))
    words = RuntimeError("SafetensorError: I/O error: No space left on device (os error 28)")
    for error, place in (
        (full, temporary),
        (quota, f"the store, {tmp_path / 'my 50%?'}"),
        (words, home),
        (_caused(RuntimeError("step 3"), sqlite3.OperationalError("database or disk is full")), home),
        (ExceptionGroup("tasks", [KeyError("gone"), ExceptionGroup("more", [full])]), temporary),
    ):
        status, shown = _ending(error, capsys)
        assert status == errno.ENOSPC and shown.startswith("error: ") and shown.count("\n") == 1, shown
        assert place in shown and "20.0 MB are needed there" in shown and "the same command continues" in shown
    assert "3.0 MB free" in _ending(words, capsys)[1]
    free["home"] = 10**9
    assert "a disk or quota (SafetensorError" in _ending(words, capsys)[1], "there is room again"
    assert _ending(RuntimeError("Server error '500 Internal Server Error'"), capsys)[0] == 1
    free["home"] = 4096
    assert home in _ending(RuntimeError("Server error '500 Internal Server Error'"), capsys)[1]
    assert _ending(InvalidInput("write [steps]"), capsys) == (2, "error: write [steps]\n")
    with pytest.raises(DiskFull, match="4.1 KB free, and 20.0 MB are needed"):
        check_room(written_places())
    store_full = StoreFull("store s3://lake is full")
    assert _ending(ExceptionGroup("tasks", [store_full]), capsys) == (28, "error: store s3://lake is full\n")


def test_a_variable_shows_the_traceback_of_every_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRACEBACK, "1")
    status, shown = _ending(InvalidInput("mend me"), capsys)
    assert status == 2 and shown.startswith("Traceback") and shown.endswith("\nerror: mend me\n")


@pytest.mark.parametrize("error", [InvalidInput("at http://me:secret@host"), OSError("at http://me:secret@host")])
def test_no_error_shows_a_secret(capsys: pytest.CaptureFixture[str], error: Exception) -> None:
    shown = _ending(error, capsys)[1]
    assert "http://***@host" in shown and "me:secret@host" not in shown.splitlines()[-1]


def test_an_error_in_the_users_code_ends_with_the_users_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(ENVIRONMENT)
    (tmp_path / "run.toml").write_text('workflow = "broken.py:Broken"')
    command = [sys.executable, "-m", "cli.main", "train", "run.toml", "--dry-run"]
    environment = {"PYTHONPATH": str(PROJECT), "MILLRACE_HOME": str(tmp_path / "home"), "PATH": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    error, *places = done.stderr.splitlines()
    assert done.returncode == 2
    assert error.startswith("error: ") and error.endswith("ValueError: invalid literal for int() with base 10: 'x'")
    assert places == ["  at broken.py:12 in _read: return [int(text)]", '  at broken.py:6 in tasks: return _read("x")']


def test_the_option_that_prepares_every_command_is_explained_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_LOG_FORMAT", "prose")
    assert "MILLRACE_LOG_FORMAT" in printed("runs", status=2)
