"""The deployments of prefect.yaml on a real server and worker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prefect.settings import PREFECT_API_URL, temporary_settings

from storage.log.run_log import RunLog
from storage.log.runs import open_run
from storage.objects.digests import verify_folder
from storage.objects.object_store import LocalStore
from tasks.prefect.flow_runs import limit_gpu_runs, remove_old_deployments
from tests.compose import Composition
from tests.conftest import PROJECT, Home
from tests.prefect_api import ask

NAMES = {
    ("flows.train_grpo.train_grpo", "train"),
    ("flows.evaluate.evaluate", "eval"),
    ("flows.evaluate.evaluate", "on-rollout"),
    ("flows.rollout.rollout", "produce"),
    ("flows.replay.replay", "replay"),
    ("flows.maintain.maintain", "gc"),
}


def test_the_form_has_flat_knobs_one_block_and_a_help_text_for_each(prefect_api: str) -> None:
    listed = ask("POST", f"{prefect_api}/deployments/filter", {})
    deployments = {d["entrypoint"]: d for d in listed}
    training = deployments["flows.train_grpo.train_grpo"]
    assert len(deployments) == 5
    assert {(d["entrypoint"], d["name"]) for d in listed} == NAMES, "as the commands that do the same"
    for entrypoint in deployments:
        knobs = deployments[entrypoint]["parameter_openapi_schema"]["properties"]
        assert knobs and all(field.get("description") for field in knobs.values()), entrypoint
    assert [schedule["active"] for schedule in deployments["flows.maintain.maintain"]["schedules"]] == [False]
    properties = training["parameter_openapi_schema"]["properties"]
    assert {"workflow", "run", "steps", "learning_rate", "max_staleness", "settings"} <= properties.keys()
    definitions = training["parameter_openapi_schema"]["definitions"]
    for block in ("TrainSettings", "RolloutSettings", "EngineSettings"):
        assert all(field.get("description") for field in definitions[block]["properties"].values())
    assert [schedule["active"] for schedule in training["schedules"]] == [False]


def test_deployments_of_older_names_go_unless_a_run_is_left_and_hand_their_schedule_on(prefect_api: str) -> None:
    def find(name: str) -> Any:
        return ask("GET", f"{prefect_api}/deployments/name/{name}")

    def make(flow: str, entrypoint: str, *, active: bool) -> str:
        schedule = {"schedule": {"cron": "0 3 * * *"}, "active": active}
        made = {"name": "local", "flow_id": find(flow)["flow_id"], "entrypoint": entrypoint, "schedules": [schedule]}
        return str(ask("POST", f"{prefect_api}/deployments/", made)["id"])

    make("maintain/gc", "flows.maintain.maintain", active=True)
    busy = make("replay/replay", "flows.replay.replay", active=False)
    waiting = ask("POST", f"{prefect_api}/deployments/{busy}/create_flow_run", {"state": {"type": "PAUSED"}})["id"]
    with temporary_settings({PREFECT_API_URL: prefect_api}):
        assert asyncio.run(remove_old_deployments()) == ["maintain/local"]
        assert [schedule["active"] for schedule in find("maintain/gc")["schedules"]] == [True]
        ask("DELETE", f"{prefect_api}/flow_runs/{waiting}")
        assert asyncio.run(remove_old_deployments()) == ["replay/local"]
        assert asyncio.run(remove_old_deployments()) == []
    [schedule] = find("maintain/gc")["schedules"]
    ask("PATCH", f"{prefect_api}/deployments/{find('maintain/gc')['id']}/schedules/{schedule['id']}", {"active": False})


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_deployment_runs_train_replay_produce_score_tidy_up_and_go_on(
    prefect_api: str, services_home: Path, base_model: Path, tmp_path: Path
) -> None:
    home = Home(services_home, prefect_api)

    def log() -> RunLog:
        return open_run(LocalStore(services_home / "store"), "deployed")

    def training(**more: dict[str, int]) -> list[str]:
        settings = {
            "engine": {"kind": "scripted", "max_model_len": 64},
            "sampling": {"max_tokens": 8},
            "evaluation": {"num_tasks": 8, "every": 0},
            **more,
        }
        return [
            "run=deployed",
            "batch_size=4",
            "n_samples=4",
            f"model={base_model}",
            f"settings={json.dumps(settings)}",
        ]

    _run_deployment(home, "train-grpo/train", *training(), "steps=3")
    assert home.status("deployed")["step"] == 3
    _run_deployment(home, "replay/replay", "run=deployed", "first=2", "last=3", f"save={tmp_path / 'replayed'}")
    assert verify_folder(tmp_path / "replayed") == log().state.steps[2].policy.weights_sha256

    # A training without an engine, and the rollouts it waits for.
    with _deployment(home, "train-grpo/train", *training(rollout={"num_workers": 0}), "steps=4"):
        deadline = time.monotonic() + 120
        while log().state.sessions[-1].steps < 4:
            assert time.monotonic() < deadline, home.worker_logs()
            time.sleep(0.1)
        _run_deployment(home, "rollout/produce", "run=deployed", "name=helper")
    state = log().state
    assert state.step == 4 and [s.producer for s in state.shards.values() if s.producer.startswith("helper-")]

    _run_deployment(home, "evaluate/eval", "run=deployed", "version=1")
    assert home.status("deployed")["accuracy_after"] is not None
    _run_deployment(home, "maintain/gc", 'runs=["deployed"]', "keep_last=1", "older_than=")
    kept = sorted(folder.name.split("-")[0] for folder in (services_home / "store/runs/deployed/policies").iterdir())
    assert kept == ["1", "4"], "the best and the newest"
    _run_deployment(home, "train-grpo/train", *training(), "steps=5")
    assert home.status("deployed")["step"] == 5


def test_flow_runs_of_the_gpu_queue_are_limited_unless_the_user_has_set_a_limit(prefect_api: str) -> None:
    queue = f"{prefect_api}/work_pools/local/queues/gpu"

    def limit() -> Any:
        return ask("GET", queue)["concurrency_limit"]

    def set_limit(num_runs: Any) -> None:
        ask("PATCH", queue, {"concurrency_limit": num_runs})

    before = limit()  # none, but on a machine with GPUs
    try:
        with temporary_settings({PREFECT_API_URL: prefect_api}):
            set_limit(None)
            asyncio.run(limit_gpu_runs(1))
            assert limit() == 1
            set_limit(2)
            asyncio.run(limit_gpu_runs(1))
            assert limit() == 2
    finally:
        set_limit(before)


@pytest.mark.slow
def test_the_compose_files_prefect_has_a_password_that_deploy_knows(tmp_path: Path) -> None:
    """Of both files what needs Prefect alone, on SQLite instead of PostgreSQL; `test_postgres` trains with it."""
    secret = "millrace:p4ssw0rd-of-a-test"
    variables = {"PREFECT_AUTH": secret, "POSTGRES_PASSWORD": "-", "AWS_ACCESS_KEY_ID": "-"}
    composition = Composition(tmp_path, variables={**variables, "AWS_SECRET_ACCESS_KEY": "-"}, addresses={})
    composition.services["prefect"]["environment"] |= {
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{tmp_path / 'prefect.db'}",
        "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",  # else SQLite may lock while automations are made
    }
    (tmp_path / "home").mkdir()  # the image has it
    over_it = yaml.safe_load((PROJECT / "infra" / "compose.gpu.yaml").read_text())["services"]
    composition.services["deploy"]["environment"] |= over_it["deploy"]["environment"]
    try:
        composition.up("prefect")
        composition.wait_until_healthy("prefect")
        api, known = f"{composition.url('prefect:4200')}/api", httpx.BasicAuth(*secret.split(":"))
        for refused in (None, httpx.BasicAuth("millrace", "guess")):
            assert httpx.post(f"{api}/flow_runs/filter", json={}, auth=refused).status_code == 401
        composition.up("deploy")
        composition.wait_until_done("deploy")
        found = httpx.get(f"{api}/work_pools/local/queues/gpu", auth=known).raise_for_status().json()
        assert found["concurrency_limit"] == 1
        said = "".join(file.read_text(errors="replace") for file in tmp_path.rglob("*.log"))
        assert secret not in said and secret.split(":")[1] not in said
    finally:
        composition.down()


@contextlib.contextmanager
def _deployment(home: Home, name: str, *parameters: str) -> Iterator[None]:
    """A flow run of a deployment beside the body, which is to be Completed after it."""
    command = [sys.executable, "-m", "prefect", "deployment", "run", name, "--watch"]
    command += [part for parameter in parameters for part in ("-p", parameter)]
    environment = {**home.environment, "PREFECT_HOME": str(home.path / "prefect")}
    watching = subprocess.Popen(
        command, cwd=PROJECT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield
        said = watching.communicate(timeout=240)[0]
    finally:
        watching.kill()
    assert watching.returncode == 0 and "Completed" in said, said + home.worker_logs()


def _run_deployment(home: Home, name: str, *parameters: str) -> None:
    with _deployment(home, name, *parameters):
        pass
