"""Log messages as one JSON object per line: `MILLRACE_LOG_FORMAT=json`.

In: a function that returns facts about the process, called for each message. Out: a handler whose lines have `time`
(ISO, UTC), `level`, `logger`, `message`, the message's `extra` (`shard`), and the facts:

    driver   {"run": "arithmetic", "session": "69b2b93bcd51", "step": 13, …}       step: the current round
    worker   {"run": "arithmetic", "worker": "rollout-0", "call": "collect", …}
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TextIO

from settings.errors import InvalidInput

CALL: ContextVar[dict[str, Any]] = ContextVar("millrace_call", default={})  # noqa: B039 - never changed in place
"""The call that the current task serves: `call`, and the `step` of its argument."""

Facts = Callable[[], dict[str, Any]]


def logs_are_json() -> bool:
    """True if `MILLRACE_LOG_FORMAT` is "json". Raises `ValueError` unless it is "text", "json" or unset."""
    log_format = os.environ.get("MILLRACE_LOG_FORMAT", "text")
    if log_format not in ("text", "json"):
        raise InvalidInput(f"MILLRACE_LOG_FORMAT={log_format!r}: there are 'text', the default, and 'json'")
    return log_format == "json"


def json_handler(stream: TextIO, facts: Facts) -> logging.Handler:
    """A handler that writes JSON lines; `facts` is called for each line."""
    from pythonjsonlogger.json import JsonFormatter

    class _Formatter(JsonFormatter):
        def add_fields(self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
            super().add_fields(log_data, record, message_dict)
            for name, value in {**facts(), **CALL.get()}.items():
                log_data.setdefault(name, value)  # the message's own values win

    handler = logging.StreamHandler(stream)
    renamed = {"levelname": "level", "name": "logger"}
    handler.setFormatter(_Formatter("{levelname}{name}{message}", style="{", rename_fields=renamed, timestamp="time"))
    return handler


def log_driver(facts: Facts, stream: TextIO) -> None:
    """Write all messages of Millrace from INFO on to `stream` as JSON. A later call replaces an earlier one."""
    millrace = logging.getLogger("millrace")
    millrace.setLevel(logging.INFO)
    for handler in [handler for handler in millrace.handlers if handler.get_name() == "millrace-json"]:
        millrace.removeHandler(handler)
    handler = json_handler(stream, facts)
    handler.set_name("millrace-json")
    millrace.addHandler(handler)
