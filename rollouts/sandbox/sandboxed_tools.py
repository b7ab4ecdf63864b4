"""Tools that run in a sandbox: `run_python` for programs of the policy, and a user's own whose arguments could do harm.

In: a program; or a typed function of a module. Out: its output; or the function, each call in a process of its own.

    await chat.ask(task.prompt, tools=[run_python, evaluate])

    @tool
    @sandboxed(seconds=5)
    def evaluate(expression: str) -> str:
        \"\"\"Compute an expression with sympy.\"\"\"
        return str(sympy.sympify(expression))

The user's module is imported before the process is locked down, so it can load files or use the network at its top
level. The arguments, which the policy wrote, are read after the lock.
"""

from __future__ import annotations

import functools
import inspect
import json
import time
from collections.abc import Callable
from typing import Any

from infra.user_code import path_of
from rollouts.chat.tools import ToolUnavailable, tool
from rollouts.sandbox.code_tests.crossing_exceptions import exception_of
from rollouts.sandbox.sandbox import SandboxedProcess, own_folder, require_sandbox, run_script, write_text
from settings.errors import InvalidInput
from settings.redaction import read_json

SECONDS = 10.0
"""Wall-clock of a program of `run_python`; keep `rollout.tool_timeout` above it."""
MEMORY_GB = 1.0


@tool
def run_python(code: str) -> str:
    """Run a Python program and get what it prints. Nothing is kept from one call to the next.

    Args:
        code: The whole program; it has no network, and files only in its own folder.
    """
    try:
        require_sandbox()
        with own_folder("code") as folder:
            deadline = time.monotonic() + SECONDS
            return run_script(code, "", folder, deadline=deadline, memory_gb=MEMORY_GB, shows_errors=True)[1]
    except RuntimeError as error:  # no sandbox on this machine, or it ended before the program began
        raise ToolUnavailable(str(error)) from error


def sandboxed(*, seconds: float = 10.0, memory_gb: float = 1.0) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make every call of a function run without network, other processes, and files except Python's own.

    `seconds` of wall-clock and `memory_gb` of address space include the import of the function's module; keep
    `rollout.tool_timeout` above `seconds`. Arguments and result are plain JSON data. An exception of the function is
    raised to the caller.

    Raises `InvalidInput` for a method, a nested function, an async function, and a function of the main file.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__qualname__
        if "." in name or function.__module__ == "__main__" or inspect.iscoroutinefunction(function):
            raise InvalidInput(f"{name} cannot be sandboxed: write a plain function at the top level of a module")

        @functools.wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            arguments = inspect.signature(function).bind(*given, **named).arguments
            return _call(path_of(function), arguments, seconds=seconds, memory_gb=memory_gb)

        return call

    return decorate


def _call(function: str, arguments: dict[str, Any], *, seconds: float, memory_gb: float) -> Any:
    try:
        require_sandbox()
        text = json.dumps(arguments)
    except (RuntimeError, TypeError) as error:  # no sandbox on this machine, or not plain data
        raise ToolUnavailable(f"{function}: {error}") from error
    deadline = time.monotonic() + seconds
    with own_folder("tool") as folder:
        (folder / "work").mkdir()
        write_text(folder / "work" / "arguments.json", text)
        with (folder / "reply").open("w+b") as written, (folder / "errors").open("w+b") as errors:
            process = SandboxedProcess(
                "function",
                folder / "work",
                seconds=seconds,
                memory_gb=memory_gb,
                stderr=errors,
                pass_fds=[written.fileno()],
                function=function,
            )
            status = process.wait(deadline)
        has_started = process.missing() is not None
        line = (folder / "reply").read_bytes()
        last_error = (folder / "errors").read_text(errors="replace").rstrip().rpartition("\n")[2]
    if status is None and process.excess:
        raise RuntimeError(f"stopped: {process.excess}")
    if status is None:
        raise TimeoutError(f"stopped after {seconds:g} s")
    if not has_started:
        raise ToolUnavailable(f"{function}: a sandbox ended before it called the function: {last_error}")
    if status or not line:
        raise RuntimeError(f"ended with status {status}: {last_error}")
    try:  # the function holds the file, and its arguments may have made it write there
        reply = read_json(line)
    except ValueError:
        reply = None
    match reply:
        case {"value": value}:
            return value
        case {"error": [str(kind), str(text)]}:
            raise ToolUnavailable(text) if kind == ToolUnavailable.__name__ else exception_of(kind, text)
    raise RuntimeError("it wrote something that is no answer")
