"""`millrace runs` lists what a store holds, the newest work first."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from storage.log.entries import Alias
from storage.log.runs import create_run, trainer_lock
from storage.objects.object_store import LocalStore
from tests.builders import BASE, a_shard, a_step, a_summary
from tests.unit.cli.builders import an_evaluation, printed


def test_steps_scores_champion_and_who_trains(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    create_run(store, "empty", {"workflow": "some.module:Thing"})
    log = create_run(store, "done", {"workflow": "examples.arithmetic:Arithmetic"})
    log.append(BASE)
    log.append(an_evaluation(0, 0.25))
    log.append(a_shard("s1", [a_summary(1)]))
    step = a_step(log.state, trained=["0.task1"])
    log.append(step)
    log.append(an_evaluation(1, 0.75))
    log.append(Alias(name="champion", version=1, checksum=step.policy.weights_sha256))
    written_at = log.entries[-1].written_at
    clock = SimpleNamespace(time=lambda: written_at)  # a test that stalls is no older
    monkeypatch.setattr("cli.operate.runs.time", clock)
    with trainer_lock(log):
        first, second = json.loads(printed("runs --json"))
        lines = printed("runs").splitlines()
    assert first["run"] == "done" and second["run"] == "empty"
    assert first["is_training"] and not second["is_training"]
    assert (first["step"], first["accuracy_before"], first["accuracy_after"], first["champion"]) == (1, 0.25, 0.75, 1)
    assert second["step"] == 0 and second["accuracy_after"] is None and second["last_entry_at"] is None
    assert "done" in lines[1] and "training" in lines[1] and "0.25 → 0.75" in lines[1] and "0 s ago" in lines[1]
    assert "empty" in lines[2] and "training" not in lines[2]


def test_an_empty_store_says_what_makes_a_run(store: LocalStore) -> None:
    assert "no runs in" in printed("runs") and "millrace train" in printed("runs")
    assert json.loads(printed("runs --json")) == []
