"""The child side of `scoring.py`: read a JSON line, call the function, write a JSON line, until stdin ends.

Its only argument, if any, is its address space in bytes. It dies with its parent.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import sys
import time

from infra.user_code import load_object
from rollouts.reward_values import as_number
from rollouts.sandbox.sandbox_rules import die_with_parent, limit
from settings.errors import failure_text


def main() -> None:
    """Serve requests until stdin closes, or until one of them used up the memory."""
    die_with_parent()
    if len(sys.argv) > 1:
        limit(resource.RLIMIT_AS, int(sys.argv[1]))
    # The conversation has descriptors of its own, which a reward does not write to by accident.
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    worker_stderr = os.dup(2)
    function_of = functools.lru_cache(maxsize=256)(load_object)  # of a user's file it takes longer than most rewards
    _replace_standard_streams(worker_stderr)
    for line in requests:
        request = json.loads(line)
        reply: dict[str, object] = {"id": request["id"]}
        try:
            function, started = function_of(request["function"]), time.perf_counter()
            reply["value"] = function(*request["arguments"])
            reply["seconds"] = time.perf_counter() - started
            text = json.dumps(reply, default=as_number)
        except MemoryError:  # what is left of a process without memory cannot be relied on
            why = "MemoryError: it needed more memory than the run file's reward.memory_gb allows"
            text = json.dumps({"id": request["id"], "error": why, "is_last": True})
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - user code may raise anything, a library in Rust its panic; it is recorded
            text = json.dumps({"id": request["id"], "error": failure_text(error)})
        replies.write(text.encode() + b"\n")
        _replace_standard_streams(worker_stderr)  # the function may have closed them


def _replace_standard_streams(worker_stderr: int) -> None:
    """An empty stdin; whatever a reward prints goes to the worker's stderr."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    if nothing:
        os.close(nothing)
    os.dup2(worker_stderr, 1)
    os.dup2(worker_stderr, 2)
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None or getattr(sys, name).closed:
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))
