"""What became of attempts that failed is kept beside their shard, read back, counted by kind, and removed with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from storage.log.entries import Shard
from storage.log.run_log import RunLog
from storage.records import RolloutGroup
from storage.retention.retention import collect_garbage
from storage.retention.rules import Rules
from storage.shards.failed_attempts import FailedAttempt, kinds_of, read_failures
from storage.shards.shards import commit_shard
from tests.builders import SAMPLING, a_group, a_log, a_trajectory, provenance

FILE = "runs/run/failures/s0.arrow"


def _failed(error: str, *, attempt: int = 0, status: str = "env_error", **fields: Any) -> Any:
    return a_trajectory(None, attempt=attempt, status=status, error=error, turns=[], **fields)


def _commit(log: RunLog, *groups: RolloutGroup) -> Shard:
    return commit_shard(log, groups, provenance=provenance("s0"), sampling=SAMPLING)


def test_failed_attempts_are_read_as_they_were():
    log = a_log()
    error = "KeyError: 'x'\n  at my/env.py:3 in run: f()"
    groups = [
        a_group(0, trajectories=[a_trajectory(), _failed(error, attempt=1)]),
        a_group(1, trajectories=[_failed("out of memory", status="engine_error")]),
    ]
    assert read_failures(log, [_commit(log, *groups)]) == [
        FailedAttempt(group_id="0.task0", attempt=1, status="env_error", error=error),
        FailedAttempt(group_id="0.task1", attempt=0, status="engine_error", error="out of memory"),
    ]
    log.store.delete([FILE])
    assert read_failures(log, list(log.state.shards.values())) == []


@pytest.mark.parametrize(
    "attempts",
    [
        [a_trajectory(0.0)],
        [a_trajectory(1.0, status="truncated", error="12 tokens of 12 are used")],
        [_failed("cancelled: 2 updates behind, bound 1", status="cancelled")],
    ],
    ids=["none failed", "truncated", "cancelled"],
)
def test_without_a_failure_there_is_no_file(attempts: Sequence[Any]):
    log = a_log()
    shard = _commit(log, a_group(0, trajectories=attempts))
    assert not log.store.exists(FILE) and read_failures(log, [shard]) == []


def test_the_same_place_and_type_are_one_kind_whatever_the_message():
    errors = ["KeyError: 'a'\n  at e.py:1 in f", "KeyError: 'b'\n  at e.py:1 in f", "KeyError: 'a'\n  at e.py:2 in f"]
    attempts = [FailedAttempt(group_id="g", attempt=n, status="env_error", error=e) for n, e in enumerate(errors)]
    assert [(count, first.id) for count, first in kinds_of(attempts)] == [(2, "g/0"), (1, "g/2")]


def test_the_file_goes_with_its_shard():
    log = a_log()
    _commit(log, a_group(0, trajectories=[a_trajectory(), _failed("KeyError: 'x'", attempt=1)]))
    log.store.put("runs/run/failures/lost.arrow", b"its writer died before the entry")
    collect_garbage(log.store, ["run"], Rules(keep_last=1, orphan_seconds=0.0), dry_run=False)
    assert log.store.exists(FILE) and not log.store.exists("runs/run/failures/lost.arrow")
