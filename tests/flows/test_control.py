"""Pause, resume, suspend, stop and the gate, on a real Prefect server and worker: from both sides, to the log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from storage.log.entries import Pause, Resume, Step
from storage.log.run_log import RunLog
from storage.log.runs import is_training, open_run
from storage.objects.object_store import LocalStore
from tests.conftest import Home
from tests.prefect_api import PATIENCE, ask

Found = TypeVar("Found")

RUN = "controlled"
A_POLICY_IS_SERVED = "millrace - a policy is served"
A_TRAINING_HAS_FINISHED = "millrace - a training has finished"
ON_ROLLOUT = (A_POLICY_IS_SERVED, A_TRAINING_HAS_FINISHED)
ZOMBIES = "millrace: flow runs without a heartbeat"
NEVER = 100_000


class Server:
    """What a person sees and clicks in Prefect's UI."""

    def __init__(self, url: str) -> None:
        self._url = url

    def _ask(self, method: str, path: str, document: dict[str, Any] | None = None) -> Any:
        return ask(method, self._url + path, document)

    def post(self, path: str, **document: Any) -> Any:
        return self._ask("POST", path, document)

    def start(self, name: str, **parameters: Any) -> str:
        deployment = self._ask("GET", f"/deployments/name/{name}")["id"]
        return str(self.post(f"/deployments/{deployment}/create_flow_run", parameters=parameters)["id"])

    def state(self, flow_run: str) -> str:
        return str(self._ask("GET", f"/flow_runs/{flow_run}")["state"]["name"])

    def history(self, flow_run: str) -> list[str]:
        """Names of its states, in order."""
        return [state["name"] for state in self._ask("GET", f"/flow_run_states/?flow_run_id={flow_run}")]

    def ended_tasks(self, flow_run: str) -> set[str]:
        """Names of the states of its task runs, once none is left that has not ended."""
        found = self.post("/task_runs/filter", flow_runs={"id": {"any_": [flow_run]}}, sort="EXPECTED_START_TIME_DESC")
        states = {task_run["state"]["name"] for task_run in found}
        return set() if states & {"Running", "Pending"} else states

    def messages(self, flow_run: str) -> str:
        """What its page shows as logs."""
        return "\n".join(
            log["message"] for log in self.post("/logs/filter", logs={"flow_run_id": {"any_": [flow_run]}})
        )

    def evaluated(self, because: str) -> set[int]:
        """Policy versions whose evaluation an automation has started."""
        found = self.post("/flow_runs/filter", deployments={"name": {"any_": ["on-rollout"]}})
        ours = [flow_run for flow_run in found if flow_run["parameters"]["run"] == RUN]
        return {row["parameters"]["version"] for row in ours if row["created_by"]["display_value"] == because}

    def page(self) -> str:
        found = self.post("/artifacts/latest/filter", artifacts={"key": {"any_": [f"run-{RUN}"]}})
        return found[0]["data"] if found else ""

    def automations(self) -> dict[str, dict[str, Any]]:
        return {automation["name"]: automation for automation in self.post("/automations/filter")}

    def switch(self, name: str, *, enabled: bool) -> None:
        self._ask("PATCH", f"/automations/{self.automations()[name]['id']}", {"enabled": enabled})

    def events(self, name: str) -> list[dict[str, Any]]:
        found = self.post("/events/filter", filter={"event": {"name": [name]}})
        return [event for event in found["events"] if event["payload"]["run"] == RUN]


@pytest.fixture
def server(prefect_api: str) -> Iterator[Server]:
    """The shared server, with the automations on that `prefect.yaml` leaves off."""
    server = Server(prefect_api)
    assert {name for name in ON_ROLLOUT if not server.automations()[name]["enabled"]} == set(ON_ROLLOUT)
    assert server.automations()[ZOMBIES]["enabled"]
    for name in ON_ROLLOUT:
        server.switch(name, enabled=True)
    yield server
    for name in ON_ROLLOUT:
        server.switch(name, enabled=False)


