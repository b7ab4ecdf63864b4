"""Evaluations through the real command: beside a training, killed in the middle, without one attempt that works, and
one that fails its gate, of which a notification tells."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect.blocks.system import Secret
from prefect.settings import PREFECT_API_URL, temporary_settings

from storage.log.entries import Evaluation, Step
from storage.log.run_log import RunLog
from storage.log.runs import open_run
from storage.objects.object_store import LocalStore
from storage.records import NOT_SAMPLED
from storage.shards.shards import read_shard
from tasks.prefect.notifications import failure_automations
from tests.conftest import PROJECT, SCRIPTED, Home
from tests.flows.meetings import GO
from tests.prefect_api import ask

PATIENCE = 200.0  # seconds


def _log(home: Home) -> RunLog:
    return open_run(LocalStore(home.path / "store"), "scripted")


def _versions(log: RunLog, evaluation: Evaluation) -> set[int]:
    """Policies that sampled the tokens of an evaluation."""
    rows = [read_shard(log, log.state.shards[shard_id]).to_pylist() for shard_id in evaluation.shard_ids]
    return {v for shard in rows for row in shard for v in row["weight_versions"]} - {NOT_SAMPLED}


def test_training_goes_on_while_another_process_evaluates_an_older_policy(home: Home, base_model: Path) -> None:
    """Each waits for the other: the steps from 3 on for the evaluation to begin, and the evaluation for step 5.

    Training and rollouts overlap too, and stay within the bound.
    """
    changes = ["workflow=tests.flows.meetings:Meeting", "evaluation.every=0", "rollout.attempt_timeout=120"]
    changes += ["max_staleness=2"]
    training = home.start("train", str(SCRIPTED), f"model={base_model}", *changes)
    home.wait(training, lambda: (home.path / "store/runs/scripted/run.json").exists())
    home.wait(training, lambda: _log(home).state.live is not None)
    asked = ["--version", "0", "--n-samples", "2", "--temperature", "1"]
    shown = json.loads(home.run("eval", "scripted", *asked, "--json").stdout)
    assert training.wait(timeout=PATIENCE) == 0, home.said()
    log = _log(home)
    [evaluation] = log.state.evaluations
    assert log.state.step == 6 and log.state.counters()["failed"] == 0 and log.state.counters()["trained"] == 24
    assert max(step.metrics["staleness_max"] for step in log.state.steps) <= 2
    assert (evaluation.version, evaluation.num_tasks, evaluation.num_failed) == (0, 8, 0)
    assert _versions(log, evaluation) == {0}
    kinds = [entry.body for entry in log.entries if isinstance(entry.body, Step | Evaluation)]
    assert kinds.index(evaluation) >= 5, "five steps were taken before it ended"
    assert shown["score"] == evaluation.score and shown["pass_at"] == evaluation.pass_at
    assert set(shown["pass_at"]) == {"1", "2"} and shown["run"] == "scripted"


@pytest.fixture
def trained(home: Home, base_model: Path, request: pytest.FixtureRequest) -> Home:
    """A run of one step, not evaluated, with small shards, on a workflow of `tests.flows.meetings`."""
    changes = ["steps=1", "evaluation.every=0", "evaluation.num_tasks=200", "rollout.shard_bytes=1024"]
    home.run("train", str(SCRIPTED), f"model={base_model}", f"workflow=tests.flows.meetings:{request.param}", *changes)
    return home


@pytest.mark.parametrize("trained", ["Paused"], indirect=True)
def test_a_killed_evaluation_leaves_no_score_and_the_next_one_is_whole(trained: Home) -> None:
    evaluating = trained.alone().start("eval", "scripted")
    trained.wait(evaluating, lambda: any(shard.is_eval for shard in _log(trained).state.shards.values()))
    os.killpg(evaluating.pid, signal.SIGKILL)
    evaluating.wait(timeout=200)
    state = _log(trained).state
    left = {shard.id for shard in state.shards.values() if shard.is_eval}
    assert left and not state.evaluations and trained.status("scripted")["accuracy_after"] is None
    (trained.path / GO).touch()
    shown = trained.run("eval", "scripted").stdout
    log = _log(trained)
    [evaluation] = log.state.evaluations
    assert evaluation.num_tasks == 200 and evaluation.num_shards > 3 and left.isdisjoint(evaluation.shard_ids)
    groups = [group.id for shard_id in evaluation.shard_ids for group in log.state.shards[shard_id].groups]
    assert len(groups) == len(set(groups)) == 200 and _versions(log, evaluation) == {1}
    assert f"policy 1 of run scripted, split 'test': held-out {evaluation.score:.3f} ±" in shown
    assert log.state.counters()["submitted"] == log.state.counters()["trained"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["Broken"], indirect=True)
def test_an_evaluation_in_which_every_attempt_fails_is_an_error(trained: Home) -> None:
    done = trained.run("eval", "scripted", check=False)
    assert done.returncode == 2
    assert "the evaluation of policy 1 on split 'test' failed: all 200 attempts did (env_error 200)" in done.stderr
    assert "ConnectionError: no database" in done.stderr and "held-out" not in done.stdout
    status = trained.status("scripted")
    assert status["accuracy_after"] is None and status["failed_evaluations"] == 1


class Inbox(ThreadingHTTPServer):
    """A webhook that keeps what it is sent."""

    def __init__(self) -> None:
        inbox = self
        self.messages: list[dict[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                inbox.messages.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def address(self) -> str:
        """As Apprise writes it, with a token in the path."""
        return f"json://127.0.0.1:{self.server_port}/t0ken-of-a-test"


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    inbox = Inbox()
    threading.Thread(target=inbox.serve_forever, daemon=True).start()
    yield inbox
    inbox.shutdown()
    inbox.server_close()


@pytest.fixture
def notifying(tmp_path: Path, inbox: Inbox) -> Iterator[Home]:
    """Services of its own, as `make up` starts them with a destination for notifications."""
    home = Home(tmp_path, "")
    home.environment |= {"MILLRACE_NOTIFY": inbox.address}
    del home.environment["PREFECT_API_URL"]
    home.run("up")
    try:
        yield home
    finally:
        home.run("down")


_EVALUATE = """
import asyncio, sys
from infra.environment import prepare_environment
prepare_environment()
from cli.run.flow import use_running_services
use_running_services()
from flows.evaluate import evaluate
asyncio.run(evaluate(run="scripted", gate_score=float(sys.argv[1])))
"""


@pytest.mark.slow
def test_a_notification_tells_of_a_policy_that_fails_its_gate_and_of_a_flow_run_that_fails(
    notifying: Home, inbox: Inbox, base_model: Path
) -> None:
    home, api = notifying, f"{_server(notifying)}/api"

    def evaluated(gate_score: float) -> None:
        command = [sys.executable, "-c", _EVALUATE, str(gate_score)]
        done = subprocess.run(
            command, env=home.environment, cwd=PROJECT, capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stdout + done.stderr + home.worker_logs()

    def messages(*, number: int) -> list[dict[str, Any]]:
        deadline = time.monotonic() + 200
        while len(inbox.messages) < number:
            assert time.monotonic() < deadline, (inbox.messages, _automation_events(api), _log_of(home, "prefect"))
            time.sleep(0.1)
        return inbox.messages

    changes = ["steps=1", "evaluation.every=0", "evaluation.gate_score=2"]
    home.run("train", str(SCRIPTED), f"model={base_model}", *changes)
    home.run("promote", "scripted", "--version", "0")
    assert inbox.messages == []

    # The run's own bar, which no score reaches.
    home.run("eval", "scripted")
    log = _log(home)
    [evaluation] = log.state.evaluations
    [told] = messages(number=1)
    assert told["title"] == "Millrace: policy 1 of run scripted did not pass its gate"
    assert f"It scored {evaluation.score:.3f} on split 'test'; the bar is 2" in told["message"]
    assert f"- it scored {evaluation.score:.3f} on split 'test', below 2\n" in told["message"]
    assert "Now policy 0 stays the champion" in told["message"] and told["type"] == "failure"
    assert log.state.aliases["champion"].version == 0

    # One that passes moves the alias, and is nothing to tell. The next message is that of a flow run without its run.
    evaluated(gate_score=0.0)
    assert _log(home).state.aliases["champion"].version == 1
    deployment = ask("GET", f"{api}/deployments/name/evaluate/eval")["id"]
    start = f"{api}/deployments/{deployment}/create_flow_run"
    ask("POST", start, {"parameters": {"run": "missing"}})
    told = messages(number=2)[1]
    assert told["title"] == "Millrace: flow run missing is Failed" and "Its flow is evaluate." in told["message"]

    # The address is on the server and nowhere else.
    token = inbox.address.rsplit("/", 1)[1]
    said = [file for file in home.path.rglob("*.log") if token in file.read_text(errors="replace")]
    shown = json.dumps(ask("POST", f"{api}/block_documents/filter", {}))
    assert not said and "millrace-notify" in shown and token not in shown
    services = [psutil.Process(service["pid"]) for service in json.loads((home.path / "services.json").read_text())]
    assert len(services) == 3 and not [process for process in services if "MILLRACE_NOTIFY" in process.environ()]
    assert len(inbox.messages) == 2

    # Named as a block it is found again; one that is not there, or cannot notify, is refused.
    with temporary_settings({PREFECT_API_URL: api}):
        by_name = asyncio.run(failure_automations("slack-webhook/millrace-notify"))
        made = ask("POST", f"{api}/automations/filter", {})
        kept = {row["name"]: row["actions"][0].get("block_document_id") for row in made}
        assert [kept[row.name] for row in by_name] == [str(row.actions[0].block_document_id) for row in by_name]
        with pytest.raises(ValueError, match="names a block that the Prefect server does not have"):
            asyncio.run(failure_automations("slack-webhook/nobody"))
        asyncio.run(Secret(value="-").asave("no-notification"))
        with pytest.raises(ValueError, match="names a block that cannot notify"):
            asyncio.run(failure_automations("secret/no-notification"))


def _server(home: Home) -> str:
    services = json.loads((home.path / "services.json").read_text())
    return next(str(service["url"]) for service in services if service["name"] == "prefect")


def _automation_events(api: str) -> Any:
    wanted = {"filter": {"event": {"prefix": ["prefect.automation.action", "millrace."]}}}
    return ask("POST", f"{api}/events/filter", wanted)


def _log_of(home: Home, service: str) -> str:
    return (home.path / "logs" / f"{service}.log").read_text()[-4000:]


def test_up_refuses_an_unusable_destination_before_anything_starts(tmp_path: Path) -> None:
    home = Home(tmp_path, "")
    for wrong in ("gibberish://secret-token", "https://hooks.example.com/secret-token", "nobody"):
        home.environment["MILLRACE_NOTIFY"] = wrong
        done = home.run("up", check=False)
        assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("error: $MILLRACE_NOTIFY is n")
        assert "secret-token" not in done.stderr and not (tmp_path / "services.json").exists()
        assert not (tmp_path / "logs").exists()
