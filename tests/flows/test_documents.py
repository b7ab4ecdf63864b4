"""The documents' commands as they stand: a newcomer's from top to bottom, the others on a run that has finished."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from cli.main import app
from storage.log.runs import open_run
from storage.objects.object_store import LocalStore
from tests.conftest import SCRIPTED, Home
from tests.documents import PROJECT, QUICK_START, README, TUTORIAL, about_a_run, block, shown, tutorial_files
from tests.prefect_api import ask

RUN = "scripted"
ATTEMPTS = "select group_id || '/' || sample_idx as trajectory_id from trajectories where not is_eval"
BIN = Path(sys.executable).parent
PATIENCE = 240.0


def _wait(what: Callable[[], bool], said: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline, said()
        time.sleep(0.1)


class Checkout:
    """A copy of this project with this .venv, whose two trainings are small and scripted; commands are typed in it."""

    def __init__(self, folder: Path, model: Path) -> None:
        names = [path.name for path in PROJECT.iterdir() if not path.name.startswith(".")]
        folder.mkdir()
        for name in names:
            if (PROJECT / name).is_dir():
                shutil.copytree(PROJECT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
            else:
                shutil.copy2(PROJECT / name, folder / name)
        (folder / ".venv").symlink_to(BIN.parent)
        small = SCRIPTED.read_text().replace('run = "scripted"', f'run = "arithmetic"\nmodel = "{model}"')
        (folder / "examples/arithmetic.toml").write_text(small.replace("steps = 6", "steps = 14"))
        deployments = yaml.safe_load((folder / "prefect.yaml").read_text())
        deployments["deployments"][0]["parameters"] = {
            "workflow": "tests.flows.guesses:Guesses",
            "run": "arithmetic-deployed",
            "model": str(model),
            "batch_size": 4,
            "n_samples": 4,
            "settings": {
                "sampling": {"max_tokens": 8},
                "evaluation": {"num_tasks": 8, "every": 0},
                "engine": {"kind": "scripted", "max_model_len": 64},
            },
        }
        (folder / "prefect.yaml").write_text(yaml.safe_dump(deployments))
        self.folder = folder
        self._started: list[subprocess.Popen[str]] = []
        self.environment = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "1000"}
        of_make = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ARGS", "RUNFILE")  # of the `make test` that runs us
        for name in ("MILLRACE_HOME", "MILLRACE_STORE", "MILLRACE_TRACKING", "PREFECT_API_URL", *of_make):
            self.environment.pop(name, None)
        self.environment["PATH"] = f"{BIN}:{os.environ['PATH']}"

    def type(self, line: str) -> str:
        """What a command says, whose end is good; an `export` is for those after it."""
        if line.startswith("export "):
            done = self._done(f"{line}; env -0")
            self.environment |= dict(row.partition("=")[::2] for row in done.split("\0") if row)
            return ""
        return self._done(line)

    def start(self, line: str, **variables: str) -> subprocess.Popen[str]:
        """A command that is still running."""
        started = subprocess.Popen(
            ["bash", "-c", f"exec {line}"],
            cwd=self.folder,
            env={**self.environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._started.append(started)
        return started

    def close(self) -> None:
        """End what a failed test has left running."""
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if (self.folder / ".millrace/services.json").exists():
            self.type("make down")

    def step(self, run: str) -> int:
        """Steps that a run has taken."""
        return open_run(LocalStore(self.folder / ".millrace/store"), run).state.step

    def logs(self) -> str:
        """The end of every log file."""
        return "\n".join(file.read_text()[-2000:] for file in (self.folder / ".millrace/logs").rglob("*.log"))

    def _done(self, line: str) -> str:
        where: dict[str, Any] = {"cwd": self.folder, "env": self.environment, "timeout": PATIENCE}
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, **where)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}\n{self.logs()}"
        return done.stdout


@pytest.fixture
def checkout(tmp_path: Path, base_model: Path) -> Iterator[Checkout]:
    checkout = Checkout(tmp_path / "millrace", base_model)
    yield checkout
    checkout.close()


@pytest.mark.timeout(1200)
def test_the_quick_start_of_readme_works_from_top_to_bottom(checkout: Checkout, prefect_api: str) -> None:
    """Typed as it stands, in a checkout whose example is small: what is long is the learning, `tests/learning` has it.

    All blocks but the last report to a server that is there already, which spares every command one of its own.
    """
    learn, test, look, deploy = [[line for line in block(*place) if line.strip()] for place in QUICK_START]
    checkout.environment["PREFECT_API_URL"] = prefect_api

    assert all(target in checkout.type("make") for target in ("train", "chaos", "audit"))
    (train,) = learn
    said = checkout.type(train)
    shown_next = re.findall(r"^  ((?:\.venv/bin/|make).*)$", README.read_text(), flags=re.MULTILINE)
    # Here `millrace` is found by its name alone.
    assert [line.split("#")[0].strip().removeprefix(".venv/bin/") for line in shown_next] == [
        line.split("#")[0].strip() for line in said[said.index("next:\n") :].splitlines()[1:] if line.strip()
    ]
    only = "tests/unit/storage/objects/test_digests.py -n0"  # as `make` lists it
    with patch.dict(checkout.environment, {"ARGS": only, "QUICK": ""}):
        assert all("passed" in checkout.type(line) for line in test)
    checkout.type("python -m benchmarks.learning_curve arithmetic docs/arithmetic.png")

    checkout.type("millrace promote arithmetic --version 3")  # a champion to go back to
    for line in look:
        if line.startswith(".venv/bin/millrace exporter"):
            _serves_its_numbers(checkout, line)
        elif line.startswith(".venv/bin/millrace pause"):
            # The next three are about a training: `make train` goes on with the same run.
            endless = checkout.start("make train >training.txt", ARGS="steps=1000000")
            _wait(lambda: checkout.step("arithmetic") > 14, lambda: checkout.type("cat training.txt"))
            checkout.type(line)
        else:
            checkout.type(line)
    assert endless.wait(timeout=PATIENCE) is not None and checkout.step("arithmetic") > 14
    assert (checkout.folder / "out/model.safetensors").exists()

    del checkout.environment["PREFECT_API_URL"]
    for line in deploy:
        if line.startswith("make down"):
            _everything_has_completed(checkout)
            _pools_take_their_templates(checkout)
        said = checkout.type(line)
        if line.startswith("make up"):
            # Where the usual port is taken, `make up` says another one.
            address = said.split("PREFECT_API_URL=")[1].split()[0]
            deploy[1] = deploy[1].replace("http://127.0.0.1:4200/api", address)
    assert checkout.step("my-run") == 20 and not (checkout.folder / ".millrace/services.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_tutorial_works_from_top_to_bottom(tmp_path: Path, prefect_api: str) -> None:
    """Typed as it stands, beginning in a checkout. The engine is scripted, so nothing is learnt."""
    checkout, files, letters = [tmp_path / name for name in ("millrace", "files", "letters")]
    checkout.mkdir()
    files.mkdir()
    (checkout / ".venv").symlink_to(BIN.parent)
    for name, text in tutorial_files().items():
        text = text.replace("[engine]\n", '[engine]\nkind = "scripted"\n')
        (files / name).write_text(text.replace("[warmup]\n", "[warmup]\nnum_steps = 2\n"))
    lines = shown(TUTORIAL, sentences=False)
    enter = lines.index("cd ../letters") + 1
    script = "\n".join(["set -ex", *lines[:enter], f"cp {files}/* .", *lines[enter:]])
    environment = {**os.environ, "PREFECT_API_URL": prefect_api, "PYTHONPATH": str(PROJECT), "COLUMNS": "1000"}
    for name in ("MILLRACE_HOME", "MILLRACE_STORE", "MILLRACE_TRACKING"):
        environment.pop(name, None)
    done = subprocess.run(["bash", "-c", script], cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    steps = {run: open_run(LocalStore(letters / ".millrace/store"), run).state.step for run in ("letters", "two-tries")}
    assert steps == {"letters": 30, "two-tries": 30} and (letters / "letters.png").exists()


def _serves_its_numbers(checkout: Checkout, line: str) -> None:
    with socket.socket() as probe:
        taken = probe.connect_ex(("127.0.0.1", 9464)) == 0
    exporter = checkout.start(line.split("#")[0] + (" --port 0" if taken else ""))
    assert exporter.stdout is not None
    address = re.search(r"http://[^ ]+/metrics", first := exporter.stdout.readline())
    assert address is not None, first
    assert 'run="arithmetic"' in httpx.get(address[0], timeout=60).text
    exporter.send_signal(signal.SIGINT)
    assert exporter.wait(timeout=30) == 0


def _everything_has_completed(checkout: Checkout) -> None:
    """Two of the block's three flow runs are not watched."""
    flow_runs = f"{checkout.environment['PREFECT_API_URL']}/flow_runs/filter"

    def states() -> dict[str, str]:
        rows = ask("POST", flow_runs, {})
        return {row["deployment_id"]: row["state"]["type"] for row in rows if row["deployment_id"]}

    _wait(lambda: set(states().values()) <= {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}, checkout.logs)
    assert list(states().values()) == ["COMPLETED"] * 3, f"{states()}\n{checkout.logs()}"


