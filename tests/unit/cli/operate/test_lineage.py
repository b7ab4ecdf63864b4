"""`millrace lineage`: names people know, text they can read, JSON for scripts, errors with a way out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from storage.log.entries import Alias, Registration, Session
from storage.log.run_log import RunLog
from storage.shards.shards import commit_shard
from storage.tracking.registry import Registry
from tests.builders import SAMPLING, a_group, a_log, a_step, local_store, provenance


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLog:
    """A run of two steps in the default store, not in MLflow yet."""
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    log = a_log(local_store(tmp_path))
    log.append(Session(id="second", code_version="c0de2", reward_sha256="4e3a"))
    for number in (1, 2):
        groups = [a_group(10 * number + place, version=number - 1) for place in range(6)]
        commit_shard(log, groups, provenance=provenance(f"s{number}"), sampling=SAMPLING)
        step = a_step(log.state, trained=[group.id for group in groups])
        log.append(step)
        log.append(Registration(version=number, model_name="run", registry_version=str(number + 1)))
    log.append(Alias(name="rollout", version=2, checksum=""))
    return log


def _lineage(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["lineage", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def _json(*arguments: str) -> dict[str, object]:
    code, output = _lineage(*arguments, "--json")
    assert code == 0, output
    return dict(json.loads(output))


@pytest.mark.parametrize("named", [["run@rollout"], ["run@3"], ["run", "--policy", "2"], ["run"]])
def test_a_policy_has_several_names(log: RunLog, named: list[str]) -> None:
    made = _json(*named)
    assert (made["version"], made["registry_version"], made["step"]) == (2, "3", 2)


def test_a_policy_is_told_from_its_step_to_its_prompts(log: RunLog) -> None:
    code, output = _lineage("run@2")
    assert code == 0
    assert "1 of run run" in output and "run version 2" in output
    assert "step          1, session second: 6 trained, 0 filtered, 0 stale, 0 failed" in output
    assert "code          c0de2" in output and "reward code   sha256 4e3a" in output
    assert f"{log.store.uri}/runs/run/shards/s1.arrow" in output and log.state.shards["s1"].sha256 in output
    assert "task10" in output and "task15" not in output and "1 more; --all" in output
    assert "task15" in _lineage("run@2", "--all")[1]
    assert "not recorded" in _lineage("run", "--policy", "0")[1]


def test_checked_digests_are_an_exit_status(log: RunLog) -> None:
    code, output = _lineage("run@rollout", "--verify")
    assert code == 1 and "weights" in output, "no policy was written in this test"
    (log.store.root / "runs/run/shards/s2.arrow").write_bytes(b"")  # type: ignore[attr-defined]
    code, output = _lineage("run@rollout", "--verify", "--json")
    assert code == 1 and "sha256 differs" in json.loads(output)["problems"][0]


def test_a_trajectory_is_told_from_its_shard_to_the_live_policy(log: RunLog) -> None:
    code, output = _lineage("run", "--trajectory", "0.task10/1")
    assert code == 0 and "reward 0" in output and "policies 1–2 (2)" in output
    assert "2 is live" in output and "2 is 'rollout'" in output
    told = _json("run", "--trajectory", "0.task10/1")
    assert told["influenced"] == [1, 2] and told["aliases"] == {"rollout": 2}
    listed = json.loads(_lineage("run", "--prompt", "task10", "--json")[1])
    assert [lineage["group"]["id"] for lineage in listed] == ["0.task10"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run@champion"], "no alias 'champion' (its aliases: rollout)"),
        (["run@9"], "no registered version '9'"),
        (["run@"], "run@rollout"),
        (["run@2", "--policy", "1"], "MODEL@VERSION and --policy ask different things"),
        (["run", "--trajectory", "0.task1/0", "--verify"], "--verify checks the files behind a policy"),
        (["run", "--trajectory", "0.task1/0"], "the nearest is"),
        (["run", "--policy", "7"], "it has 0 to 2"),
        (["rnu@2"], "runs there: run"),
    ],
)
def test_a_question_without_an_answer_says_why(log: RunLog, arguments: list[str], sentence: str) -> None:
    code, output = _lineage(*arguments)
    assert code == 2 and sentence in output and "Traceback" not in output


def test_an_alias_set_in_mlflow_alone_is_found_there(log: RunLog, tmp_path: Path) -> None:
    import mlflow

    tracking = f"sqlite:///{tmp_path}/mlflow.db"
    Registry(log, tracking_uri=tracking).sync()
    mlflow.MlflowClient(tracking_uri=tracking).set_registered_model_alias("run", "champion", "2")
    assert _json("run@champion")["version"] == 1
    assert _json("run@1", "--tracking", tracking)["version"] == 0, "the base model, which the log has not announced"
    code, output = _lineage("run@loser")
    assert code == 2 and "nor MLflow" in output and "rollout" in output


def test_a_run_of_the_same_name_elsewhere_is_not_mistaken_for_it(
    log: RunLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    tracking = f"sqlite:///{tmp_path}/mlflow.db"
    Registry(log, tracking_uri=tracking).sync()
    mlflow.MlflowClient(tracking_uri=tracking).set_registered_model_alias("run", "champion", "2")
    elsewhere = tmp_path / "elsewhere"
    a_log(local_store(elsewhere))
    code, output = _lineage("run@champion", "--store", str(elsewhere / "store"), "--tracking", tracking)
    assert code == 2 and "is of a run in" in output


def test_the_page_in_mlflow_is_named_where_there_is_a_server(log: RunLog) -> None:
    _, output = _lineage("run@rollout", "--tracking", "http://tracking:5000")
    assert "http://tracking:5000/#/models/run/versions/3" in output


def test_names_in_brackets_are_no_markup(log: RunLog) -> None:
    log.append(Alias(name="[red]team", version=2, checksum=""))
    assert "[red]team" in _lineage("run@rollout")[1]
    assert "2 is '[red]team'" in _lineage("run", "--trajectory", "0.task10/1")[1]
