"""Prefect's and MLflow's servers die in the middle of a run and come back: training does not notice, both catch up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.ports import free_port
from storage.log.entries import Registration, Release
from storage.log.run_log import RunLog
from storage.objects.object_store import LocalStore
from tests.conftest import SCRIPTED, Home
from tests.flows.meetings import GO, RUN
from tests.prefect_api import ask

STEPS = 240
"""More than those from which on `meetings.EndsLater` waits for the servers."""


class ControlPlane:
    """A Prefect server and an MLflow server, each a process of its own on a port and a database it keeps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.prefect = f"http://127.0.0.1:{free_port()}"
        self.mlflow = f"http://127.0.0.1:{free_port()}"
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Return once both answer."""
        database = f"sqlite:///{self._folder / 'mlflow.db'}"
        serve = ["mlflow", "server", "--backend-store-uri", database, "--workers", "1"]
        serve += ["--default-artifact-root", str(self._folder / "mlartifacts")]
        self._processes = [
            self._start("prefect", ["prefect", "server", "start"], self.prefect),
            self._start("mlflow", serve, self.mlflow),
        ]
        for url in (f"{self.prefect}/api/health", f"{self.mlflow}/health"):
            _wait_until(lambda url=url: _answers(url), f"{url} answers")

    def kill(self) -> None:
        """kill -9, children included."""
        for process in self._processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes = []

    def _start(self, name: str, command: list[str], url: str) -> subprocess.Popen[bytes]:
        host, port = url.removeprefix("http://").split(":")
        settings = {"PREFECT_HOME": str(self._folder / "prefect"), "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with open(self._folder / f"{name}.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *command, "--host", host, "--port", port],
                env={**os.environ, **settings},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


@pytest.fixture
def control_plane(tmp_path: Path) -> Iterator[ControlPlane]:
    servers = ControlPlane(tmp_path)
    servers.start()
    yield servers
    servers.kill()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except OSError:
        return False


def _wait_until(done: Callable[[], bool], what: str, *, seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_servers_that_are_away_for_a_third_of_a_run_know_everything_afterwards(
    tmp_path: Path, control_plane: ControlPlane, base_model: Path
) -> None:
    home = Home(tmp_path, f"{control_plane.prefect}/api")
    log = RunLog(LocalStore(tmp_path / "store"), RUN)
    settings = [f"model={base_model}", f"tracking={control_plane.mlflow}", f"steps={STEPS}", "evaluation.every=40"]
    process = home.start("train", str(SCRIPTED), "workflow=tests.flows.meetings:EndsLater", *settings)

    def said() -> str:
        return (tmp_path / "output.txt").read_text()

    def step() -> int:
        assert process.poll() is None, said()
        return log.refresh().step

    _wait_until(lambda: step() >= STEPS // 3, "the first third")
    control_plane.kill()
    died_at = step()
    _wait_until(lambda: step() >= STEPS // 2 and said().count("answer") >= 1, "half of the run, and a word about it")
    control_plane.start()
    back_at = step()
    (tmp_path / GO).touch()
    assert back_at > died_at + STEPS // 6
    assert process.wait(timeout=200) == 0, said()
    assert log.refresh().step == STEPS

    assert said().count("did not take everything in") == 1, said()
    assert said().count("MLflow has everything again") == 1, said()
    assert said().count("does not answer: training goes on") == 1, said()
    for noise in ("Retrying", "Unable to connect", "failed to process item", "Traceback"):
        assert noise not in said()
    _assert_mlflow_has_all_of_it_once(log, control_plane.mlflow)
    _assert_prefect_has_all_of_it(f"{control_plane.prefect}/api")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_whose_own_prefect_server_is_killed_ends_by_itself_with_all_its_steps(
    tmp_path: Path, base_model: Path
) -> None:
    home = Home(tmp_path, "")
    del home.environment["PREFECT_API_URL"]  # so it starts a server beside it
    log, steps = RunLog(LocalStore(tmp_path / "store"), "scripted"), 40
    process = home.start("train", str(SCRIPTED), f"model={base_model}", f"steps={steps}", "evaluation.every=0")
    home.wait(process, lambda: log.refresh().step >= 5)
    family = psutil.Process(process.pid).children()
    [server] = [child for child in family if "prefect.server" in " ".join(child.cmdline())]
    server.kill()
    home.wait(process, lambda: log.refresh().ended is not None)
    assert process.wait(timeout=60) == 0, home.said()
    assert (log.refresh().step, log.state.ended and log.state.ended.outcome) == (steps, "finished")
    said = (tmp_path / "output.txt").read_text()
    assert said.count("Prefect does not know that the run has ended") == 1, said
    for noise in ("Still processing", "Error logging", "failed to process", "Service '", "Traceback"):
        assert noise not in said


def _assert_mlflow_has_all_of_it_once(log: RunLog, uri: str) -> None:
    from mlflow import MlflowClient

    client, state = MlflowClient(tracking_uri=uri, registry_uri=uri), log.state
    experiment = client.get_experiment_by_name("millrace")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    unsent = log.entries[int(run.data.tags["millrace.synced_entries"]) :]
    assert all(isinstance(entry.body, Registration | Release) for entry in unsent), "what it was told, and the end"
    steps = list(range(1, STEPS + 1))
    loss = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted(point.step for point in loss) == steps
    assert [point.value for point in sorted(loss, key=lambda point: point.step)] == pytest.approx(
        [step.metrics["loss"] for step in state.steps]
    )
    score = client.get_metric_history(run.info.run_id, "eval/test/score")
    assert sorted(point.step for point in score) == sorted(e.version for e in state.evaluations)
    assert sorted(i.dataset.name for i in run.inputs.dataset_inputs) == sorted(f"step-{step}" for step in steps)

    versions: list[Any] = []
    page = client.search_model_versions(f"name = '{RUN}'", max_results=100)
    while page:
        versions += page
        page = (
            client.search_model_versions(f"name = '{RUN}'", max_results=100, page_token=page.token)
            if page.token
            else []
        )
    assert sorted(int(version.tags["millrace.version"]) for version in versions) == [0, *steps]
    made_from = {int(v.tags["millrace.version"]): json.loads(v.tags.get("millrace.shards", "[]")) for v in versions}
    assert all(
        {s["id"]: s["sha256"] for s in made_from[step.policy.version]} == step.shard_sha256 for step in state.steps
    )
    assert state.registrations.keys() == {0, *steps}
    sources = {f"millrace://{RUN}/{policy.path}" for policy in state.policies.values()}
    assert {version.source for version in versions} == sources, "a server takes no paths of the trainer's machine"
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["report.html"]
    busy = client.get_metric_history(run.info.run_id, "system/cpu_utilization_percentage")
    assert sorted(point.step for point in busy) == steps
    assert client.get_model_version_by_alias(RUN, "rollout").tags["millrace.version"] == str(STEPS)

    found = client.search_traces(locations=[experiment.experiment_id], max_results=500, include_spans=False)
    of = Counter((t.info.tags["millrace.of"], t.info.tags.get("millrace.step", "")) for t in found)
    assert of.pop(("evaluation", "")) == 2 * len(state.evaluations)
    assert of == {("training", str(step)): 2 for step in steps[9::10]}
    assert len({trace.info.trace_id for trace in found}) == len(found)


def _assert_prefect_has_all_of_it(api: str) -> None:
    """Its client keeps what the server was not told and sends it once it can; so it is only a matter of time."""

    def counts() -> Counter[tuple[str, str]]:
        runs: list[dict[str, Any]] = []
        while page := ask("POST", f"{api}/task_runs/filter", {"limit": 200, "offset": len(runs)}):
            runs += page
        return Counter((run["name"].split("-")[0], run["state_type"]) for run in runs)

    def knows_every_step() -> bool:
        found = counts()
        steps = found["train", "COMPLETED"] == found["publish", "COMPLETED"] == STEPS
        return steps and {state for _, state in found} == {"COMPLETED"}

    _wait_until(knows_every_step, "Prefect knows of every step, and that all is over")
    [flow_run] = ask("POST", f"{api}/flow_runs/filter", {})
    assert (flow_run["name"], flow_run["state"]["type"]) == (RUN, "COMPLETED")