def _pools_take_their_templates(checkout: Checkout) -> None:
    """Pools of containers are made on any server; what they start needs Docker or Kubernetes."""
    lines = [line for line in shown(PROJECT / "docs/deployment.md") if "work-pool create" in line]
    assert len(lines) == 2
    for line in lines:
        checkout.type(line.removeprefix("docker-worker/bin/"))


@pytest.fixture
def copy(finished: Home, tmp_path: Path) -> Iterator[Path]:
    """A copy of the finished run's state folder, which commands in this process use; they set variables themselves."""
    folder = tmp_path / "home"
    shutil.copytree(finished.path, folder)
    with patch.dict(os.environ, {**finished.environment, "MILLRACE_HOME": str(folder)}):
        yield folder


def _stands_for(copy: Path) -> dict[str, str]:
    """This run's names in place of the documents'."""
    state = open_run(LocalStore(copy / "store"), RUN).state
    embedding = copy / "embed.py"
    embedding.write_text("def embed(texts):\n    return [[float(len(text)), 1.0] for text in texts]\n")
    ids = [attempt["trajectory_id"] for attempt in json.loads(_run(["traj", "sql", RUN, ATTEMPTS, "--json"]))]
    examples = [tomllib.loads(path.read_text()).get("run", "RUN") for path in PROJECT.glob("examples/**/*.toml")]
    return {
        **dict.fromkeys([*examples, "letters", "my-run", "two-tries", "RUN"], RUN),
        "arithmetic@rollout": f"{RUN}@rollout",
        "MODEL@rollout": f"{RUN}@rollout",
        "ID": ids[0],
        "ID_A": ids[0],
        "ID_B": ids[1],
        "PROMPT_ID": next(iter(state.groups.values())).prompt_id,
        "13": "5",
        "14": "6",
        "12": "5",
        "20": "6",
        "8": "5",
        "my/file.py:f": "rollouts.rewards.answers:exact",
        "f": "exact",
        "my/embed.py:embed": f"{embedding}:embed",
        "pairs.parquet": str(copy / "pairs.parquet"),
    }


