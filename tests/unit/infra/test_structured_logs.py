"""With MILLRACE_LOG_FORMAT=json every message of ours is a JSON object that says where it is from."""

from __future__ import annotations

import io
import json
import logging
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from infra.environment import prepare_environment
from infra.structured_logs import log_driver, logs_are_json


@pytest.fixture
def ours() -> Any:
    logger = logging.getLogger("millrace")
    before = (logger.handlers[:], logger.level)
    yield logger
    logger.handlers[:], logger.level = before


def _lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_says_when_what_and_where(ours: logging.Logger) -> None:
    stream, log = io.StringIO(), SimpleNamespace(step=12)
    log_driver(lambda: {"run": "arithmetic", "step": log.step + 1}, stream)
    logging.getLogger("millrace.train").warning("shard %s is rotten\nthrough", "s1", extra={"shard": "s1"})
    log.step = 13
    logging.getLogger("millrace.train").info("on we go")
    first, second = _lines(stream)
    assert datetime.fromisoformat(first.pop("time")).tzinfo == UTC
    assert first == {
        "level": "WARNING", "logger": "millrace.train", "message": "shard s1 is rotten\nthrough", "shard": "s1",
        "run": "arithmetic", "step": 13,
    }  # fmt: skip
    assert (second["step"], "shard" in second) == (14, False), "it is asked at each message what is known"


def test_the_session_takes_the_place_of_what_knew_less_and_a_message_comes_before_both(ours: logging.Logger) -> None:
    early, late = io.StringIO(), io.StringIO()
    log_driver(dict, early)
    log_driver(lambda: {"run": "r", "step": 1}, late)
    ours.info("once")
    ours.error("about another step", extra={"step": 7})
    assert (_lines(early), [line["run"] for line in _lines(late)]) == ([], ["r", "r"])
    assert [line["step"] for line in _lines(late)] == [1, 7]


def test_an_unknown_format_is_an_error_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_LOG_FORMAT", "yaml")
    with pytest.raises(ValueError, match="MILLRACE_LOG_FORMAT='yaml': there are 'text', the default, and 'json'"):
        prepare_environment()
    monkeypatch.delenv("MILLRACE_LOG_FORMAT")
    assert not logs_are_json()
