"""A run in a notebook, where a store may be a path as well as a text."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

import millrace
from cli.run.flow import _awaited
from cli.run.notebook import _outside_of_a_loop
from cli.terminal.console import open_console
from settings.errors import InvalidInput, NotFound
from storage.log.run_log import RunLog
from storage.objects.object_store import LocalStore


def test_a_store_is_a_path_or_a_text_and_a_run_that_is_not_there_is_named(log: RunLog, store: LocalStore) -> None:
    for place in (store.root, str(store.root), ""):
        assert millrace.open_run("run", store=place).name == log.run_id
    for name in (None, "other"):
        with pytest.raises(NotFound, match=f"no run '{name}' in .*; runs there: run"):
            millrace.open_run(name, store=store.root)  # type: ignore[arg-type]


def test_a_policy_that_is_asked_for_by_no_whole_number_is_named(log: RunLog, store: LocalStore) -> None:
    for version in ("3", 3.0, [3]):
        with pytest.raises(InvalidInput, match="is no whole number"):
            millrace.open_run("run", store=store.root).policy(version)  # type: ignore[arg-type]


def test_what_is_of_another_type_than_a_call_takes_is_a_sentence(log: RunLog, store: LocalStore) -> None:
    run: Any = millrace.open_run("run", store=store.root)
    calls: dict[str, Callable[[], Any]] = {
        "5 is no run file: name a file, or give its content": lambda: millrace.train(5),  # type: ignore[arg-type]
        r"\['a.toml'\] is no run file": lambda: millrace.train(["a.toml"]),  # type: ignore[arg-type]
        "<run 'run' at step 0> is no name of a run: write its name, such as 'run'": lambda: millrace.evaluate(run),
        "3 is no name of a run": lambda: millrace.replay(3),  # type: ignore[arg-type]
        "first = '1' is no whole number": lambda: millrace.replay("run", first="1"),  # type: ignore[arg-type]
        "last = 1.5 is no whole number": lambda: millrace.replay("run", last=1.5),  # type: ignore[arg-type]
        "b'SELECT 1' is no SQL": lambda: run.sql(b"SELECT 1"),
        "parameters = 5 is no list": lambda: run.sql("SELECT ?", 5),
    }
    for sentence, call in calls.items():
        with pytest.raises(InvalidInput, match=sentence):
            call()


def test_an_interrupt_of_a_cell_ends_the_flow_in_its_thread(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Jupyter runs a cell: inside a loop, where the interrupt comes to a thread that only waits."""
    for name in ("millrace", "prefect.flow_runs", "prefect.task_runs"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)  # and put back at the end
    monkeypatch.setattr(logging.getLogger("prefect"), "level", logging.getLogger("prefect").level)

    async def flow() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    def work() -> dict[str, Any]:
        asyncio.run(_awaited(flow(), open_console(), lambda: None))
        return {}

    async def cell() -> None:
        _outside_of_a_loop(work)

    loop = asyncio.new_event_loop()
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process of pytest-xdist ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(cell())
    finally:
        signal.signal(signal.SIGINT, usual)
    loop.close()
    assert "stopping; the same command continues" in capsys.readouterr().out