def test_every_command_about_a_run_works_on_a_finished_one(copy: Path) -> None:
    """In the documents' order."""
    asked, stands_for = about_a_run(on_workers=False), _stands_for(copy)
    assert len(asked) > 50
    _run(["promote", RUN, "--version", "3"])  # there is something to roll back to
    for number, words in enumerate(asked):
        stands_for["out"] = str(copy / f"out-{number}")
        words = words + ["--dry-run"] if words[1] == "gc" and "--dry-run" not in words else words  # later ones read all
        _run([stands_for.get(word, word) for word in words[1:]])


@pytest.mark.slow
def test_what_the_documents_do_with_workers_works_on_a_finished_run(copy: Path, finished: Home) -> None:
    """Replays and a rollout; each is a process of its own, as it is for a reader."""
    asked, stands_for = about_a_run(on_workers=True), _stands_for(copy)
    assert len(asked) > 5
    _run(["rescore", RUN, "--reward", "rollouts.rewards.answers:exact"])  # `--rewards` reads them
    home = Home(copy, finished.environment["PREFECT_API_URL"])
    stands_for["out"] = str(copy / "out")
    for words in dict.fromkeys(tuple(stands_for.get(word, word) for word in words[1:]) for words in asked):
        home.run(*words)


def _run(words: list[str]) -> str:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, f"millrace {' '.join(words)}: {done.output}\n{done.exception!r}"
    return done.output
