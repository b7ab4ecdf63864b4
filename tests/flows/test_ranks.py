"""Whole runs whose trainer is two processes, through the real command, with a scripted engine."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from storage.log.run_log import RunLog
from storage.log.runs import open_run
from storage.objects.digests import verify_folder
from storage.objects.object_store import LocalStore
from tests.conftest import SCRIPTED, Home

PATIENCE = 200.0  # seconds


def _log(home: Home) -> RunLog:
    return open_run(LocalStore(home.path / "store"), "scripted")


def test_a_run_on_two_ranks_ends_with_the_weights_of_one(finished: Home, home: Home, base_model: Path) -> None:
    home.run("train", str(SCRIPTED), f"model={base_model}", "train.num_ranks=2", "train.device=cpu")
    one, two = _log(finished), _log(home)
    assert two.state.step == one.state.step == 6 and two.state.counters() == one.state.counters()
    for expected, step in zip(one.state.steps, two.state.steps, strict=True):
        assert step.metrics["trained_tokens"] == expected.metrics["trained_tokens"]
    policies = [log.store.fetch_folder(log.state.steps[-1].policy.path, home.path / "cache") for log in (one, two)]
    weights = [load_file(folder / "model.safetensors") for folder in policies]
    for name, tensor in weights[0].items():
        assert float((weights[1][name] - tensor).abs().max()) < 1e-5, name


@pytest.mark.slow
def test_a_replay_of_a_run_on_two_ranks_has_its_weights_bit_for_bit(home: Home, base_model: Path) -> None:
    home.run("train", str(SCRIPTED), f"model={base_model}", "train.num_ranks=2", "train.device=cpu", "steps=2")
    replayed = home.run("replay", "scripted", "--step", "2").stdout
    assert "every step has the recorded weights, bit for bit" in replayed


@pytest.mark.slow
def test_where_a_rank_is_killed_in_a_step_new_ranks_take_the_step(home: Home, base_model: Path) -> None:
    num_steps = 30  # enough that the trainer is still at it when it is looked for
    arguments = ["train", str(SCRIPTED), f"model={base_model}", "train.num_ranks=2", "train.device=cpu"]
    arguments += ["max_staleness=2", f"steps={num_steps}"]  # so that there is always something to train
    training = home.start(*arguments)
    home.wait(training, lambda: (home.path / "store/runs/scripted/run.json").exists() and _log(home).state.step >= 1)
    victim = home.process_of("scripted", "trainer-0-rank-1")
    victim.send_signal(signal.SIGSTOP)  # no step can end without it
    try:
        home.wait(training, lambda: _log(home).state.pending_accepted >= 4)
    finally:
        victim.send_signal(signal.SIGKILL)
    assert training.wait(timeout=PATIENCE) == 0, home.said()
    assert "rank 1 of trainer-0 died during train_step()" in home.said()
    assert "another trainer takes its place" in home.said()
    log = _log(home)
    for step in log.state.steps:
        assert verify_folder(log.store.fetch_folder(step.policy.path, home.path)) == step.policy.weights_sha256
    state = log.state
    assert state.step == num_steps and state.positions == set(range(4 * num_steps))
    assert state.counters()["trained"] == 4 * num_steps
