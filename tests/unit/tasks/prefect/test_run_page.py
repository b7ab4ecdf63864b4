"""A run's page in Prefect is made of its log."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from storage.log.entries import End, Pause
from storage.log.promotion import promote
from storage.log.run_log import RunLog
from storage.log.runs import run_config
from tasks.prefect import run_page
from tasks.prefect.run_page import RunPage, artifact_key, summary
from tests.builders import a_log, a_shard, a_step, a_summary


def _log(steps: int) -> RunLog:
    log = a_log()
    for number in range(1, steps + 1):
        log.append(a_shard(f"s{number}", [a_summary(number)]))
        step = a_step(log.state, trained=[f"0.task{number}"])
        log.append(replace(step, metrics={"reward": number / 100, "round_seconds": 1.5, "loss": 1.0}))
    return log


def _summary(log: RunLog, mlflow: str = "", mlflow_run: str = "") -> str:
    return summary(log, run_config(log), steps=40, mlflow=mlflow, mlflow_run=mlflow_run)


def test_the_page_shows_the_newest_steps_first_and_not_all_of_them() -> None:
    assert "| step | 0 of 40 |" in _summary(a_log()) and "tokens/s" not in _summary(a_log())
    rows = [line for line in _summary(_log(12)).splitlines() if line.startswith(("| 1", "| 2"))]
    assert rows[0] == "| 12 | 0.12 |  |  |  | 1.5 |" and rows[1].startswith("| 11 ")
    assert not any(row.startswith("| 2 |") for row in rows)


def test_the_page_says_what_a_person_looks_for() -> None:
    log = _log(2)
    promote(log, 1, max_gap=1.0)
    log.append(Pause(reason="a|b"))
    text = _summary(log, mlflow="http://host")
    assert "**paused**: a\\|b" in text and "| champion | policy 1 |" in text
    assert "(http://host/#/models/run?workflowType=machine_learning)" in text and "millrace report run" in text
    assert "2 submitted, 2 trained" in text
    log.append(End(session_id="first", outcome="failed", reason="KeyError: 'a'\n  at env.py:3 in run"))
    assert "| step | 2 of 40, **failed**: KeyError: 'a' at env.py:3 |" in _summary(log)


def test_the_page_links_the_run_in_mlflow_and_its_report_once_they_can_be_there() -> None:
    log, page = _log(1), "#/experiments/1/runs/abc"
    text = _summary(log, mlflow="http://host", mlflow_run=page)
    view = "?workflowType=machine_learning"
    assert f"(http://host/{page}{view})" in text and f"(http://host/{page}/artifacts{view})" in text
    assert "/runs/" not in _summary(log, mlflow="http://host") and "/runs/" not in _summary(log, mlflow_run=page)


def _page(log: RunLog) -> RunPage:
    return RunPage(log, steps=40, tracking="http://mlflow", mlflow_run=lambda: "")


def test_a_server_that_is_down_costs_one_warning_and_hears_of_it_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log, written, is_up = _log(1), [], False

    async def write(text: str, **_: Any) -> None:
        if not is_up:
            raise ConnectionError("refused")
        written.append(text)

    async def nothing(*_: Any, **__: Any) -> int:
        return 1

    monkeypatch.setattr(run_page, "acreate_markdown_artifact", write)
    monkeypatch.setattr(run_page, "acreate_progress_artifact", nothing)
    monkeypatch.setattr(run_page, "FlowRunContext", type("_", (), {"get": staticmethod(object)}))
    monkeypatch.setattr(run_page, "LEAST_PAUSE", 0.0)
    page = _page(log)
    asyncio.run(page.update())
    log.append(Pause(reason="lunch"))
    asyncio.run(page.update())
    assert len([record for record in caplog.records if "page" in record.message]) == 1
    is_up = True
    asyncio.run(page.update(finished=True))
    assert len(written) == 1 and "lunch" in written[0]


def test_nothing_is_written_outside_of_a_flow_run_and_keys_are_what_prefect_takes() -> None:
    asyncio.run(_page(_log(1)).update(finished=True))
    assert artifact_key("My_run.2-b") == "my-run-2-b"
