"""The real engine: versions, logprobs, swaps under running requests; and a whole run on it, killed once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from storage.log.entries import Alias
from storage.log.run_log import RunLog
from storage.objects.object_store import LocalStore
from tests.conftest import PROJECT, Home
from tests.engine.processes import run_checks

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

ARITHMETIC = PROJECT / "examples" / "arithmetic.toml"


def _aliases(log: RunLog) -> list[Alias]:
    return [entry.body for entry in log.entries if isinstance(entry.body, Alias)]


def test_engine_in_a_process_of_its_own(base_model: Path, tmp_path: Path) -> None:
    run_checks("tests.engine.check_engine", base_model, tmp_path)


@pytest.mark.slow
def test_a_run_whose_trainer_broadcasts_its_policies(home: Home, base_model: Path) -> None:
    arguments = ["train", str(ARITHMETIC), f"model={base_model}", "steps=3", "batch_size=8", "evaluation.every=0"]
    done = home.run(*arguments, "engine.weight_transfer=gloo", "rollout.num_workers=2")
    log = RunLog(LocalStore(home.path / "store"), "arithmetic")
    log.refresh()
    transfers = {alias.version: alias.transfer for alias in _aliases(log)}
    assert transfers == {0: "", 1: "gloo", 2: "gloo", 3: "gloo"}
    assert "broadcast" not in done.stdout, "no failure was said"


def test_a_killed_run_continues_on_the_real_engine_and_leaves_no_process(home: Home, base_model: Path) -> None:
    arguments = ["train", str(ARITHMETIC), f"model={base_model}", "steps=4", "batch_size=8", "evaluation.num_tasks=16"]
    arguments += ["train.checkpoint_every=2", "evaluation.every=2", "max_staleness=0", "engine.weight_transfer=gloo"]
    process = home.start(*arguments)
    log = RunLog(LocalStore(home.path / "store"), "arithmetic")
    home.wait(process, lambda: log.refresh().step >= 1 and bool(log.state.evaluations))
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE], f"left behind: {alive}"
    committed = set(log.refresh().groups)
    home.run(*arguments)
    state = log.refresh()
    assert committed <= state.groups.keys()
    assert state.step == 4 and state.positions == set(range(32))
    assert [evaluation.version for evaluation in state.evaluations] == [0, 2, 4]
    # The policy that an engine starts with is read from the store.
    assert {alias.transfer for alias in _aliases(log) if alias.version} >= {"gloo"}
    # The engine computes what the trainer computes: the gap is rounding, not another policy.
    assert all(step.metrics["engine_gap"] <= 1e-4 for step in state.steps)
