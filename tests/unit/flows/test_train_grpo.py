"""The run's own evaluation happens when it is due, whatever else was evaluated by hand."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from flows import train_grpo
from settings.run_file import default_values, make_config
from storage.log.entries import Evaluation
from tasks.session import RunSession
from tests.builders import a_log, a_session


def test_only_an_evaluation_of_the_same_version_and_split_replaces_the_due_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    config = make_config({**default_values(), "workflow": "examples.arithmetic:Arithmetic"}, source="test")
    session = a_session(log := a_log())
    asked: list[Any] = []

    async def evaluate_policy(session: RunSession, *, version: int, settings: Any) -> None:
        asked.append((version, settings.split))

    def evaluated(split: str, **fields: Any) -> None:
        score = {"score": 0.5, "num_tasks": 1, "num_failed": 0, "seconds": 1.0, "shard_id": f"eval-{split}-{fields}"}
        log.append(Evaluation(version=0, split=split, **{**score, **fields}))

    monkeypatch.setattr(train_grpo, "evaluate_policy", evaluate_policy)
    own = config.evaluation.split
    evaluated(f"not-{own}")
    evaluated(own, n_samples=7)  # by hand
    asyncio.run(train_grpo.evaluate_if_due(session, config))
    assert asked == [(0, own)]
    evaluated(own)
    asyncio.run(train_grpo.evaluate_if_due(session, config))
    assert asked == [(0, own)]
