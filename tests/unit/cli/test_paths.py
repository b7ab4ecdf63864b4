"""A path that the user typed and that cannot be used is one sentence that names it, in every command."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from settings.run_file import default_values
from storage.objects.object_store import LocalStore
from tests.conftest import PROJECT
from tests.unit.cli.builders import a_run_of_one_step, printed

LONG = "x" * 300
ARITHMETIC = f"train {PROJECT}/examples/arithmetic.toml"
DRY = f"train {PROJECT}/examples/gsm8k.toml --dry-run"
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
    a_run_of_one_step(LocalStore(tmp_path / "home" / "store"), config)
    return {name: place if place.startswith("/") else str(tmp_path / place) for name, place in PLACES.items()}


def _refused(places: dict[str, str], line: str) -> str:
    """The error of a command, whose line has names of places in braces."""
    return printed(line.format(**places), status=2).strip()


_A_FOLDER, _TOO_LONG, _UNDER_A_FILE = "Is a directory", "File name too long", "Not a directory"


@pytest.mark.parametrize("command", ["train PATH", "train PATH --dry-run", "doctor PATH"])
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
def test_a_run_file(places: dict[str, str], command: str, path: str, sentence: str) -> None:
    shown = _refused(places, command.replace("PATH", path))
    assert sentence.format(**places) in shown and path.format(**places) in shown


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("line", ["train {HIDDEN}", f"{DRY} dataset={{HIDDEN}}"])
def test_a_file_that_may_not_be_read(places: dict[str, str], line: str) -> None:
    shown = _refused(places, line)
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
    if path != "{ABSENT}" or command not in ("runs", "gc"):  # for them a store without runs is a store
        assert sentence in _refused(places, f"{command} --store {path}")


@pytest.mark.parametrize("line", ["gc --store {SEALED}", f"{ARITHMETIC} store={{SEALED}}"])
def test_a_store_that_cannot_be_written(places: dict[str, str], line: str) -> None:
    assert "/sys/new" in _refused(places, line)


@pytest.mark.parametrize(
    ("command", "for_a_folder"),
    [
        ("report run --out", "is a folder; name a file in it"),
        ("export run --to", "is there already"),
        ("traj export run", "is a folder; name a file in it"),
        ("replay run --step 1 --save", "exists already"),
    ],
)
def test_a_place_to_write_to(places: dict[str, str], command: str, for_a_folder: str) -> None:
    sentences = {"LONG": _TOO_LONG, "UNDER": "Not a directory|there is no folder", "FOLDER": for_a_folder}
    sentences["SEALED"] = "Permission denied|Operation not permitted"
    if "export" in command:
        sentences["NO_FOLDER"] = "there is no folder"  # the others make it
    for place, sentence in sentences.items():
        shown = _refused(places, f"{command} {{{place}}}")
        assert any(part in shown for part in sentence.split("|")), shown
        assert not (Path(places["ABSENT"])).exists(), "nothing was made"


@pytest.mark.parametrize("command", ["rescore run --reward", "index run --embedding", f"{DRY} workflow="])
@pytest.mark.parametrize(
    ("path", "sentence"),
    [("{MODULE}", _A_FOLDER), ("{ABSENT}.py", "no file"), ("{LONG}.py", _TOO_LONG), ("{UNDER}.py", "no file")],
)
def test_a_file_of_code(places: dict[str, str], command: str, path: str, sentence: str) -> None:
    space = "" if command.endswith("=") else " "
    assert sentence in _refused(places, f"{command}{space}{path}:f")


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
    command = f"{ARITHMETIC} --dry-run" if setting.startswith("model") else DRY
    assert sentence in _refused(places, f"{command} {setting}")


def test_a_state_folder_that_cannot_be_made(places: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_STORE", str(Path(os.environ["MILLRACE_HOME"]) / "store"))
    monkeypatch.setenv("MILLRACE_HOME", places["UNDER"])
    for command in ("up", "eval run"):
        assert f"MILLRACE_HOME {places['UNDER']}: Not a directory" in _refused(places, command)
