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
    assert "flows.evaluate.evaluate" in deployments
    properties = training["parameter_openapi_schema"]["properties"]
    assert {"workflow", "run", "steps", "learning_rate", "max_staleness", "settings"} <= properties.keys()
    assert all(field.get("description") for field in properties.values())
    definitions = training["parameter_openapi_schema"]["definitions"]
    for block in ("TrainSettings", "RolloutSettings", "EngineSettings"):
        assert all(field.get("description") for field in definitions[block]["properties"].values())
    assert [schedule["active"] for schedule in training["schedules"]] == [False]


def test_a_deployment_run_trains_and_an_evaluation_scores_it(
    prefect_api: str, services_home: Path, base_model: Path
) -> None:
    home = Home(services_home, prefect_api)
    settings = {
        "engine": {"kind": "scripted", "max_model_len": 64},
        "sampling": {"max_tokens": 8},
        "evaluation": {"num_tasks": 8, "every": 0},
    }
    knobs = ["run=deployed", "steps=2", "batch_size=4", "n_samples=4", f"model={base_model}"]
    _run_deployment(home, "train-grpo/local", *knobs, f"settings={json.dumps(settings)}")
    assert home.status("deployed")["step"] == 2
    _run_deployment(home, "evaluate/local", "run=deployed", "version=1")
    assert home.status("deployed")["accuracy_after"] is not None


def _run_deployment(home: Home, name: str, *parameters: str) -> None:
    command = [sys.executable, "-m", "prefect", "deployment", "run", name, "--watch"]
    command += [part for parameter in parameters for part in ("-p", parameter)]
    environment = {**home.environment, "PREFECT_HOME": str(home.path / "prefect")}
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "Completed" in done.stdout, done.stdout + done.stderr + home.worker_logs()
