"""Evaluations through the real command: beside a training, killed in the middle, and without one attempt that works."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.log_entries import Evaluation, Step
from storage.object_store import LocalStore
from storage.records import NOT_SAMPLED
from storage.run_log import RunLog
from storage.runs import open_run
from storage.shards import read_shard
from tests.conftest import SCRIPTED, Home
from tests.flows.meetings import GO

PATIENCE = 200.0  # seconds


def _log(home: Home) -> RunLog:
    return open_run(LocalStore(home.path / "store"), "scripted")


def _wait(home: Home, process: subprocess.Popen[str], met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not met():
        assert process.poll() is None and time.monotonic() < deadline, home.worker_logs()
        time.sleep(0.05)


def _versions(log: RunLog, evaluation: Evaluation) -> set[int]:
    """Policies that sampled the tokens of an evaluation."""
    rows = [read_shard(log, log.state.shards[shard_id]).to_pylist() for shard_id in evaluation.shard_ids]
    return {v for shard in rows for row in shard for v in row["weight_versions"]} - {NOT_SAMPLED}


def test_training_goes_on_while_another_process_evaluates_an_older_policy(home: Home, base_model: Path) -> None:
    """Each waits for the other: the steps from 3 on for the evaluation to begin, and that for step 5."""
    changes = ["workflow=tests.flows.meetings:Meeting", "evaluation.every=0", "rollout.attempt_timeout=120"]
    training = home.start("train", str(SCRIPTED), f"model={base_model}", *changes)
    _wait(home, training, lambda: (home.path / "store/runs/scripted/run.json").exists())
    _wait(home, training, lambda: _log(home).state.live is not None)
    asked = ["--version", "0", "--n-samples", "2", "--temperature", "1"]
    found = json.loads(home.run("eval", "scripted", *asked, "--json").stdout)
    assert training.wait(timeout=PATIENCE) == 0, (home.path / "output.txt").read_text() + home.worker_logs()
    log = _log(home)
    [evaluation] = log.state.evaluations
    assert log.state.step == 6 and log.state.counters()["failed"] == 0
    assert (evaluation.version, evaluation.num_tasks, evaluation.num_failed) == (0, 8, 0)
    assert _versions(log, evaluation) == {0}
    kinds = [entry.body for entry in log.entries if isinstance(entry.body, Step | Evaluation)]
    assert kinds.index(evaluation) >= 5, "five steps were taken before it ended"
    assert found["score"] == evaluation.score and found["pass_at"] == evaluation.pass_at
    assert set(found["pass_at"]) == {"1", "2"} and found["run"] == "scripted"


@pytest.fixture
def trained(home: Home, base_model: Path, request: pytest.FixtureRequest) -> Home:
    """A run of one step, not evaluated, with small shards, on a workflow of `tests.flows.meetings`."""
    changes = ["steps=1", "evaluation.every=0", "evaluation.num_tasks=200", "rollout.shard_bytes=1024"]
    home.run("train", str(SCRIPTED), f"model={base_model}", f"workflow=tests.flows.meetings:{request.param}", *changes)
    return home


@pytest.mark.parametrize("trained", ["Paused"], indirect=True)
def test_a_killed_evaluation_leaves_no_score_and_the_next_one_is_whole(trained: Home) -> None:
    evaluating = trained.start("eval", "scripted")
    _wait(trained, evaluating, lambda: any(shard.is_eval for shard in _log(trained).state.shards.values()))
    os.killpg(evaluating.pid, signal.SIGKILL)
    evaluating.wait(timeout=60)
    state = _log(trained).state
    left = {shard.id for shard in state.shards.values() if shard.is_eval}
    assert left and not state.evaluations and trained.status("scripted")["accuracy_after"] is None
    (trained.path / GO).touch()
    shown = trained.run("eval", "scripted").stdout
    log = _log(trained)
    [evaluation] = log.state.evaluations
    assert evaluation.num_tasks == 200 and evaluation.num_shards > 3 and left.isdisjoint(evaluation.shard_ids)
    groups = [group.id for shard_id in evaluation.shard_ids for group in log.state.shards[shard_id].groups]
    assert len(groups) == len(set(groups)) == 200 and _versions(log, evaluation) == {1}
    assert f"policy 1 of run scripted, split 'test': held-out {evaluation.score:.3f} ±" in shown
    assert log.state.counters()["submitted"] == log.state.counters()["trained"] == 4


@pytest.mark.parametrize("trained", ["Broken"], indirect=True)
def test_an_evaluation_in_which_every_attempt_fails_is_an_error(trained: Home) -> None:
    done = trained.run("eval", "scripted", check=False)
    assert done.returncode == 2
    assert "the evaluation of policy 1 on split 'test' failed: all 200 attempts did (env_error 200)" in done.stderr
    assert "ConnectionError: no database" in done.stderr and "held-out" not in done.stdout
    status = trained.status("scripted")
    assert status["accuracy_after"] is None and status["failed_evaluations"] == 1
