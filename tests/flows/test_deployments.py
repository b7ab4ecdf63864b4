"""The deployments of prefect.yaml on a real server and worker."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from tests.conftest import PROJECT, Home


def _post(url: str) -> Any:
    request = urllib.request.Request(url, data=b"{}", headers={"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def test_the_form_has_flat_knobs_one_block_and_a_help_text_for_each(prefect_api: str) -> None:
    deployments = {d["entrypoint"]: d for d in _post(f"{prefect_api}/deployments/filter")}
    training = deployments["flows.train_grpo.train_grpo"]
    for entrypoint in ("flows.evaluate.evaluate", "flows.replay.replay", "flows.maintain.maintain"):
        knobs = deployments[entrypoint]["parameter_openapi_schema"]["properties"]
        assert all(field.get("description") for field in knobs.values())
    assert [schedule["active"] for schedule in deployments["flows.maintain.maintain"]["schedules"]] == [False]
    properties = training["parameter_openapi_schema"]["properties"]
    assert {"workflow", "run", "steps", "learning_rate", "max_staleness", "settings"} <= properties.keys()
    assert all(field.get("description") for field in properties.values())
    definitions = training["parameter_openapi_schema"]["definitions"]
    for block in ("TrainSettings", "RolloutSettings", "EngineSettings"):
        assert all(field.get("description") for field in definitions[block]["properties"].values())
    assert [schedule["active"] for schedule in training["schedules"]] == [False]


def test_deployment_runs_train_score_tidy_up_and_go_on(prefect_api: str, services_home: Path, base_model: Path) -> None:
    home = Home(services_home, prefect_api)
    settings = {
        "engine": {"kind": "scripted", "max_model_len": 64},
        "sampling": {"max_tokens": 8},
        "evaluation": {"num_tasks": 8, "every": 0},
    }
    knobs = ["run=deployed", "batch_size=4", "n_samples=4", f"model={base_model}", f"settings={json.dumps(settings)}"]
    _run_deployment(home, "train-grpo/local", *knobs, "steps=3")
    assert home.status("deployed")["step"] == 3
    _run_deployment(home, "evaluate/local", "run=deployed", "version=1")
    assert home.status("deployed")["accuracy_after"] is not None
    _run_deployment(home, "maintain/local", 'runs=["deployed"]', "keep_last=1", "older_than=")
    kept = sorted(folder.name.split("-")[0] for folder in (services_home / "store/runs/deployed/policies").iterdir())
    assert kept == ["1", "3"], "the best and the newest"
    _run_deployment(home, "train-grpo/local", *knobs, "steps=4")
    assert home.status("deployed")["step"] == 4


def _run_deployment(home: Home, name: str, *parameters: str) -> None:
    command = [sys.executable, "-m", "prefect", "deployment", "run", name, "--watch"]
    command += [part for parameter in parameters for part in ("-p", parameter)]
    environment = {**home.environment, "PREFECT_HOME": str(home.path / "prefect")}
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "Completed" in done.stdout, done.stdout + done.stderr + home.worker_logs()
