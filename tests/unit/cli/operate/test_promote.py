"""`millrace promote` and `rollback` move the alias in the log and in MLflow, or say in a sentence why not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from storage.log.run_log import RunLog
from storage.log.runs import create_run, trainer_lock
from storage.objects.object_store import LocalStore
from tests.builders import BASE, a_shard, a_step, a_summary


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLog:
    """A run whose first step is fine and whose second has a gap of 0.7 nats, allowed by its own settings."""
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    log = create_run(LocalStore(tmp_path / "store"), "run", {"train": {"max_gap": 0.8}})
    log.append(BASE)
    for number, gap in ((1, 0.0), (2, 0.7)):
        log.append(a_shard(f"s{number}", [a_summary(number)]))
        step = a_step(log.state, trained=[f"0.task{number}"])
        log.append(replace(step, metrics={"loss": 0.5, "engine_gap": gap}))
    return log


def _promote(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["promote", "run", *arguments], env={"COLUMNS": "300"})
    return result.exit_code, result.output


def test_the_newest_policy_becomes_the_champion_in_the_log_and_in_mlflow(log: RunLog, tmp_path: Path) -> None:
    import mlflow

    code, output = _promote()
    assert code == 0 and "policy 2 of run run is the champion" in output
    assert log.refresh().aliases["champion"].version == 2
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert client.get_model_version_by_alias("run", "champion").tags["millrace.version"] == "2"
    assert _promote("--version", "1")[0] == 0
    assert client.get_model_version_by_alias("run", "champion").tags["millrace.version"] == "1"
    [run] = client.search_runs([client.get_experiment_by_name("millrace").experiment_id])
    assert run.info.status == "FINISHED", "promoting a run is not working on it"


def test_a_refusal_is_one_sentence_and_changes_nothing(log: RunLog) -> None:
    code, output = _promote("--max-gap", "0.5")
    assert code == 2 and "policy 2 of run 'run' is not promoted" in output
    assert "step 2: engine and trainer differed by 0.7 nats per token on the same policy, above 0.5" in output
    assert "champion" not in log.refresh().aliases


def test_a_run_that_is_being_trained_tells_mlflow_itself(log: RunLog, tmp_path: Path) -> None:
    with trainer_lock(log):
        code, output = _promote()
    assert code == 0 and "being trained" in output and not (tmp_path / "mlflow.db").exists()
    assert log.refresh().aliases["champion"].version == 2


def test_mlflow_that_is_down_is_told_by_the_next_call(log: RunLog) -> None:
    code, output = _promote("--tracking", "http://127.0.0.1:9")
    assert code == 0 and "was not told" in output and log.refresh().aliases["champion"].version == 2
    code, output = _promote()
    assert code == 0 and "run@champion at sqlite" in output


def test_json_is_the_alias(log: RunLog) -> None:
    result = CliRunner().invoke(app, ["promote", "run", "--json"])
    assert json.loads(result.stdout)["version"] == 2 and "champion" in result.stderr


def test_an_unknown_version_is_one_sentence(log: RunLog) -> None:
    code, output = _promote("--version", "7")
    assert code == 2 and "no policy version 7; it has 0 to 2" in output


def test_a_rollback_moves_the_alias_back_in_the_log_and_in_mlflow(log: RunLog, tmp_path: Path) -> None:
    import mlflow

    for version in ("1", "2"):
        assert _promote("--version", version)[0] == 0
    result = CliRunner().invoke(app, ["rollback", "run"], env={"COLUMNS": "300"})
    assert result.exit_code == 0 and "policy 1 of run run is the champion again" in result.output
    assert log.refresh().aliases["champion"].version == 1
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert client.get_model_version_by_alias("run", "champion").tags["millrace.version"] == "1"
    result = CliRunner().invoke(app, ["rollback", "run"], env={"COLUMNS": "300"})
    assert result.exit_code == 2 and "there is no earlier champion to go back to" in result.output
