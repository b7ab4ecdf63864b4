"""A path that the user typed and that cannot be used is one sentence that names it, in every command."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from settings.run_file import default_values
from storage.log.runs import create_run
from storage.objects.object_store import LocalStore
from tests.builders import BASE, a_shard, a_step, a_summary
from tests.conftest import PROJECT

LONG = "x" * 300
ARITHMETIC = str(PROJECT / "examples/arithmetic.toml")
DRY = ["train", str(PROJECT / "examples/gsm8k.toml"), "--dry-run"]
PLACES = {
    "FOLDER": "folder",
    "FILE": "file",
    "UNDER": "file/below",
    "LONG": LONG,
    "ABSENT": "absent",
    "NO_FOLDER": "absent/below",
    "MODULE": "module.py",
    "BYTES": "bytes.jsonl",
    "PARQUET": "bytes.parquet",
    "HIDDEN": "hidden",
    "SEALED": "/sys/new",
}


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Paths of every kind, and a run of one step in the default store."""
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "home"))
    for folder in ("folder", "module.py"):
        (tmp_path / folder).mkdir()
    for file in ("file", "bytes.jsonl", "bytes.parquet", "hidden"):
        (tmp_path / file).write_bytes(b'{"question": "\xff"}')
    (tmp_path / "hidden").chmod(0)
    config = {**default_values(), "workflow": "examples.arithmetic:Arithmetic"}
    log = create_run(LocalStore(tmp_path / "home" / "store"), "run", config)
    log.append(BASE)
    log.append(a_shard("s1", [a_summary(1)]))
    log.append(a_step(log.state, trained=["0.task1"]))
    return {name: place if place.startswith("/") else str(tmp_path / place) for name, place in PLACES.items()}


def _refused(places: dict[str, str], arguments: list[str]) -> str:
    """The error of a command, whose arguments have names of places in braces."""
    result = CliRunner().invoke(app, [argument.format(**places) for argument in arguments])
    assert result.exit_code == 2 and "Traceback" not in result.output, result.output
    return result.output.strip()


_A_FOLDER, _TOO_LONG, _UNDER_A_FILE = "Is a directory", "File name too long", "Not a directory"
_SEALED = "Permission denied|Operation not permitted"


@pytest.mark.parametrize("command", [["train", "PATH"], ["train", "PATH", "--dry-run"], ["doctor", "PATH"]])
@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("{ABSENT}", "no run file {ABSENT}"),
        ("{FOLDER}", _A_FOLDER),
        ("{UNDER}", "no run file"),
        ("{LONG}", _TOO_LONG),
        ("{BYTES}", "is not valid TOML"),
    ],
)
def test_a_run_file(places: dict[str, str], command: list[str], path: str, sentence: str) -> None:
    shown = _refused(places, [path if word == "PATH" else word for word in command])
    assert sentence.format(**places) in shown and path.format(**places) in shown


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("arguments", [["train", "{HIDDEN}"], [*DRY, "dataset={HIDDEN}"]])
def test_a_file_that_may_not_be_read(places: dict[str, str], arguments: list[str]) -> None:
    shown = _refused(places, arguments)
    assert "Permission denied" in shown and places["HIDDEN"] in shown


@pytest.mark.parametrize(
    ("path", "sentence"),
    [("{FILE}", _UNDER_A_FILE), ("{UNDER}", _UNDER_A_FILE), ("{LONG}", _TOO_LONG), ("{ABSENT}", "no run 'run' in")],
)
@pytest.mark.parametrize(
    "command",
    ["status run", "runs", "gc", "pause run", "eval run", "replay run --step 1", "produce run", "traj ls run"],
)
def test_a_store_that_cannot_be_opened(places: dict[str, str], command: str, path: str, sentence: str) -> None:
    if path == "{ABSENT}" and command in ("runs", "gc"):
        pytest.skip("a store without runs is none that cannot be opened")
    assert sentence in _refused(places, [*command.split(), "--store", path])


@pytest.mark.parametrize("arguments", [["gc", "--store", "{SEALED}"], ["train", ARITHMETIC, "store={SEALED}"]])
def test_a_store_that_cannot_be_written(places: dict[str, str], arguments: list[str]) -> None:
    assert "/sys/new" in _refused(places, arguments)


_TARGETS = {
    "report": ["report", "run", "--out"],
    "export": ["export", "run", "--to"],
    "traj export": ["traj", "export", "run"],
    "replay": ["replay", "run", "--step", "1", "--save"],
}


@pytest.mark.parametrize(
    ("command", "path", "sentence"),
    [
        *[(command, "{LONG}", _TOO_LONG) for command in _TARGETS],
        *[(command, "{UNDER}", "Not a directory|there is no folder") for command in _TARGETS],
        *[(command, "{SEALED}", _SEALED) for command in _TARGETS],
        *[(command, "{NO_FOLDER}", "there is no folder") for command in ("export", "traj export")],
        ("export", "{FOLDER}", "is there already"),
        ("replay", "{FOLDER}", "exists already"),
        ("report", "{FOLDER}", "is a folder; name a file in it"),
        ("traj export", "{FOLDER}", "is a folder; name a file in it"),
    ],
)
def test_a_place_to_write_to(places: dict[str, str], command: str, path: str, sentence: str) -> None:
    shown = _refused(places, [*_TARGETS[command], path])
    assert any(part in shown for part in sentence.split("|")), shown
    assert not (Path(places["ABSENT"])).exists(), "nothing was made"


@pytest.mark.parametrize(
    "command",
    [["rescore", "run", "--reward", "PATH:f"], ["index", "run", "--embedding", "PATH:f"], [*DRY, "workflow=PATH:f"]],
)
@pytest.mark.parametrize(
    ("path", "sentence"),
    [("{MODULE}", _A_FOLDER), ("{ABSENT}.py", "no file"), ("{LONG}.py", _TOO_LONG), ("{UNDER}.py", "no file")],
)
def test_a_file_of_code(places: dict[str, str], command: list[str], path: str, sentence: str) -> None:
    assert sentence in _refused(places, [word.replace("PATH", path) for word in command])


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("dataset={ABSENT}", "no such file or folder"),
        ("dataset={FOLDER}", "has no file for split 'train'"),
        ("dataset={LONG}", _TOO_LONG),
        ("dataset={BYTES}", "line 1: not JSON"),
        ("dataset={PARQUET}", "bytes.parquet: "),
        ("model={ABSENT}", "no such folder"),
        ("model={FILE}", "no such folder"),
        ("model={FOLDER}", "the folder lacks config.json"),
        ("model={LONG}", _TOO_LONG),
    ],
)
def test_a_data_set_or_a_model(places: dict[str, str], setting: str, sentence: str) -> None:
    run_file = ARITHMETIC if setting.startswith("model") else DRY[1]
    assert sentence in _refused(places, ["train", run_file, "--dry-run", setting])


def test_a_state_folder_that_cannot_be_made(places: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_STORE", str(Path(os.environ["MILLRACE_HOME"]) / "store"))
    monkeypatch.setenv("MILLRACE_HOME", places["UNDER"])
    for command in (["up"], ["eval", "run"]):
        assert f"MILLRACE_HOME {places['UNDER']}: Not a directory" in _refused(places, command)
