"""kill -9 of the whole process group, again and again, and the run goes on as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from storage.log.run_log import RunLog
from storage.log.run_state import RunState
from storage.objects.object_store import LocalStore
from tests.conftest import SCRIPTED, Home

KILLS = 40 if os.environ.get("MILLRACE_CHAOS_FAULTS") else 3  # `make chaos`; test_faults.py kills as often again
STEPS = 4 * KILLS  # more than so many lives last


def _state(home: Home, run: str) -> RunState:
    """The fold of the log as it stands; `refresh` checks the conservation law."""
    log = RunLog(LocalStore(home.path / "store"), run)
    return log.refresh()


def _kill_after_entries(home: Home, process: subprocess.Popen[str], run: str, entries: int, moment: float) -> bool:
    """Kill the group `moment` seconds after the log reaches `entries`; False when the run ended before."""
    deadline = time.monotonic() + 240
    while _state(home, run).entries < entries:
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline, f"no progress: {_state(home, run).counters()}\n{home.worker_logs()}"
        time.sleep(0.02)
    time.sleep(moment)  # the random moment itself
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return True


@pytest.mark.timeout(1800)
def test_kill_after_kill_loses_nothing_and_changes_nothing(home: Home, base_model: Path) -> None:
    arguments = ["train", str(SCRIPTED), f"model={base_model}", f"steps={STEPS}", "evaluation.every=0"]
    home.run(*arguments, "run=undisturbed")
    draw = random.Random(7)
    committed: set[str] = set()
    kills = 0
    for _ in range(KILLS):
        process = home.start(*arguments, "run=killed")
        target = _state(home, "killed").entries + draw.randint(1, 5)
        kills += _kill_after_entries(home, process, "killed", target, draw.uniform(0, 0.3))
        state = _state(home, "killed")
        assert committed <= state.groups.keys(), "a committed group was lost"
        committed = set(state.groups)
        assert state.step <= STEPS
    assert kills == KILLS, home.worker_logs()
    home.run(*arguments, "run=killed")
    killed, undisturbed = _state(home, "killed"), _state(home, "undisturbed")
    assert killed.step == STEPS and killed.positions == set(range(4 * STEPS)), "a prompt was skipped"
    prompts = [killed.groups[g.group_id].prompt_id for step in killed.steps for g in step.claim.trained]
    assert len(prompts) == len(set(prompts)) == 4 * STEPS, "a prompt was trained twice"
    assert killed.live is not None and undisturbed.live is not None
    made = {step.policy.weights_sha256 for step in undisturbed.steps}
    assert len(made) == STEPS, "steps that leave the weights alone would compare equal whatever happened"
    assert killed.live.weights_sha256 == undisturbed.live.weights_sha256


@pytest.mark.slow
def test_a_stopped_run_leaves_no_process_and_goes_on_as_if_nothing_had_happened(home: Home, base_model: Path) -> None:
    arguments = ["train", str(SCRIPTED), f"model={base_model}", "evaluation.every=0"]
    home.run(*arguments, "run=whole", "steps=8")
    process = home.start(*arguments, "run=stopped", "steps=4000")
    home.wait(process, lambda: _state(home, "stopped").step >= 3)
    children = psutil.Process(process.pid).children(recursive=True)
    stopped = home.run("stop", "stopped")
    assert process.wait(timeout=30) == 130
    _, alive = psutil.wait_procs(children, timeout=180)
    assert not alive, f"`millrace stop` left {alive}"
    state = _state(home, "stopped")
    assert f"run stopped has stopped at step {state.step}" in stopped.stdout
    assert home.run("stop", "stopped", check=False).returncode == 2
    home.run(*arguments, "run=stopped", f"steps={state.step + 2}")
    assert _state(home, "stopped").step == state.step + 2
    whole = _state(home, "whole").steps[:8]
    same = [step.policy.weights_sha256 for step in _state(home, "stopped").steps[:8]]
    assert same == [step.policy.weights_sha256 for step in whole][: len(same)]
