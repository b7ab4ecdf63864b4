"""Rollout workers that die or hang: the run goes on without them, or says who hangs and where."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil

from storage.object_store import LocalStore
from storage.run_log import RunLog
from storage.run_state import RunState
from tests.conftest import SCRIPTED, Home

STEPS = 30


def _state(home: Home, run: str) -> RunState:
    return RunLog(LocalStore(home.path / "store"), run).refresh()


def _process_of(home: Home, run: str, worker: str) -> psutil.Process:
    """The process whose output goes to a worker's log."""
    log = str(home.path / "logs" / run / f"{worker}.log")
    for process in psutil.process_iter():
        try:
            if os.readlink(f"/proc/{process.pid}/fd/1") == log and "ray" in process.name():
                return process
        except OSError:
            continue
    raise LookupError(f"no process of {worker}")


def _wait_for_shards(home: Home, run: str, process: subprocess.Popen[str], producers: set[str]) -> None:
    deadline = time.monotonic() + 240
    while not producers <= {shard.producer for shard in _state(home, run).shards.values()}:
        assert process.poll() is None and time.monotonic() < deadline, home.worker_logs()
        time.sleep(0.02)


def test_a_killed_worker_is_replaced_and_changes_nothing(home: Home, base_model: Path) -> None:
    arguments = ["train", str(SCRIPTED), f"model={base_model}", f"steps={STEPS}", "evaluation.every=0"]
    home.run(*arguments, "run=alone")
    # Prompts wait for each other here, so that both workers get some.
    crowd = [*arguments, "run=crowd", "rollout.num_workers=2", "rollout.max_concurrent=2"]
    process = home.start(*crowd)
    _wait_for_shards(home, "crowd", process, {"rollout-0", "rollout-1"})
    before = set(_state(home, "crowd").groups)
    _process_of(home, "crowd", "rollout-1").send_signal(signal.SIGKILL)
    assert process.wait(timeout=300) == 0, home.worker_logs()
    state, alone = _state(home, "crowd"), _state(home, "alone")
    assert state.step == STEPS and state.positions == set(range(4 * STEPS)) and not state.leased
    assert before <= state.groups.keys(), "a committed group was lost"
    assert (home.path / "logs" / "crowd" / "rollout-2.log").exists()
    assert state.live is not None and alone.live is not None
    assert state.live.weights_sha256 == alone.live.weights_sha256


def test_attempts_that_never_come_back_end_by_their_own_deadline(home: Home, base_model: Path) -> None:
    stuck = ["workflow=tests.chaos.stuck:Waits", "rollout.attempt_timeout=0.5", "rollout.max_attempts=1"]
    done = home.run(
        "train", str(SCRIPTED), f"model={base_model}", "evaluation.every=0", "rollout.retries=0", *stuck, check=False
    )
    assert done.returncode == 2
    assert "step 1 has nothing to train" in done.stderr and "16 timeout" in done.stderr


def test_a_worker_whose_loop_hangs_ends_the_run_with_a_report(home: Home, base_model: Path) -> None:
    stuck = ["workflow=tests.chaos.stuck:Blocks", "rollout.attempt_timeout=4", "rollout.stall_timeout=5"]
    done = home.run("train", str(SCRIPTED), f"model={base_model}", "evaluation.every=0", *stuck, check=False)
    assert done.returncode == 2
    assert "no progress for" in done.stderr and "0 of 4 groups are ready for step 1" in done.stderr
    assert "rollout-0 does not answer: see the stacks in its log" in done.stderr
