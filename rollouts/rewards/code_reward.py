"""A reward for code: the share of unit tests that the code in a reply passes, in a sandbox.

In: a reply with a ```python block, and tests. Out: a float from 0 to 1.

    stdin/stdout pairs   the code runs in a new sandbox for each pair; its output is compared here
    asserts              the code in one sandbox, the tests in another, which calls it (see `sandbox_process.py`)

It runs in a reward process, like every reward. The sandboxes are children of that process and die with it.
"""

from __future__ import annotations

import functools
import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from rollouts.sandbox.sandbox import SandboxedProcess, check_started, require_sandbox, run_script, write_text
from settings.errors import InvalidInput

_BLOCK = re.compile(r"```(?:python3?|py)[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


def unit_tests(
    reply: str, tests: str, seconds: float = 10.0, memory_gb: float = 1.0, allow_unsandboxed: bool = False
) -> float:
    """The share of `tests` that the last Python code block of `reply` passes; 0.0 without one.

    `tests` is one of
    * Python code. Each top-level statement with an `assert` and each `test…` function is a test; if there are none,
      each top-level call is one (`check(add)`). Tests use the names that the code defines, or import `solution`.
      Values cross as plain data. Objects of the code's classes can be used, and compared with each other.
    * JSON: `[{"input": "2 3", "output": "5"}, …]` or `{"inputs": […], "outputs": […]}`: standard input and output.
      White space at the ends of lines is ignored; a script that ends with an error has failed.

    All tests together have `seconds` of wall-clock, each process has `memory_gb` of address space. A test that has not
    passed by then has failed, so keep `seconds` below the run file's `reward.timeout`.

    Raises `InvalidInput` for tests that can never run, and `SandboxUnavailable` if the machine cannot isolate the code,
    unless `allow_unsandboxed`. Both end as status `reward_error`, not as reward 0.
    """
    if not allow_unsandboxed:
        require_sandbox()
    pairs = _pairs(tests)
    blocks = _BLOCK.findall(reply)
    if not blocks:
        return 0.0
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="millrace-code-", ignore_cleanup_errors=True) as folder:
        if pairs is None:
            return _run_asserts(blocks[-1], tests, Path(folder), deadline=deadline, memory_gb=memory_gb)
        num_passed = 0
        for index, (given, expected) in enumerate(pairs):
            if time.monotonic() < deadline:
                home = Path(folder) / str(index)
                status, printed = run_script(blocks[-1], given, home, deadline=deadline, memory_gb=memory_gb)
                num_passed += status == 0 and _lines(printed) == _lines(expected)
    return num_passed / len(pairs)


def _pairs(tests: str) -> list[tuple[str, str]] | None:
    """Pairs of input and expected output; None if `tests` is code."""
    try:
        data: Any = json.loads(tests)
    except ValueError:
        return None
    match data:
        case {"inputs": list(inputs), "outputs": list(outputs)} if len(inputs) == len(outputs):
            pairs = list(zip(inputs, outputs, strict=True))
        case [*cases] if all(isinstance(case, dict) and {"input", "output"} <= case.keys() for case in cases):
            pairs = [(case["input"], case["output"]) for case in cases]
        case _:
            pairs = []
    if not pairs or not all(isinstance(text, str) for pair in pairs for text in pair):
        raise InvalidInput('JSON tests must be [{"input": "…", "output": "…"}, …] with at least one pair of texts')
    return pairs


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _run_asserts(code: str, tests: str, folder: Path, *, deadline: float, memory_gb: float) -> float:
    """The share of tests passed. The two processes share nothing but two pipes."""
    for name, text in (("solution", code), ("tests", tests)):
        (folder / name).mkdir()
        write_text(folder / name / f"{name}.py", text)
    left = deadline - time.monotonic()
    requests, asks = os.pipe()
    answers, tells = os.pipe()
    with (folder / "verdicts").open("wb") as verdicts:
        start = functools.partial(SandboxedProcess, seconds=left, memory_gb=memory_gb)
        server = start("serve", folder / "solution", pass_fds=[requests, tells])
        checker = start("check", folder / "tests", pass_fds=[asks, answers, verdicts.fileno()])
    for descriptor in (requests, asks, answers, tells):
        os.close(descriptor)  # only the children keep them, so that one notices the end of the other
    checker.wait(deadline)
    server.kill()
    has_served = server.missing() is not None  # tests that cannot run may end before it begins
    check_started(checker.missing() is not None)
    lines = (folder / "verdicts").read_text().split("\n")[:-1]  # without an unfinished line
    messages = [json.loads(line) for line in lines]
    if faults := [line["fault"] for line in messages if "fault" in line]:
        raise InvalidInput(faults[0])
    check_started(has_served or (bool(messages) and not messages[0]["tests"]))
    if not messages or not messages[0]["tests"]:
        raise InvalidInput("the tests have no assert, no test function and no call, so there is nothing to pass")
    return sum(line.get("passed", False) for line in messages) / messages[0]["tests"]
