"""The programs inside a sandbox: a script, a tool, and for tests of code the pair `serve` and `check`.

In: what to run, as JSON on the command line. Out: nothing but what the program writes. Started by `sandbox.py`.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from rollouts.sandbox.code_tests.check import check
from rollouts.sandbox.code_tests.solution import Solution, run_module, serve
from rollouts.sandbox.code_tests.wire import send
from rollouts.sandbox.sandbox_rules import die_with_parent, lock_down


def main() -> None:
    """Lock this process down, report what could not be isolated, and run one program."""
    _, product, order_text, *numbers = sys.argv
    sys.path.remove(product)
    order = json.loads(order_text)
    folder = Path(order["folder"])
    die_with_parent()
    function = _load_function(order) if order["program"] == "function" else None
    if order["group"]:
        Path(order["group"], "cgroup.procs").write_text("0")
    missing = lock_down(folder, seconds=order["seconds"], memory_gb=order["memory_gb"])
    os.write(order["report"], json.dumps(missing).encode() + b"\n")
    os.close(order["report"])
    sys.set_int_max_str_digits(0)  # code may print a large factorial; its time is limited anyway
    match order["program"], [int(number) for number in numbers]:
        case "script", []:
            sys.excepthook = _print_error
            run_module("__main__", folder / "solution.py")
        case "function", [replies]:
            assert function is not None
            _reply(function, folder / "arguments.json", os.fdopen(replies, "w"))
        case "serve", [requests, replies]:
            serve(folder / "solution.py", os.fdopen(requests), os.fdopen(replies, "w"))
        case "check" | "check_as_leetcode", [requests, replies, verdicts]:
            solution = Solution(os.fdopen(requests, "w"), os.fdopen(replies))
            tests, as_leetcode = (folder / "tests.py").read_text(), order["program"] == "check_as_leetcode"
            check(tests, solution, os.fdopen(verdicts, "w"), as_leetcode=as_leetcode)


def _load_function(order: dict[str, Any]) -> Callable[..., Any]:
    """A function of the user, imported before the lock, because its module may read files.

    Raises `RuntimeError` if the module started threads: the kernel would not lock those.
    """
    sys.path[:] = order["path"]
    from infra.user_code import load_object

    function = load_object(order["function"])
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("importing its module started threads, which cannot be locked down; start them when called")
    return inspect.unwrap(getattr(function, "function", function))  # a `Tool` holds its function


def _reply(function: Callable[..., Any], arguments: Path, replies: TextIO) -> None:
    from rollouts.chat.plain_data import plain  # the function's module has imported it, as it has `sandboxed`

    try:
        send(replies, {"value": plain(function(**json.loads(arguments.read_text())))})
    except (Exception, SystemExit) as error:  # noqa: BLE001 - raised again by the caller
        send(replies, {"error": [type(error).__name__, str(error)]})


def _print_error(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """Print a traceback after the output, from the program's own first line on."""
    sys.stdout.flush()
    while trace is not None and trace.tb_frame.f_code.co_filename != "solution.py":
        trace = trace.tb_next
    traceback.print_exception(kind, error, trace)