@pytest.mark.timeout(1200)
def test_a_run_is_paused_suspended_stopped_and_its_last_policy_becomes_the_champion(
    server: Server, services_home: Path, prefect_api: str, base_model: Path
) -> None:
    home = Home(services_home, prefect_api)

    def log() -> RunLog:
        return open_run(LocalStore(services_home / "store"), RUN)

    def wait(what: Callable[[], Found]) -> Found:
        deadline = time.monotonic() + PATIENCE
        while not (found := _quiet(what)):
            assert time.monotonic() < deadline, f"{server.page()}\n{home.worker_logs()}"
            time.sleep(0.1)
        return found

    parameters = {
        "run": RUN,
        "batch_size": 4,
        "n_samples": 4,
        "model": str(base_model),
        "settings": {
            "engine": {"kind": "scripted", "max_model_len": 64},
            "sampling": {"max_tokens": 8},
            "evaluation": {"num_tasks": 8, "every": 0, "gate_score": 0.0, "gate_gap": 1e9},
        },
    }
    training = server.start("train-grpo/train", steps=NEVER, **parameters)
    wait(lambda: log().state.step >= 2)
    wait(lambda: server.evaluated(A_POLICY_IS_SERVED))  # of a training without an end
    server.switch(A_POLICY_IS_SERVED, enabled=False)

    # A pause by the command is seen in Prefect, where it is ended.
    assert "pauses at step" in home.run("pause", RUN, "--reason", "lunch").stdout
    wait(lambda: server.state(training) == "Paused")
    wait(lambda: "**paused**: lunch" in server.page())
    assert home.status(RUN)["paused"] == "lunch"
    server.post(f"/flow_runs/{training}/resume")
    wait(lambda: log().state.paused == "")
    reached = log().state.step
    wait(lambda: log().state.step > reached)
    assert _steps_while_paused(log()) <= 1, "the one that was being taken"

    # And a pause in Prefect is ended by the command.
    server.post(f"/flow_runs/{training}/set_state", state={"type": "PAUSED"})
    wait(lambda: log().state.paused == "paused in Prefect")
    assert "goes on from step" in home.run("resume", RUN).stdout
    wait(lambda: server.state(training) == "Running")
    reached = log().state.step
    wait(lambda: log().state.step > reached)

    # The button in Prefect's UI: the process ends, and another one goes on.
    process = _family(services_home)
    suspended = {"type": "PAUSED", "name": "Suspended", "state_details": {"pause_reschedule": True}}
    server.post(f"/flow_runs/{training}/set_state", state=suspended)
    wait(lambda: not is_training(log()))
    assert psutil.wait_procs(process, timeout=PATIENCE)[1] == [], "engine and trainer are gone with it"
    reached = log().state.step
    assert server.state(training) == "Suspended"
    server.post(f"/flow_runs/{training}/resume")
    wait(lambda: log().state.step > reached)

    # Stopped by the command, it is cancelled in Prefect.
    process = _family(services_home)
    assert "has stopped at step" in home.run("stop", RUN).stdout
    assert psutil.wait_procs(process, timeout=PATIENCE)[1] == []
    wait(lambda: server.state(training) == "Cancelled")
    assert "Crashed" not in server.history(training), "of which people would be notified"
    assert wait(lambda: server.ended_tasks(training)) == {"Completed", "Cancelled"}, "what its time line shows"
    state = log().state
    assert state.ended is not None and state.ended.outcome == "stopped"
    assert f"| step | {state.step} of {NEVER}, **stopped** |" in server.page()
    shown = _mlflow_run(services_home)
    assert (shown.info.status, shown.data.tags["millrace.run_id"]) == ("KILLED", RUN)
    assert shown.data.metrics["train/loss"] == state.steps[-1].metrics["loss"], "it has the last step"
    wait(lambda: "continuing run" in server.messages(training))
    assert state.counters()["submitted"] == sum(
        state.counters()[key] for key in ("trained", "stale", "failed", "pending")
    )

    # To its end: the last policy is evaluated because of the event, and passes the run's gate.
    last = state.step + 2
    again = server.start("train-grpo/train", steps=last, **parameters)
    wait(lambda: server.state(again) == "Completed")
    wait(lambda: "champion" in log().state.aliases and log().state.aliases["champion"].version == last)
    wait(lambda: last in server.evaluated(A_TRAINING_HAS_FINISHED))
    assert f"| step | {last} of {last} |" in server.page()
    [event] = wait(lambda: server.events("millrace.training.finished"))
    assert event["payload"]["version"] == last

    # A gate that is too high says so, and leaves the champion.
    asked = server.start("evaluate/eval", run=RUN, version=last, gate_score=2.0)
    wait(lambda: server.state(asked) == "Completed")
    [event] = wait(lambda: server.events("millrace.gate.failed"))
    assert "below 2" in event["payload"]["problems"][0] and event["payload"]["version"] == last
    assert log().state.aliases["champion"].version == last


def _mlflow_run(home: Path) -> Any:
    """The run in the MLflow of a state folder."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{home / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("millrace")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id], filter_string=f"attributes.run_name = '{RUN}'")
    return run


def _steps_while_paused(log: RunLog) -> int:
    """Committed between the first pause and its end."""
    bodies = [entry.body for entry in log.entries if isinstance(entry.body, Pause | Resume | Step)]
    first = next(place for place, body in enumerate(bodies) if isinstance(body, Pause))
    end = next(place for place, body in enumerate(bodies) if isinstance(body, Resume))
    return end - first - 1


def _family(home: Path) -> list[psutil.Process]:
    """The process that trains the run, and everything below it."""
    process = psutil.Process(int((home / f"store/runs/{RUN}/trainer.lock").read_text()))
    return [process, *process.children(recursive=True)]


def _quiet(what: Callable[[], Found]) -> Found | None:
    """Null while there is no such run yet."""
    try:
        return what()
    except FileNotFoundError:
        return None
