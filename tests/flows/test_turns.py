"""Whole runs in which engine and trainer take turns: the same policies, whatever dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from storage.log.run_log import RunLog
from storage.log.runs import open_run
from storage.objects.object_store import LocalStore
from tests.conftest import PROJECT, SCRIPTED, Home

pytestmark = pytest.mark.server


def _start(home: Home, *arguments: str) -> subprocess.Popen[str]:
    log = open(home.path / "output.txt", "a")  # noqa: SIM115 - the child keeps it
    return subprocess.Popen(
        [sys.executable, "-m", "tests.flows.in_turns", "train", str(SCRIPTED), *arguments],
        env={**home.environment, "PYTHONPATH": str(PROJECT)},
        stdout=log,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        cwd=PROJECT,
    )


def _policies(log: RunLog) -> list[str]:
    return [step.policy.weights_sha256 for step in log.state.steps]


def _assert_same(home: Home, finished: Home) -> None:
    log = open_run(LocalStore(home.path / "store"), "scripted")
    other = open_run(LocalStore(finished.path / "store"), "scripted")
    assert _policies(log) == _policies(other) and log.state.positions == other.state.positions
    assert [each.score for each in log.state.evaluations] == [each.score for each in other.state.evaluations]
    changes = ("sleep_seconds", "take_device_seconds", "leave_device_seconds", "wake_seconds")
    assert all(name in log.state.steps[-1].metrics for name in changes)
    assert not any(name in other.state.steps[-1].metrics for name in changes)


def test_a_run_in_turns_makes_the_policies_of_one_without(home: Home, finished: Home, base_model: Path) -> None:
    process = _start(home, f"model={base_model}")
    assert process.wait(timeout=600) == 0, home.said()
    _assert_same(home, finished)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["trainer-0", "rollout-0"])
def test_a_death_between_turns_costs_nothing(home: Home, finished: Home, base_model: Path, victim: str) -> None:
    process = _start(home, f"model={base_model}")
    log = RunLog(LocalStore(home.path / "store"), "scripted")
    home.wait(process, lambda: (home.path / "store/runs/scripted").exists() and log.refresh().step >= 2)
    os.kill(home.process_of("scripted", victim).pid, 9)
    assert process.wait(timeout=600) == 0, home.said()
    assert "another" in (home.path / "output.txt").read_text()
    _assert_same(home, finished)
