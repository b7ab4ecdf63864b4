"""A Prefect server that is away: before a run it is an error, after one a warning."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from rich.console import Console

from cli.run.flow import run_flow
from cli.run.train import _train
from flows import train_grpo as flow_module
from infra.services import ServiceFailed
from settings.run_file import make_config
from storage.objects.object_store import LocalStore
from tests.builders import a_log

NOBODY = "http://somebody:secret@127.0.0.1:9/api"


def test_a_server_that_is_not_there_is_named_before_anything_starts() -> None:
    begun = []

    async def flow() -> None:
        begun.append(True)

    with (
        patch.dict(os.environ),
        temporary_settings({PREFECT_API_URL: NOBODY}),
        pytest.raises(ServiceFailed, match=r"127\.0\.0\.1:9/api does not answer .*unset PREFECT_API_URL") as raised,
    ):
        run_flow(flow(), Console())
    assert not begun and "secret" not in str(raised.value)


@pytest.mark.parametrize(("steps", "is_over"), [(0, True), (1, False)])
def test_a_server_that_is_away_at_the_end_spoils_a_run_only_where_steps_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, steps: int, is_over: bool
) -> None:
    a_log(LocalStore(tmp_path), run_id="run")
    document = {"workflow": "examples.arithmetic:Arithmetic", "run": "run", "store": str(tmp_path), "steps": steps}
    config = make_config(document, source="test")

    async def away(**_: Any) -> None:
        raise httpx.ConnectError("All connection attempts failed")

    monkeypatch.setattr(flow_module, "train_grpo", away)
    if is_over:
        with caplog.at_level(logging.WARNING):
            asyncio.run(_train(config))
        assert "Prefect does not know that the run has ended" in caplog.text
    else:
        with pytest.raises(httpx.ConnectError):
            asyncio.run(_train(config))
