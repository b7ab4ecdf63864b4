"""A flow run's page has a line per so many steps and per evaluation, and our messages from any thread."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from prefect.logging import handlers
from prefect.states import Cancelled, Failed

from storage.log.entries import Evaluation, Step
from tasks.prefect import run_logs
from tasks.prefect.run_logs import (
    MOST_LINES,
    Progress,
    is_no_error_of_a_user,
    kept_for_prefect,
    log_evaluation,
    log_to_prefect,
)

_EVALUATION: dict[str, Any] = {"version": 3, "split": "test", "num_tasks": 4, "shard_id": "e", "seconds": 1.5}


def _step(number: int) -> Step:
    metrics = {"reward": number / 2, "loss": 0.5, "round_seconds": 1.0}
    return SimpleNamespace(claim=SimpleNamespace(step=number), metrics=metrics)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("steps", "every"), [(1, 1), (40, 1), (100, 1), (101, 2), (500, 5), (2000, 20), (10**6, 10**4)]
)
def test_a_run_of_any_length_has_lines_that_a_person_can_read(steps: int, every: int) -> None:
    assert Progress(steps)._every == every and steps / every <= MOST_LINES


def test_a_line_has_means_over_its_steps_and_the_last_step_has_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="millrace.progress"):
        progress = Progress(103)
        for number in (99, 100, 101, 102, 103):  # a session that continues the run
            progress.took(_step(number))
        log_evaluation(Evaluation(**_EVALUATION, score=0.25, num_failed=1, n_samples=1, standard_error=0.125))
        log_evaluation(Evaluation(**_EVALUATION, score=0.0, num_failed=4, n_samples=1))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "steps 99-100 of 103, reward 49.75, loss 0.5"),
        ("INFO", "steps 101-102 of 103, reward 50.75, loss 0.5"),
        ("INFO", "step 103 of 103, reward 51.5, loss 0.5"),
        ("INFO", "policy 3 scored 0.250 ± 0.125 on 'test': 4 tasks, 1.5 s"),
        ("ERROR", "policy 3: all 4 attempts failed"),
    ]


def test_messages_of_every_thread_go_to_the_flow_run_once_and_with_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(handlers, "emit_api_log", sent.append)
    ours = logging.getLogger("millrace")
    monkeypatch.setattr(ours, "handlers", list(ours.handlers))
    monkeypatch.setattr(ours, "level", logging.WARNING)
    ids = [uuid4(), uuid4()]
    with kept_for_prefect():
        logging.getLogger("millrace.elsewhere").warning("before both")
        log_to_prefect()  # outside of a flow run: nothing
        for flow_run in ids:
            begun = SimpleNamespace(flow_run=SimpleNamespace(id=flow_run))
            monkeypatch.setattr(run_logs, "FlowRunContext", SimpleNamespace(get=lambda begun=begun: begun))
            log_to_prefect()
    thread = threading.Thread(target=lambda: logging.getLogger("millrace.elsewhere").info("from a thread"))
    thread.start()
    thread.join()
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("millrace.elsewhere").exception("failed")
    assert [(log["flow_run_id"], log["level"], log["message"].splitlines()[0]) for log in sent] == [
        (str(ids[0]), logging.WARNING, "before both"),
        (str(ids[1]), logging.INFO, "from a thread"),
        (str(ids[1]), logging.ERROR, "failed"),
    ]
    assert "ValueError: why" in sent[2]["message"] and "Traceback" in sent[2]["message"]


def test_a_flow_run_that_a_user_ended_is_no_error() -> None:
    for state, level in ((Cancelled(message="ended by a user"), "INFO"), (Failed(message="no"), "ERROR")):
        message = f"Finished in state {state}"
        record = logging.LogRecord("prefect.flow_runs", logging.ERROR, "flow_engine.py", 1, message, (), None)
        assert is_no_error_of_a_user(record) and record.levelname == level
