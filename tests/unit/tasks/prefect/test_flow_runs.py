"""A flow run is lost when its process is gone, and not when another one has its number or it needs none."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import Running, State, Suspended

from tasks.prefect.flow_runs import _is_lost


def _flow_run(flow_run_id: uuid.UUID, pid: str | None, state: State | None = None) -> FlowRun:
    return FlowRun(id=flow_run_id, flow_id=uuid.uuid4(), infrastructure_pid=pid, state=state or Running())


@pytest.fixture
def process() -> Iterator[tuple[uuid.UUID, subprocess.Popen[bytes]]]:
    """A process that a worker might have started."""
    flow_run = uuid.uuid4()
    process = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        env={**os.environ, "PREFECT__FLOW_RUN_ID": str(flow_run)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield flow_run, process
    process.kill()
    process.communicate()


def test_a_process_that_runs_is_not_lost_and_one_that_was_killed_is(
    process: tuple[uuid.UUID, subprocess.Popen[bytes]],
) -> None:
    flow_run, running = process
    assert not _is_lost(_flow_run(flow_run, str(running.pid)))
    running.kill()
    assert running.wait() and _is_lost(_flow_run(flow_run, str(running.pid)))


def test_a_process_that_inherited_the_number_is_another_one(
    process: tuple[uuid.UUID, subprocess.Popen[bytes]],
) -> None:
    assert _is_lost(_flow_run(uuid.uuid4(), str(process[1].pid)))


@pytest.mark.parametrize("name", [None, "", "machine:3fa1b2", "millrace:millrace-run-x7"])
def test_what_did_not_start_as_a_process_here_is_left_alone(name: str | None) -> None:
    assert not _is_lost(_flow_run(uuid.uuid4(), name))


def test_a_suspended_flow_run_has_no_process_and_needs_none() -> None:
    assert not _is_lost(_flow_run(uuid.uuid4(), "999999999", Suspended()))
