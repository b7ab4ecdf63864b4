"""What `make` installs, and when: its real rules on locks of a few rows, with a `pip` that only notes its calls."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
echo "$(basename "$0") $*" >>calls
case "$*" in *"$(cat broken 2>/dev/null || echo nothing)"*) echo "ERROR: no such wheel" >&2; exit 1 ;; esac
"""


class Checkout:
    """A folder with the Makefile, locks and a .venv whose programs write down how they are called."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "requirements").mkdir()
        for name in ("Makefile", "pyproject.toml"):
            shutil.copy(PROJECT / name, path)
        for device in ("cpu", "gpu"):
            (path / f"requirements/{device}.lock").write_text("torch==2\nray==3\n")
            (path / f"requirements/{device}-test.lock").write_text("moto==1\n")
        self.packages = path / ".venv/lib/python3.11/site-packages"
        self.packages.mkdir(parents=True)
        (path / ".venv/bin").mkdir()
        for program in ("python", "millrace", "ruff", "mypy"):
            (path / ".venv/bin" / program).write_text(PYTHON)
            (path / ".venv/bin" / program).chmod(0o755)

    def make(self, *words: str) -> tuple[list[str], str]:
        """What was called, without the options of pip, and what was printed to stderr."""
        (self.path / "calls").unlink(missing_ok=True)
        environment = {"PATH": os.environ["PATH"], "MILLRACE_DEVICE": "cpu"}
        done = subprocess.run(["make", *words], cwd=self.path, env=environment, capture_output=True, text=True)
        calls = (self.path / "calls").read_text().splitlines()
        shown = [call.split(" off ")[-1] for call in calls if "pip --version" not in call]
        return [call.removeprefix("python -m ") for call in shown], done.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


RUNS = ["-r requirements/cpu.lock", "--no-build-isolation -e ."]
TESTS = "-r requirements/cpu-test.lock"
TRAIN = "millrace train examples/arithmetic.toml"


def test_training_installs_what_users_need_and_tests_add_theirs_once(checkout: Checkout) -> None:
    assert checkout.make("train") == ([*RUNS, TRAIN], "")
    assert checkout.make("train") == ([TRAIN], "")
    assert checkout.make("lint") == ([TESTS, "ruff check .", "mypy "], "")
    for target in ("quick", "test", "test-all", "chaos"):
        (call,), _ = checkout.make(target)
        assert call.startswith("pytest"), target
    (checkout.path / ".venv/.installed-test").unlink()
    assert checkout.make("test")[0][0] == TESTS


def test_an_install_of_tests_that_stopped_is_continued_and_its_halves_are_removed(checkout: Checkout) -> None:
    (checkout.path / "broken").write_text("cpu-test.lock")
    calls, said = checkout.make("test")
    assert calls == [*RUNS, TESTS] and said.startswith("ERROR: no such wheel\nInstalling stopped here; the whole log")
    assert checkout.make("train") == ([TRAIN], ""), "runs do not wait for it"
    (checkout.path / "broken").unlink()
    for name, files in {"whole-1": ["RECORD", "INSTALLER"], "half-1": ["METADATA"]}.items():
        (checkout.packages / f"{name}.dist-info").mkdir()
        for file in files:
            (checkout.packages / f"{name}.dist-info" / file).touch()
    calls, _ = checkout.make("test")
    assert calls[0] == TESTS and calls[1].startswith("pytest")
    assert [path.name for path in checkout.packages.iterdir()] == ["whole-1.dist-info"]


@pytest.mark.parametrize(
    ("changed", "again"),
    [
        ("requirements/cpu.lock", [*RUNS, TESTS]),
        ("requirements/cpu-test.lock", [TESTS]),
        ("pyproject.toml", [*RUNS, TESTS]),
    ],
)
def test_what_changed_is_installed_again(checkout: Checkout, changed: str, again: list[str]) -> None:
    checkout.make("lint")
    for stamp in (".installed", ".installed-test"):
        os.utime(checkout.path / ".venv" / stamp, (1e9, 1e9))
    for name in ("requirements/cpu.lock", "requirements/cpu-test.lock", "pyproject.toml"):
        os.utime(checkout.path / name, (2e9, 2e9) if name == changed else (9e8, 9e8))
    assert checkout.make("lint")[0][:-2] == again


def test_what_the_tests_add_is_no_package_of_a_run() -> None:
    for device in ("cpu", "gpu"):
        runs, tests = (
            {
                row.split("==")[0]
                for row in (PROJECT / f"requirements/{name}.lock").read_text().splitlines()
                if "==" in row
            }
            for name in (device, f"{device}-test")
        )
        assert not runs & tests
        assert {"torch", "ray", "prefect", "mlflow", "plotly"} <= runs
        assert {"moto", "mypy", "trl", "verifiers", "kubernetes-validate", "pytest", "ruff", "wandb"} <= tests
