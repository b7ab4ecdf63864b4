"""A flow run is lost when its process is gone, and not when another one has its number or it needs none."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import Running, State, Suspended

from tasks.prefect.flow_runs import _is_lost


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
