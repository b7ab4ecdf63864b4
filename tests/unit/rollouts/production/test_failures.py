"""Failures are told once per kind, again with a count when it has grown, and never one line each."""

from __future__ import annotations

import pytest

from rollouts.production.failures import MOST_KINDS, REPEAT_SECONDS, Failures
from storage.shards.failed_attempts import FailedAttempt


def _attempts(error: str, count: int = 1) -> list[FailedAttempt]:
    return [FailedAttempt(group_id="0.task", attempt=n, status="env_error", error=error) for n in range(count)]


def test_a_kind_is_logged_at_once_with_its_frames_and_later_in_a_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    failures = Failures()
    error = "KeyError: 'answr'\n  at my/env.py:31 in look_up: f()\n  at my/env.py:12 in run: g()"
    failures.add(_attempts(error))
    failures.add(_attempts(error.replace("answr", "other"), 400))
    now = REPEAT_SECONDS
    failures.add(_attempts(error, 11))
    failures.add(_attempts(error))
    failures.add(_attempts("out of memory", 2))
    frames = "\n  at my/env.py:31 in look_up: f()\n  at my/env.py:12 in run: g()"
    assert caplog.messages == [
        f"1 attempt: KeyError: 'answr' at my/env.py:31{frames}",
        "412 attempts: KeyError: 'answr' at my/env.py:31",
        "2 attempts: out of memory",
    ]


def test_many_kinds_are_counted_together(caplog: pytest.LogCaptureFixture):
    failures = Failures()
    for number in range(10 * MOST_KINDS):
        failures.add(_attempts(f"HTTP {number}"))
    assert len(caplog.messages) == MOST_KINDS + 1
    assert caplog.messages[-1] == f"1 attempt: failures of other kinds, the first is HTTP {MOST_KINDS}"
