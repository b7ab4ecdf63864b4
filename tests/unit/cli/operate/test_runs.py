"""`millrace runs` lists what a store holds, the newest work first."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from cli.main import app
from storage.log.entries import Alias, Evaluation
from storage.log.runs import create_run, trainer_lock
from storage.objects.object_store import LocalStore
from tests.builders import BASE, a_shard, a_step, a_summary

_SCORE = Evaluation(
    version=0, split="test", score=0.25, num_tasks=4, n_samples=1, num_failed=0, shard_id="e0", seconds=1.0
)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    return LocalStore(tmp_path / "store")


def _runs(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["runs", *arguments], env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_steps_scores_champion_and_who_trains(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    create_run(store, "empty", {"workflow": "some.module:Thing"})
    log = create_run(store, "done", {"workflow": "examples.arithmetic:Arithmetic"})
    log.append(BASE)
    log.append(_SCORE)
    log.append(a_shard("s1", [a_summary(1)]))
    step = a_step(log.state, trained=["0.task1"])
    log.append(step)
    log.append(replace(_SCORE, version=1, score=0.75, shard_id="e1"))
    log.append(Alias(name="champion", version=1, checksum=step.policy.weights_sha256))
    written_at = log.entries[-1].written_at
    monkeypatch.setattr(
        "cli.operate.runs.time", SimpleNamespace(time=lambda: written_at)
    )  # a test that stalls is no older
    with trainer_lock(log):
        first, second = json.loads(_runs("--json"))
        lines = _runs().splitlines()
    assert first["run"] == "done" and second["run"] == "empty"
    assert first["is_training"] and not second["is_training"]
    assert (first["step"], first["accuracy_before"], first["accuracy_after"], first["champion"]) == (1, 0.25, 0.75, 1)
    assert second["step"] == 0 and second["accuracy_after"] is None and second["last_entry_at"] is None
    assert "done" in lines[1] and "training" in lines[1] and "0.25 → 0.75" in lines[1] and "0 s ago" in lines[1]
    assert "empty" in lines[2] and "training" not in lines[2]


def test_an_empty_store_says_what_makes_a_run(store: LocalStore) -> None:
    assert "no runs in" in _runs() and "millrace train" in _runs()
    assert json.loads(_runs("--json")) == []
