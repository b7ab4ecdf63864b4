"""The command as a user types it, and what several tests of it put into a run."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from typer.testing import CliRunner, Result

from cli.main import app
from storage.log.entries import Evaluation
from storage.log.run_log import RunLog
from storage.log.runs import create_run
from storage.objects.object_store import ObjectStore
from storage.records import RolloutGroup
from storage.shards.shards import commit_shard
from tests.builders import BASE, SAMPLING, a_shard, a_step, a_summary, provenance


def typed(line: str, *more: str, status: int = 0, columns: int | None = 300, answer: str = "") -> Result:
    """`millrace LINE MORE …` with lines of `columns`, of any length with None; it must leave with `status`, and
    without a traceback."""
    words = [*shlex.split(line), *more]
    result = CliRunner().invoke(app, words, input=answer, env={"COLUMNS": str(columns) if columns else None})
    assert result.exit_code == status and "Traceback" not in result.output, result.output
    return result


def printed(line: str, *more: str, **options: Any) -> str:
    """What it prints, errors included; `options` as in `typed`."""
    return typed(line, *more, **options).output


def assert_refused(line: str, sentences: dict[str, str]) -> None:
    """`millrace LINE ARGUMENTS` leaves with status 2 and a sentence; `sentences` has arguments and sentence."""
    for arguments, sentence in sentences.items():
        shown = printed(line.format(arguments), status=2)
        assert sentence in shown, f"{arguments}: {shown}"


@contextlib.contextmanager
def running(*words: str, **environment: str) -> Iterator[Any]:
    """`python WORDS …` in a process of its own, with pipes of text; it is killed at the end."""
    variables = {**os.environ, "COLUMNS": "300", "PYTHONUNBUFFERED": "1", **environment}
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, *words], env=variables, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def a_run_of_one_step(store: ObjectStore, config: dict[str, Any], *, run_id: str = "run") -> RunLog:
    """Whose policies and shard have no files."""
    log = create_run(store, run_id, config)
    log.append(BASE)
    log.append(a_shard("s1", [a_summary(1)]))
    log.append(a_step(log.state, trained=["0.task1"]))
    return log


def commit(log: RunLog, shard_id: str, *groups: RolloutGroup, is_eval: bool = False) -> None:
    """A shard of these groups, its file and its entry."""
    provenance_ = provenance(shard_id, run_id=log.run_id)
    commit_shard(log, groups, provenance=provenance_, sampling=SAMPLING, is_eval=is_eval)


def an_evaluation(version: int = 0, score: float = 0.5, **fields: Any) -> Evaluation:
    """A held-out score on four tasks."""
    facts = {"split": "test", "num_tasks": 4, "num_failed": 0, "shard_id": f"e{version}", "seconds": 1.0}
    return Evaluation(version=version, score=score, **{**facts, **fields})
