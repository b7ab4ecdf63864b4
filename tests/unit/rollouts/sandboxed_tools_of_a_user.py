"""Tools as a user writes them, for `test_sandboxed_tools.py`: a sandbox imports this module."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from rollouts.chat.tools import ToolUnavailable, tool
from rollouts.sandbox.sandboxed_tools import sandboxed

LOADED = Path(__file__).read_text()[:3]


@tool
@sandboxed(seconds=30)
def describe(words: list[str], count: int = 2) -> dict[str, object]:
    """Say what was given, and what the module read when it was imported."""
    return {"words": words * count, "loaded": LOADED, "process": os.getpid()}


@tool
@sandboxed(seconds=30)
def read(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


@tool
@sandboxed(seconds=1)
def spin() -> str:
    """Never end."""
    while True:
        pass


@tool
@sandboxed(seconds=30)
def fail(kind: str) -> str:
    """Fail in one way or another."""
    if kind == "unavailable":
        raise ToolUnavailable("the table is gone")
    if kind == "exit":
        os._exit(3)
    if kind == "space":
        for number in range(1000):
            Path(str(number)).write_bytes(bytes(2**23))
    if kind == "answer":
        for descriptor in range(3, 4096):
            with contextlib.suppress(OSError):
                os.write(descriptor, b'{"value": "better", "value": ')
    raise ValueError(f"no {kind}")
