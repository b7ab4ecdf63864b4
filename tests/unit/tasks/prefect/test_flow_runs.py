"""A flow run is lost when its process is gone, and not when another one has its number or it needs none."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import Running, State, Suspended

from storage.log.entries import Pause, Session
from storage.log.runs import create_run, open_run, trainer_lock
from storage.objects.opening import open_store
from tasks.prefect.flow_runs import _is_killed_training, _is_lost
from tests.builders import local_store


def _flow_run(flow_run_id: uuid.UUID, pid: str | None, state: State | None = None) -> FlowRun:
    return FlowRun(id=flow_run_id, flow_id=uuid.uuid4(), infrastructure_pid=pid, state=state or Running())


def test_a_flow_run_is_lost_when_its_process_is_gone_or_is_another_one() -> None:
    flow_run = uuid.uuid4()
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        env={**os.environ, "PREFECT__FLOW_RUN_ID": str(flow_run)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert not _is_lost(_flow_run(flow_run, str(process.pid)))
        assert _is_lost(_flow_run(uuid.uuid4(), str(process.pid))), "the number is inherited"
        process.kill()
        assert process.wait() and _is_lost(_flow_run(flow_run, str(process.pid)))


@pytest.mark.parametrize(
    ("name", "state"),
    [
        *((name, Running()) for name in (None, "", "machine:3fa1b2", "millrace:millrace-run-x7")),
        ("999999999", Suspended()),
    ],
)
def test_what_did_not_start_as_a_process_here_or_needs_none_is_left_alone(name: str | None, state: State) -> None:
    assert not _is_lost(_flow_run(uuid.uuid4(), name, state))


def test_a_training_of_a_command_is_lost_when_its_log_says_that_nothing_trains_it(tmp_path: Path) -> None:
    store = local_store(tmp_path)
    log = create_run(store, "run", {"workflow": "w:W"})
    asked = {"workflow": "w:W", "run": "run", "store": store.uri}

    def is_lost(pid: str | None = None, **changes: Any) -> bool:
        flow_run = _flow_run(uuid.uuid4(), pid)
        flow_run = flow_run.model_copy(update={"parameters": {**asked, **changes}})
        return _is_killed_training(flow_run, lambda store, run: open_run(open_store(store), run))

    assert not is_lost(), "it has not begun yet"
    with trainer_lock(log):
        log.append(Session(id="s", code_version="", reward_sha256="", steps=3, host=platform.node()))
        assert not is_lost()
    assert is_lost()
    assert not is_lost("machine:3fa1b2") and not is_lost(run="another") and not is_lost(store="s3://")
    log.append(Pause(reason="lunch"))
    assert not is_lost(), "it may be started again, and stays paused"
