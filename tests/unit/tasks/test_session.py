"""A session says in the run's log how it ended, and why if something failed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import tasks.session
from settings.errors import InvalidInput, in_one_line
from storage.log.entries import End
from storage.log.run_log import RunLog
from storage.log.runs import open_run
from storage.objects.object_store import LocalStore, StoreError
from tasks.mirror import TrackingMirror
from tasks.session import training_session
from tests.builders import a_config


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> type:
    """In place of Ray's."""

    class NoCluster:
        nodes: list[Any] = []
        refusal: BaseException | None = None

        def __init__(self, **_: Any) -> None: ...

        async def __aenter__(self) -> NoCluster:
            if self.refusal:
                raise self.refusal
            return self

        async def __aexit__(self, *_: Any) -> None: ...

    monkeypatch.setattr(tasks.session, "Cluster", NoCluster)
    monkeypatch.setattr(tasks.session, "check_shares", lambda *_, **__: None)

    async def tell(_: TrackingMirror) -> int:
        return 0

    monkeypatch.setattr(TrackingMirror, "tell", tell)
    return NoCluster


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (InvalidInput("engine.max_model_len is too long"), "failed", "InvalidInput: engine.max_model_len is too long"),
        (
            ExceptionGroup("beside", [ValueError("all 8 rewards are None")]),
            "failed",
            "ValueError: all 8 rewards are None",
        ),
        (asyncio.CancelledError(), "stopped", ""),
    ],
)
@pytest.mark.parametrize("at_start", [False, True])
async def test_how_a_session_ended_is_in_the_log(
    error: BaseException, outcome: str, reason: str, at_start: bool, tmp_path: Path, cluster: Any
):
    cluster.refusal = error if at_start else None
    config = a_config(store=str(tmp_path), steps=3, workflow="examples.arithmetic:Arithmetic")
    with pytest.raises(type(error)):
        async with training_session(config, tasks={"train": [], "test": []}):
            raise error
    state = open_run(LocalStore(tmp_path), config.run).state
    assert state.ended is not None and state.ended.session_id == state.sessions[-1].id
    assert (state.ended.outcome, in_one_line(state.ended.reason).partition(" at ")[0]) == (outcome, reason)
    assert sum(isinstance(entry.body, End) for entry in state.history) == 1


async def test_a_store_that_fails_does_not_hide_the_error_it_caused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cluster: Any
):
    def append(*_: Any) -> None:
        raise StoreError("the store is away")

    with pytest.raises(KeyError, match="answr"):
        config = a_config(store=str(tmp_path), workflow="examples.arithmetic:Arithmetic")
        async with training_session(config, tasks={"train": [], "test": []}):
            monkeypatch.setattr(RunLog, "append", append)
            raise KeyError("answr")
    assert "the end of this session could not be told" in caplog.text
