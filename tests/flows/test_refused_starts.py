"""A start that is refused prints its sentence and nothing else: no traceback, no word of a library, no progress."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest

from storage.log.runs import trainer_lock
from storage.objects.object_store import LocalStore
from tests.builders import a_log
from tests.conftest import MILLRACE, PROJECT, SCRIPTED

NOBODY = "http://127.0.0.1:9"
AWS = {"AWS_ENDPOINT_URL": NOBODY, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_MAX_ATTEMPTS": "1"}

REFUSED = {  # what is wrong: arguments, environment, the sentence; @ is the test's folder
    "a key": ("train.lrr=1", {}, ".*train.lrr: no such key; did you mean 'learning_rate'[?]"),
    "a value": ("steps=many", {}, ".*steps = 'many': Input should be a valid integer, unable to parse.*"),
    "no number": ("learning_rate=nan", {}, ".*learning_rate = nan: NaN cannot be set; write a number"),
    "the name": ("run=a/b", {}, "run = 'a/b': use letters, digits, dot, dash and underscore, at most 100"),
    "no run file": ("nowhere.toml", {}, "no run file nowhere.toml; did you mean broken.toml[?]"),
    "no TOML": ("@/broken.toml", {}, "@/broken.toml is not valid TOML: Invalid value [(]at line 1, column 9[)]"),
    "no model": ("model=@/none", {}, "model = '@/none': no such folder or GGUF file, and not a Hugging Face id.*"),
    "half a model": ("model=@/half", {}, "model = '@/half': the folder lacks tokenizer_config.json, tokenizer.json"),
    "no data": ("workflow=examples.gsm8k:Gsm8k dataset=@/none", {}, "dataset = '@/none': no such file or folder,.*"),
    "no workflow": ("workflow=examples.nope:X", {}, "'examples.nope:X' cannot be imported: No module named.*"),
    "Python": ("workflow=@/flow.py:X", {}, "'@/flow.py:X' cannot be imported: invalid syntax in @/flow.py, line 1"),
    "the store": ("store=/dev/null/x", {}, "store /dev/null/x cannot be opened [(]Not a directory[)].*"),
    "no server": (
        "store=s3://none/x",
        AWS,
        "store s3://none/x: .*; no server has answered there: check the endpoint .*",
    ),
    "no Prefect": ("", {"PREFECT_API_URL": f"{NOBODY}/api"}, f"Prefect at {NOBODY}/api does not answer .*"),
    "a newer Prefect": ("", {"MILLRACE_HOME": "@/newer"}, "Prefect's database is of a newer Prefect than .*"),
    "no Ray": ("", {"RAY_ADDRESS": "127.0.0.1:9"}, "RAY_ADDRESS = '127.0.0.1:9': no Ray cluster answers: .*"),
    "it is trained": ("store=@/store run=busy steps=1", {}, "run 'busy' is being trained by process .*"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("refused")
    (folder / "broken.toml").write_text("steps = \n")
    (folder / "flow.py").write_text("def f(:\n")
    (folder / "half").mkdir()
    shutil.copy(base_model / "config.json", folder / "half")
    (folder / "newer" / "prefect").mkdir(parents=True)
    with sqlite3.connect(folder / "newer" / "prefect" / "prefect.db") as database:
        database.execute("create table alembic_version (version_num text)")
        database.execute("insert into alembic_version values ('abc')")
    return folder


def _slow_but(fast: set[str]) -> list[Any]:
    return [pytest.param(wrong, marks=[] if wrong in fast else pytest.mark.slow) for wrong in REFUSED]


@pytest.mark.server
@pytest.mark.parametrize("wrong", _slow_but({"a key", "no model", "no Prefect", "it is trained"}))
def test_a_refused_start_prints_its_sentence_and_nothing_else(wrong: str, folder: Path, base_model: Path) -> None:
    words, variables, sentence = REFUSED[wrong]
    given = [word.replace("@", str(folder)) for word in words.split()]
    files = [] if given and given[0].endswith(".toml") else [str(SCRIPTED), f"model={base_model}"]
    unset = ("PREFECT_API_URL", "MILLRACE_STORE", "MILLRACE_TRACKING", "RAY_ADDRESS")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"PYTHONPATH": str(PROJECT), "MILLRACE_HOME": str(folder / "home"), "COLUMNS": "80"}
    environment |= {name: value.replace("@", str(folder)) for name, value in variables.items()}
    with trainer_lock(a_log(LocalStore(folder / "store"), run_id="busy")):
        done = subprocess.run(
            [str(MILLRACE), "train", *files, *given],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert (done.returncode, done.stdout) == (2, ""), done.stdout + done.stderr
    pattern = rf"error: {sentence.replace('@', re.escape(str(folder)))}\n"
    of_a_run_file = re.sub(r"^error: \S+\.toml:\n  ", "error: ", done.stderr)  # its keys are a list, one a line
    of_a_store = re.sub(r"^store \S+ does not answer, and is asked again: .*\n", "", of_a_run_file)
    assert re.fullmatch(pattern, of_a_store), done.stderr


@pytest.mark.server
@pytest.mark.parametrize("words", ["eval nowhere", "replay nowhere --step 1"])
def test_so_does_a_command_for_a_run_that_is_not_there_in_a_folder_without_any(words: str, tmp_path: Path) -> None:
    unset = ("MILLRACE_STORE", "MILLRACE_HOME", "PREFECT_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"PYTHONPATH": str(PROJECT)}
    command = [str(MILLRACE), *words.split()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    sentence = f"error: no run 'nowhere' in {tmp_path.as_uri()}/.millrace/store; runs there: none yet\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", sentence)
    assert not list(tmp_path.iterdir())
