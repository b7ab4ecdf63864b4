"""Which task runs of a flow that has ended are waited for, and for how long; how those end that are cut off."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import httpx
import pytest
from prefect import Task, task_engine
from prefect.client.orchestration import PrefectClient
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL, PREFECT_LOGGING_TO_API_ENABLED, temporary_settings

from tasks.prefect import task_runs
from tasks.prefect.run_logs import is_no_end
from tasks.prefect.task_runs import cut_off_is_cancelled, expect_task_runs, task_runs_are_recorded


class Server:
    """Answers how many task runs are final; None as if it were dead."""

    def __init__(self, counts: Iterator[int | None]) -> None:
        self.counts, self.filters = counts, list[dict[str, Any]]()

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def request(self, method: str, path: str, json: dict[str, Any]) -> SimpleNamespace:
        self.filters.append(json)
        if (count := next(self.counts)) is None:
            raise httpx.ConnectError("All connection attempts failed")
        return SimpleNamespace(json=lambda: count)


@pytest.mark.parametrize(
    ("keys", "counts", "is_recorded", "num_asked"),
    [
        ({"train": 2, "collect": 0}, [1, 3, 4], True, 3),
        ({"train": 2, "collect": 0}, [3, None], False, 2),
        ({"train": "of another machine"}, [0], True, 1),
    ],
    ids=["each is waited for", "one that has died is not", "only those that began here"],
)
def test_the_task_runs_that_a_flow_began_are_waited_for(
    keys: dict[str, Any], counts: list[int | None], is_recorded: bool, num_asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow_run, server = uuid4(), Server(iter(counts))
    context = SimpleNamespace(flow_run=SimpleNamespace(id=flow_run), task_run_dynamic_keys=keys)
    monkeypatch.setattr(FlowRunContext, "get", lambda: context)
    monkeypatch.setattr(task_runs, "get_client", lambda: server)
    monkeypatch.setattr(task_runs, "_LOOK_SECONDS", 0)
    expect_task_runs()
    assert asyncio.run(task_runs_are_recorded()) is is_recorded
    assert [each["flow_runs"] for each in server.filters] == [{"id": {"any_": [str(flow_run)]}}] * num_asked
    assert asyncio.run(task_runs_are_recorded()), "it is not waited for twice"


def test_the_wait_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_runs, "_expected", {str(uuid4()): 1})
    monkeypatch.setattr(task_runs, "get_client", lambda: Server(iter(())))
    assert not asyncio.run(task_runs_are_recorded(at_most_seconds=0))


async def _waits() -> None:
    await asyncio.Event().wait()


async def _fails() -> None:
    raise KeyError("no room")


async def _dies() -> None:
    raise BaseException("no memory")


@pytest.mark.parametrize(("work", "name"), [(_waits, "Cancelled"), (_fails, "Failed"), (_dies, "Crashed")])
async def test_a_task_that_is_cut_off_is_cancelled_and_no_error(
    work: Any, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In orange, as Crashed, it would look on the time line as if its process had died."""
    states: list[str] = []
    monkeypatch.setattr(task_engine, "exception_to_crashed_state", task_engine.exception_to_crashed_state)
    monkeypatch.setattr(
        task_engine, "emit_task_run_state_change_event", lambda **event: states.append(event["validated_state"].name)
    )

    async def answers(_: PrefectClient) -> None: ...

    monkeypatch.setattr(PrefectClient, "raise_for_api_version_mismatch_once", answers)
    quiet = {PREFECT_API_URL: "http://127.0.0.1:9/api", PREFECT_LOGGING_TO_API_ENABLED: False}
    cut_off_is_cancelled()
    with temporary_settings(quiet), pytest.raises(BaseException) as raised:
        await asyncio.wait_for(Task(work, persist_result=False)(), 1.0 if work is _waits else 60)
    assert states[-1] == name, states
    shown = [record for record in caplog.records if record.levelno >= logging.ERROR and is_no_end(record)]
    assert bool(shown) == (name != "Cancelled") and isinstance(raised.value, TimeoutError) == (work is _waits)
