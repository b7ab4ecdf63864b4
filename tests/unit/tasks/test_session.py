"""A session that ends before its last step says in the run's log why, before its processes are gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import tasks.session
from settings.errors import InvalidInput
from storage.log.entries import End
from storage.log.runs import open_run
from storage.objects.object_store import LocalStore, StoreError
from tasks.session import training_session
from tests.builders import a_config


@pytest.mark.parametrize(
    ("error", "recorded"),
    [
        (InvalidInput("engine.max_model_len is too long"), "InvalidInput: engine.max_model_len is too long"),
        (ExceptionGroup("beside", [ValueError("all 8 rewards are null")]), "ValueError: all 8 rewards are null"),
        (asyncio.CancelledError(), ""),
    ],
)
@pytest.mark.parametrize("at_start", [False, True])
async def test_why_a_session_ended_is_in_the_log(
    error: BaseException, recorded: str, at_start: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ends: list[End | None] = []

    @contextlib.asynccontextmanager
    async def processes(log: Any, *_: Any, **__: Any) -> AsyncIterator[None]:
        if at_start:
            raise error
        try:
            yield
        finally:
            ends.append(log.state.end)  # the processes still run

    monkeypatch.setattr(tasks.session, "_session", processes)
    config = a_config(store=str(tmp_path), steps=3, workflow="examples.arithmetic:Arithmetic")
    with pytest.raises(type(error)):
        async with training_session(config):
            raise error
    state = open_run(LocalStore(tmp_path), config.run).state
    assert state.end is not None and state.end.session_id == state.sessions[-1].id
    assert state.end.error.partition(" at ")[0] == recorded and ends == ([] if at_start else [state.end])
    assert sum(isinstance(entry.body, End) for entry in state.history) == 1


async def test_a_store_that_fails_does_not_hide_the_error_it_caused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    @contextlib.asynccontextmanager
    async def processes(log: Any, *_: Any, **__: Any) -> AsyncIterator[None]:
        def append(_: Any) -> None:
            raise StoreError("the store is away")

        log.append = append
        yield

    monkeypatch.setattr(tasks.session, "_session", processes)
    with pytest.raises(KeyError, match="answr"):
        async with training_session(a_config(store=str(tmp_path), workflow="examples.arithmetic:Arithmetic")):
            raise KeyError("answr")
    assert "does not say how this session ended" in caplog.text
