"""What the user typed and cannot be used, above all paths, is one sentence that names it, in every command."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cli.terminal.arguments import parse_overrides
from settings.run_file import default_values
from storage.log.run_log import RunLog
from storage.objects.object_store import LocalStore
from tests.conftest import PROJECT
from tests.unit.cli.builders import a_run_of_one_step, assert_refused, printed

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


@pytest.mark.parametrize("command", ["train {}", "train {} --dry-run", "doctor {}"])
def test_a_run_file(places: dict[str, str], command: str) -> None:
    sentences = {
        "ABSENT": f"no run file {places['ABSENT']}",
        "FOLDER": "is a folder; name a file in it",
        "UNDER": "no run file",
    }
    for place, sentence in {**sentences, "LONG": _TOO_LONG, "BYTES": "is no text in UTF-8"}.items():
        shown = _refused(places, command.format(f"{{{place}}}"))
        assert sentence in shown and places[place] in shown


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("line", ["train {HIDDEN}", f"{DRY} dataset={{HIDDEN}}"])
def test_a_file_that_may_not_be_read(places: dict[str, str], line: str) -> None:
    shown = _refused(places, line)
    assert "Permission denied" in shown and places["HIDDEN"] in shown


@pytest.mark.parametrize(
    "command",
    ["status run", "runs", "gc", "pause run", "eval run", "replay run --step 1", "produce run", "traj ls run"],
)
def test_a_store_that_cannot_be_opened(places: dict[str, str], command: str) -> None:
    sentences = {"FILE": _UNDER_A_FILE, "UNDER": _UNDER_A_FILE, "LONG": _TOO_LONG}
    if command not in ("runs", "gc"):  # for them a store without runs is a store
        sentences["ABSENT"] = "no run 'run' in"
    for place, sentence in sentences.items():
        assert sentence in _refused(places, f"{command} --store {{{place}}}")


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


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("traj export run out.csv", "only .parquet is written; name it out.parquet"),
        ("train examples/arithmetic.toml --dry-run --write out.json", "only .toml is written; name it out.toml"),
        ("export run --to out.safetensors", "would be a folder with this name; name it out"),
    ],
)
def test_a_type_of_file_that_is_not_written_is_refused(places: dict[str, str], line: str, sentence: str) -> None:
    assert sentence in _refused(places, line)


@pytest.mark.parametrize("command", ["rescore run --reward ", "index run --embedding ", f"{DRY} workflow="])
def test_a_file_of_code(places: dict[str, str], command: str) -> None:
    sentences = {"{MODULE}": _A_FOLDER, "{ABSENT}.py": "no file", "{LONG}.py": _TOO_LONG, "{UNDER}.py": "no file"}
    for path, sentence in sentences.items():
        assert sentence in _refused(places, f"{command}{path}:f")


def test_a_data_set_or_a_model(places: dict[str, str]) -> None:
    refused = {
        f"{DRY} dataset={{ABSENT}}": "no such file or folder",
        f"{DRY} dataset={{FOLDER}}": "has no file for split 'train'",
        f"{DRY} dataset={{LONG}}": _TOO_LONG,
        f"{DRY} dataset={{BYTES}}": "line 1: byte 15 is no UTF-8: save the file as UTF-8",
        f"{DRY} dataset={{PARQUET}}": "bytes.parquet: ",
        f"{ARITHMETIC} --dry-run model={{ABSENT}}": "no such folder",
        f"{ARITHMETIC} --dry-run model={{FILE}}": "no such folder",
        f"{ARITHMETIC} --dry-run model={{FOLDER}}": "the folder lacks config.json",
        f"{ARITHMETIC} --dry-run model={{LONG}}": _TOO_LONG,
    }
    for line, sentence in refused.items():
        assert sentence in _refused(places, line)


def test_a_state_folder_that_cannot_be_made(places: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_STORE", str(Path(os.environ["MILLRACE_HOME"]) / "store"))
    monkeypatch.setenv("MILLRACE_HOME", places["UNDER"])
    for command in ("up", "eval run", "runs", f"{ARITHMETIC} --dry-run"):
        assert f"MILLRACE_HOME {places['UNDER']}: Not a directory" in _refused(places, command)
    monkeypatch.delenv("MILLRACE_STORE")
    monkeypatch.setenv("MILLRACE_HOME", places["FILE"])
    assert f"MILLRACE_HOME {places['FILE']}: Not a directory" in _refused(places, "runs")


def test_overrides_are_toml_values_and_bare_words() -> None:
    parsed = parse_overrides(["steps=5", "train.loss=cispo", "learning_rate=1e-3", "rollout.drop_uniform_groups=true"])
    assert parsed.pop("rollout.drop_uniform_groups") is True
    assert parsed == {"steps": 5, "train.loss": "cispo", "learning_rate": 1e-3}
    names = ["run=2026-11-27", "evaluation.split=7", 'model="1e5"', "dataset=1e5"]
    assert parse_overrides(names) == {"run": "2026-11-27", "evaluation.split": "7", "model": "1e5", "dataset": "1e5"}
    with pytest.raises(ValueError, match="key=value"):
        parse_overrides(["steps"])


def test_of_a_key_that_is_set_twice_the_last_value_holds() -> None:
    assert parse_overrides(["seed=1", "steps=4", "seed=2"]) == {"seed": 2, "steps": 4}


def test_bad_input_is_one_sentence_before_anything_starts(home: Path) -> None:
    refused = {
        "stepz=4": "did you mean 'steps'",
        "--steps 4": "no option --steps (-h lists them); settings are key=value",
        "=4": "'=4': write settings as key=value",
        "train..lr=4": "'train..lr=4': write settings as key=value",
        "train.shedule=linear": "did you mean 'train.schedule'",
        "n_samples=1 rollout.min_usable=1": "n_samples of 2 or more",
        "max_staleness=-1": "max_staleness = -1",
        "model=/nowhere": "no such folder",
        "workflow=examples.nothing:X": "cannot be imported",
        "workflow=examples.gsm8k:Gsm8k": "dataset must be set",
        "store=/dev/null/store": "cannot be opened (Not a directory); choose another `store`",
    }
    assert_refused(f"train {PROJECT}/examples/arithmetic.toml {{}}", refused)
    assert not (home / "store" / "runs").exists(), "nothing was created"


def test_a_count_that_cannot_be_is_refused_by_its_option(log: RunLog) -> None:
    for options in ("--num-tasks 0", "--n-samples 0", "--version -1", "--temperature -1"):
        assert "Invalid value" in printed(f"eval run {options}", status=2)
    options = "--reward rollouts.rewards.answers:exact --processes -1"
    assert "Invalid value" in printed(f"rescore run {options}", status=2)
    for what in ("promote run --max-gap nan", "produce run --patience nan", "traj export run --margin nan"):
        assert "greater than or equal to 0" in printed(what, status=2), what
    assert "should be a finite number" in printed("eval run --temperature inf", status=2)


def test_a_data_file_with_a_broken_line_names_the_line(home: Path) -> None:
    data = home / "data.jsonl"
    data.write_text('{"question": "1+1?", "answer": "#### 2"}\n{"question": "1+2?"}\n')
    shown = printed(f"train {PROJECT}/examples/gsm8k.toml dataset={data}", status=2)
    assert "line 2" in shown and "'answer' missing" in shown
