"""`millrace lineage`: names people know, text they can read, JSON for scripts, errors with a way out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from storage.log.entries import Alias, Registration, Session
from storage.log.run_log import RunLog
from storage.objects.object_store import LocalStore
from storage.tracking.registry import Registry
from tests.builders import a_group, a_log, a_step, local_store
from tests.unit.cli.builders import assert_refused, commit, printed


@pytest.fixture
def log(store: LocalStore) -> RunLog:
    """A run of two steps, not in MLflow yet."""
    log = a_log(store)
    log.append(Session(id="second", code_version="c0de2", reward_sha256="4e3a"))
    for number in (1, 2):
        groups = [a_group(10 * number + place, version=number - 1) for place in range(6)]
        commit(log, f"s{number}", *groups)
        log.append(a_step(log.state, trained=[group.id for group in groups]))
        log.append(Registration(version=number, model_name="run", registry_version=str(number + 1)))
    log.append(Alias(name="rollout", version=2, checksum=""))
    return log


def _json(line: str) -> Any:
    return json.loads(printed(f"lineage {line} --json"))


@pytest.mark.parametrize("name", ["run@rollout", "run@3", "run --policy 2", "run"])
def test_a_policy_has_several_names(log: RunLog, name: str) -> None:
    made = _json(name)
    assert (made["version"], made["registry_version"], made["step"]) == (2, "3", 2)


def test_a_policy_is_told_from_its_step_to_its_prompts(log: RunLog) -> None:
    log.append(Alias(name="[red]team", version=1, checksum=""))
    shown = printed("lineage run@2 --tracking http://tracking:5000")
    assert "1 of run run  ([red]team)" in shown and "run version 2" in shown
    assert "http://tracking:5000/#/models/run/versions/2" in shown
    assert "step          1, session second: 6 trained, 0 filtered, 0 stale, 0 failed" in shown
    assert "code          c0de2" in shown and "reward code   sha256 4e3a" in shown
    assert f"{log.store.uri}/runs/run/shards/s1.arrow" in shown and log.state.shards["s1"].sha256 in shown
    assert "task10" in shown and "task15" not in shown and "1 more; --all" in shown
    assert "task15" in printed("lineage run@2 --all")
    assert "not recorded" in printed("lineage run --policy 0")


def test_checked_digests_are_an_exit_status(log: RunLog) -> None:
    assert "weights" in printed("lineage run@rollout --verify", status=1), "no policy was written in this test"
    log.store.put("runs/run/shards/s2.arrow", b"")
    made = json.loads(printed("lineage run@rollout --verify --json", status=1))
    assert "sha256 differs" in made["problems"][0]


def test_a_trajectory_is_told_from_its_shard_to_the_live_policy(log: RunLog) -> None:
    log.append(Alias(name="[red]team", version=2, checksum=""))
    shown = printed("lineage run --trajectory 0.task10/1")
    assert "reward 0" in shown and "policies 1–2 (2)" in shown
    assert "2 is live" in shown and "2 is 'rollout'" in shown and "2 is '[red]team'" in shown
    made = _json("run --trajectory 0.task10/1")
    assert made["influenced"] == [1, 2] and made["aliases"] == {"rollout": 2, "[red]team": 2}
    assert [lineage["group"]["id"] for lineage in _json("run --prompt task10")] == ["0.task10"]


def test_a_question_without_an_answer_says_why(log: RunLog) -> None:
    refused = {
        "run@champion": "no alias 'champion' (its aliases: rollout)",
        "run@9": "no registered version '9'",
        "run@²": "no alias '²'",
        f"run@{'9' * 5000}": "no registered version",
        "run --trajectory 0.task1/²": "GROUP/ATTEMPT",
        f"run --trajectory 0.task1/{'9' * 5000}": "GROUP/ATTEMPT",
        "run@": "run@rollout",
        "run@2 --policy 1": "MODEL@VERSION and --policy ask different things",
        "run --trajectory 0.task1/0 --verify": "--verify checks the files behind a policy",
        "run --trajectory 0.task1/0": "the nearest is",
        "run --policy 7": "it has 0 to 2",
        "rnu@2": "runs there: run",
    }
    assert_refused("lineage {}", refused)


def test_an_alias_set_in_mlflow_alone_is_found_there_if_it_is_of_this_run(log: RunLog, tmp_path: Path) -> None:
    import mlflow

    tracking = f"sqlite:///{tmp_path}/mlflow.db"
    Registry(log, tracking_uri=tracking).sync()
    mlflow.MlflowClient(tracking_uri=tracking).set_registered_model_alias("run", "champion", "2")
    assert _json("run@champion")["version"] == 1
    assert _json(f"run@1 --tracking {tracking}")["version"] == 0, "the base model, which the log has not announced"
    shown = printed("lineage run@loser", status=2)
    assert "nor MLflow" in shown and "rollout" in shown
    a_log(local_store(tmp_path / "elsewhere"))
    elsewhere = f"--store {tmp_path}/elsewhere/store"
    assert "is of a run in" in printed(f"lineage run@champion {elsewhere} --tracking {tracking}", status=2)
