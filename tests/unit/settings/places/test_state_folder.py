"""The state folder is the same from wherever a run file is named; hints are commands that work where one stands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from settings.places.hints import command
from settings.places.state_folder import find_home, home, store_uri


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MILLRACE_HOME", "MILLRACE_HOME_FOUND", "MILLRACE_STORE", "MILLRACE_COMMAND"):
        monkeypatch.delenv(name, raising=False)


def test_the_nearest_state_folder_above_counts_else_one_is_made_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_home(inner) == inner / ".millrace" and home() == find_home() == tmp_path / ".millrace"
    (tmp_path / ".millrace").mkdir()
    assert find_home(inner) == tmp_path / ".millrace"
    (tmp_path / "a" / ".millrace").mkdir()
    assert find_home(inner) == tmp_path / "a" / ".millrace"
    assert store_uri(within=find_home(inner)) == f"file://{tmp_path}/a/.millrace/store"
    monkeypatch.setenv("MILLRACE_HOME", "mine")
    assert find_home(inner) == home() == tmp_path / "mine", "what the user has set comes first"
    monkeypatch.setenv("MILLRACE_HOME_FOUND", "mine")
    assert home() == tmp_path / "mine" and find_home(inner) == tmp_path / "a" / ".millrace", (
        "that was found by a parent"
    )


PRINT = "from settings.places.hints import command; print(command('status', 'my run'))"


@pytest.mark.parametrize(
    ("called", "path", "printed"),
    [
        ("bin/millrace", "", "bin/millrace"),
        ("TMP/bin/millrace", "", "bin/millrace"),
        ("TMP/bin/millrace", "TMP/bin", "millrace"),
        ("TMP/bin/millrace", "TMP/other", "bin/millrace"),
        ("TMP/millrace/__main__.py", "TMP/bin", "PYTHON -m millrace"),
    ],
)
def test_a_hint_has_the_command_as_it_was_called(called: str, path: str, printed: str, tmp_path: Path):
    for file in ("bin/millrace", "other/millrace", "millrace/__main__.py"):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text(f"import sys; sys.path.insert(0, {os.getcwd()!r})\n{PRINT}\n")
        (tmp_path / file).chmod(0o755)
    called, path = called.replace("TMP", str(tmp_path)), path.replace("TMP", str(tmp_path))
    done = subprocess.run(
        [sys.executable, called], cwd=tmp_path, env={"PATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{printed.replace('PYTHON', sys.executable)} status 'my run'\n"


def test_a_hint_names_the_store_unless_the_command_looks_there_anyway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MILLRACE_COMMAND", "millrace")
    monkeypatch.chdir(tmp_path)
    assert command("resume", "run", store=(tmp_path / ".millrace" / "store").as_uri()) == "millrace resume run"
    elsewhere = (tmp_path / "my own" / ".millrace" / "store").as_uri()
    assert command("resume", "run", store=elsewhere) == "millrace resume run --store 'my own/.millrace/store'"
    assert command("gc", store="s3://bucket/lake") == "millrace gc --store s3://bucket/lake"
    monkeypatch.setenv("MILLRACE_STORE", elsewhere)
    assert command("resume", "run", store=elsewhere) == "millrace resume run"
