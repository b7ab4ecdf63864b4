"""Our log messages as one JSON object per line, for whoever collects logs by machine: `MILLRACE_LOG_FORMAT=json`.

In: what a process knows about itself, asked at each message. Out: a handler whose lines have `time` (ISO, UTC),
`level`, `logger`, `message`, what the message was logged with as `extra` (`shard`), and what is known then:

    driver   {"run": "arithmetic", "session": "69b2b93bcd51", "step": 13, …}       step: the round that is going on
    worker   {"run": "arithmetic", "worker": "rollout-0", "call": "collect", …}
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TextIO

from settings.errors import InvalidInput

CALL: ContextVar[dict[str, Any]] = ContextVar("millrace_call", default={})  # noqa: B039 - nobody changes it in place
"""What the current task of this process was asked: `call`, and the step it is about."""

Facts = Callable[[], dict[str, Any]]


def logs_are_json() -> bool:
    """Whether `MILLRACE_LOG_FORMAT` asks for it. Raises `ValueError` where it asks for anything else."""
    wanted = os.environ.get("MILLRACE_LOG_FORMAT", "text")
    if wanted not in ("text", "json"):
        raise InvalidInput(f"MILLRACE_LOG_FORMAT={wanted!r}: there are 'text', the default, and 'json'")
    return wanted == "json"


def json_handler(stream: TextIO, facts: Facts) -> logging.Handler:
    """A handler that writes JSON lines; `facts` is called for every one of them."""
    from pythonjsonlogger.json import JsonFormatter

    class _Formatter(JsonFormatter):
        def add_fields(self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
            super().add_fields(log_data, record, message_dict)
            for name, value in {**facts(), **CALL.get()}.items():
                log_data.setdefault(name, value)  # what the message itself says comes first

    handler = logging.StreamHandler(stream)
    renamed = {"levelname": "level", "name": "logger"}
    handler.setFormatter(_Formatter("{levelname}{name}{message}", style="{", rename_fields=renamed, timestamp="time"))
    return handler


def log_driver(facts: Facts, stream: TextIO) -> None:
    """Let everything of ours in this process, from INFO on, go to `stream` as JSON; a later call takes its place."""
    ours = logging.getLogger("millrace")
    ours.setLevel(logging.INFO)
    for handler in [handler for handler in ours.handlers if handler.get_name() == "millrace-json"]:
        ours.removeHandler(handler)
    handler = json_handler(stream, facts)
    handler.set_name("millrace-json")
    ours.addHandler(handler)
