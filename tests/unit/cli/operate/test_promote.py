"""`millrace promote` and `rollback` move the alias in the log and in MLflow, or say in a sentence why not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from storage.log.entries import Session
from storage.log.run_log import RunLog
from storage.log.runs import create_run, trainer_lock
from storage.objects.object_store import LocalStore
from tasks import mirror
from tests.builders import BASE, a_shard, a_step, a_summary
from tests.unit.cli.builders import printed, typed


@pytest.fixture
def log(store: LocalStore) -> RunLog:
    """A run whose first step is fine and whose second has a gap of 0.7 nats, allowed by its own settings."""
    log = create_run(store, "run", {"train": {"max_gap": 0.8}})
    for body in (Session(id="s", code_version="", steps=2), BASE):
        log.append(body)
    for number, gap in ((1, 0.0), (2, 0.7)):
        log.append(a_shard(f"s{number}", [a_summary(number)]))
        step = a_step(log.state, trained=[f"0.task{number}"])
        log.append(replace(step, metrics={"loss": 0.5, "engine_gap": gap}))
    return log


def test_a_policy_becomes_the_champion_and_a_rollback_takes_it_back_in_log_and_mlflow(log: RunLog, home: Path) -> None:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{home / 'mlflow.db'}")

    def champions() -> tuple[int, str]:
        """By the log, and by MLflow."""
        told = client.get_model_version_by_alias("run", "champion").tags["millrace.version"]
        return log.refresh().aliases["champion"].version, told

    assert "policy 1 of run run is the champion" in printed("promote run --version 1") and champions() == (1, "1")
    result = typed("promote run --json")
    assert json.loads(result.stdout)["version"] == 2 and "policy 2 of run run is the champion" in result.stderr
    assert champions() == (2, "2")
    assert "policy 1 of run run is the champion again" in printed("rollback run") and champions() == (1, "1")
    assert "there is no earlier champion to go back to" in printed("rollback run", status=2)
    [run] = client.search_runs([client.get_experiment_by_name("millrace").experiment_id])
    assert run.info.status == "FINISHED", "promoting a run is not working on it"


def test_a_refusal_is_one_sentence_and_changes_nothing(log: RunLog) -> None:
    shown = printed("promote run --max-gap 0.5", status=2)
    assert "policy 2 of run 'run' is not promoted" in shown
    assert "step 2: engine and trainer differed by 0.7 nats per token on the same policy, above 0.5" in shown
    assert "no policy version 7; it has 0 to 2" in printed("promote run --version 7", status=2)
    assert "champion" not in log.refresh().aliases


def test_sync_brings_mlflow_up_to_the_log_or_says_what_it_lacks(
    log: RunLog, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    monkeypatch.setattr(mirror, "_report_command", lambda log, page: ["sh", "-c", f"printf page > {page}"])
    with trainer_lock(log):
        assert "its own session tells MLflow" in printed("sync run", status=2)
    shown = printed("sync run --tracking http://127.0.0.1:9", status=2)
    assert "MLflow at http://127.0.0.1:9 lacks up to 2 of 2 steps; the next start or" in shown and "sync run" in shown
    assert f"MLflow at sqlite:///{home / 'mlflow.db'} has 2 steps of run run" in printed("sync run")
    client = mlflow.MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("millrace").experiment_id])
    assert [point.step for point in client.get_metric_history(run.info.run_id, "train/loss")] == [1, 2]
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["report.html"]


@pytest.mark.server
def test_mlflow_that_was_away_gets_the_alias_later(log: RunLog, home: Path) -> None:
    with trainer_lock(log):
        assert "being trained" in printed("promote run") and not (home / "mlflow.db").exists()
    assert log.refresh().aliases["champion"].version == 2
    assert "cannot be reached" in printed("promote run --version 1 --tracking http://127.0.0.1:9")
    assert log.refresh().aliases["champion"].version == 1
    assert "run@champion at sqlite" in printed("promote run")
