"""A reward for code: the share of unit tests that the code in a reply passes, in a sandbox.

In: a reply with a block of Python, and tests. Out: a float from 0 to 1.

    stdin/stdout pairs   the code runs in a new sandbox for each pair; its output is compared here
    all other tests      the code in one sandbox, the tests in another, which calls it (`sandbox/code_tests/`)

It runs in a reward process, like every reward. The sandboxes are children of that process and die with it.
"""

from __future__ import annotations

import base64
import functools
import io
import itertools
import json
import os
import pickletools
import re
import time
import zlib
from pathlib import Path
from typing import Any

from rollouts.rewards.code_blocks import python_block
from rollouts.sandbox.code_tests.plan import CannotRun, check_imports, read_tests
from rollouts.sandbox.sandbox import (
    SandboxedProcess,
    check_started,
    own_folder,
    require_sandbox,
    run_script,
    write_text,
)
from settings.errors import InvalidInput
from settings.redaction import read_json


def unit_tests(
    reply: str, tests: str, seconds: float = 10.0, memory_gb: float = 1.0, allow_unsandboxed: bool = False
) -> float:
    """The share of `tests` that the last Python code block of `reply` passes; 0.0 without one.

    A block is a fence of Markdown, however it is indented, quoted or tagged as Python. If none is tagged so, the last
    one without a tag is taken. `tests` is one of
    * Python code. Each top-level statement that asserts, or calls a function of the tests that does, is a test, and so
      is each `test…` function; if there are none, each top-level call is. Classes, parameters and fixtures are run by
      pytest, also those of unittest. Tests use names that they do not define themselves, or import `solution`. Plain
      data, arrays of numpy, exceptions and what is printed cross, and a list or dictionary that both have is the same
      one: what the code does to an argument or a global, the tests see, and the other way. Other objects stay where
      they are, and are used from there: functions, iterators and objects of the tests' classes by the code, those of
      the code by the tests. Tests that use files, the environment, warnings, pandas, torch or asyncio, or replace what
      the code uses, are refused. Objects of the code's classes equal only each other, and take part in `+` or `in`
      with plain data only if the tests made them, of a name that they use as a class's: where a name in CapWords may
      be either, as in `T(7) % 4 == 3`, and where such objects are compared with numbers or text, they are refused too.
    * JSON: `[{"input": "2 3", "output": "5"}, …]` or `{"inputs": […], "outputs": […]}`: standard input and output.
      White space at the ends of lines is ignored; a script that ends with an error has failed.
    * The same with `"fn_name"` (APPS, LiveCodeBench): calls of that function, or of that method of `Solution`. Inputs
      are lists of arguments, or texts with one in JSON a line. With these tests, or any that name `Solution`, code
      has what solutions for LeetCode need not import.
    * JSON: a list of Python texts, as MBPP's `test_list`.
    * LiveCodeBench's private tests as they are packed; with `fn_name`, unpack them first, and put it beside them.

    All tests together have `seconds` of wall-clock, each process has `memory_gb` of address space. A test that has not
    passed by then has failed. What the code raises or uses up is its own failure, never an error of the reward.

    Raises `InvalidInput` for tests that can never run, and `SandboxUnavailable` if the machine cannot isolate the code,
    unless `allow_unsandboxed`. Both end as status `reward_error`, not as reward 0, and stop a run before it starts if
    the first tasks have such tests.
    """
    if not allow_unsandboxed:
        require_sandbox()
    program, pairs, source = _read(tests)
    code = python_block(reply)
    if code is None:
        return 0.0
    deadline = time.monotonic() + seconds
    with own_folder("code") as folder:
        if not pairs:
            return _run_tests(program, code, source, folder, deadline=deadline, memory_gb=memory_gb)
        num_passed = 0
        for index, (given, expected) in enumerate(pairs):
            if time.monotonic() < deadline:
                home = folder / str(index)
                status, printed = run_script(code, given, home, deadline=deadline, memory_gb=memory_gb)
                num_passed += status == 0 and _same_lines(printed, expected)
    return num_passed / len(pairs)


@functools.lru_cache(maxsize=256)
def _read(tests: str) -> tuple[str, list[tuple[str, str]], str]:
    """The program that checks; pairs of input and expected output if it is `script`, else the tests as code.

    Raises `InvalidInput`.
    """
    if _PACKED.fullmatch(tests):
        tests = _unpacked(tests)
    try:
        data: Any = read_json(tests)
    except ValueError:
        data = None
    match data:
        case [str(), *_] if all(isinstance(each, str) for each in data):
            tests = "\n".join(data)
        case list() | dict():
            name, cases = _cases(data)
            if not name:
                return "script", [(_joined(given), _joined(expected)) for given, expected in cases], ""
            tests = _calls(name, cases)
    try:
        check_imports(read_tests(tests))
    except CannotRun as error:
        raise InvalidInput(str(error)) from error
    return "check_as_leetcode" if "Solution" in tests else "check", [], tests


_PACKED = re.compile(r"\s*eJ[A-Za-z0-9+/\s]{30,}+={0,2}\s*")
"""What zlib made, in base64."""
_MOST_UNPACKED = 2**28


def _unpacked(tests: str) -> str:
    """LiveCodeBench's private tests: a pickled text, which is read here and never unpickled. Raises `InvalidInput`."""
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(tests), _MOST_UNPACKED)
        steps = [(step.name, argument) for step, argument, _ in pickletools.genops(data)]
        [text] = [argument for name, argument in steps if name not in ("PROTO", "FRAME", "MEMOIZE", "BINPUT", "STOP")]
    except (ValueError, zlib.error) as error:
        fault = "the tests are packed, and not as LiveCodeBench packs its private ones (a pickled text, zlib, base64)"
        raise InvalidInput(f"{fault}: unpack them when you prepare the data") from error
    return str(text)


_FORMS = (
    'JSON tests must be [{"input": "…", "output": "…"}, …] or {"inputs": […], "outputs": […]} with at least one pair '
    'of texts; with {"fn_name": "…"}, if they call a function; or a list of Python texts'
)


def _cases(data: Any) -> tuple[str, list[tuple[Any, Any]]]:
    """The name of the function that the tests call, empty for scripts, and pairs of input and output."""
    names: set[str] = set()
    match data:
        case {"inputs": list(inputs), "outputs": list(outputs)} if inputs and len(inputs) == len(outputs):
            cases = list(zip(inputs, outputs, strict=True))
            members = [data]
        case [*members] if members and all(isinstance(m, dict) and {"input", "output"} <= m.keys() for m in members):
            cases = [(case["input"], case["output"]) for case in members]
        case _:
            raise InvalidInput(_FORMS)
    for member in members:
        metadata = member.get("metadata")
        about = {**(metadata if isinstance(metadata, dict) else {}), **member}
        name = str(about.get("fn_name") or about.get("func_name") or "")
        if not name and str(about.get("testtype", about.get("type", ""))).startswith("func"):
            fault = "these tests call a function and do not name it"
            raise InvalidInput(
                f'{fault}: put {{"fn_name": "…"}} beside their inputs; LiveCodeBench has it in `metadata`'
            )
        names.add(name)
    if len(names) > 1 or not all(name.isidentifier() for name in names if name):
        raise InvalidInput(f"tests must name one function, or none, and not {sorted(names)}")
    return names.pop(), cases


def _joined(text: Any) -> str:
    """A text of a script; APPS has some as lists of lines."""
    lines = text if isinstance(text, list) else [text]
    if not all(isinstance(line, str) for line in lines):
        raise InvalidInput(_FORMS)
    return "\n".join(lines)


def _calls(name: str, cases: list[tuple[Any, Any]]) -> str:
    """Tests that call a function, as code."""
    try:
        calls = [
            [[read_json(line) for line in given.splitlines() if line.strip()], read_json(expected)]
            if isinstance(given, str)
            else [[*given], expected]
            for given, expected in cases
        ]
    except (TypeError, ValueError) as error:
        fault = f"an input or output of {name} is neither a list of arguments nor text with one argument in JSON a line"
        raise InvalidInput(f"{fault}: {error}") from error
    if all(not isinstance(given, str) and isinstance(out, list) and len(out) == 1 for given, out in cases):
        calls = [[*call, expected[0]] for call, (_, expected) in zip(calls, cases, strict=True)]  # as some of APPS
    lines = [f"assert passes(*calls[{index}])" for index in range(len(calls))]
    return "\n".join([_CALL, f"calls = json.loads({json.dumps(calls)!r})", f"name = {name!r}", *lines])


_CALL = """
import json

def passes(arguments, *expected):
    space = globals()
    owner = space["Solution"]() if "Solution" in space and hasattr(space["Solution"], name) else solution
    return as_json(getattr(owner, name)(*arguments)) in expected

def as_json(value):
    if isinstance(value, (list, tuple)):
        return [as_json(each) for each in value]
    return {str(key): as_json(each) for key, each in value.items()} if isinstance(value, dict) else value

import solution"""


def _same_lines(printed: str, expected: str) -> bool:
    """One line after the other: a list of all that code can print may not fit into memory."""
    lines = itertools.zip_longest(io.StringIO(printed.rstrip()), io.StringIO(expected.rstrip()))
    return all(None not in pair and pair[0].rstrip() == pair[1].rstrip() for pair in lines)


def _run_tests(program: str, code: str, tests: str, folder: Path, *, deadline: float, memory_gb: float) -> float:
    """The share of tests passed. The two processes share nothing but two pipes."""
    for name, text in (("solution", code), ("tests", tests)):
        (folder / name).mkdir()
        write_text(folder / name / f"{name}.py", text)
    left = deadline - time.monotonic()
    requests, asks = os.pipe()
    replies, tells = os.pipe()
    with (folder / "verdicts").open("wb") as verdicts:
        start = functools.partial(SandboxedProcess, seconds=left, memory_gb=memory_gb)
        server = start("serve", folder / "solution", pass_fds=[requests, tells])
        checker = start(program, folder / "tests", pass_fds=[asks, replies, verdicts.fileno()])
    for descriptor in (requests, asks, replies, tells):
        os.close(descriptor)  # only the children keep them, so that one notices the end of the other
    checker.wait(deadline)
    server.kill()
    has_served = server.missing() is not None  # tests that cannot run may end before it begins
    check_started(checker.missing() is not None)
    lines = (folder / "verdicts").read_text().split("\n")[:-1]  # without an unfinished line
    messages = [json.loads(line) for line in lines]
    if faults := [line["fault"] for line in messages if "fault" in line]:
        raise InvalidInput(faults[0])
    counts = [line["tests"] for line in messages if "tests" in line]
    check_started(has_served and bool(counts))
    num_tests = counts[-1] - sum(line.get("skipped", False) for line in messages)  # pytest counts after it collected
    if not num_tests:
        raise InvalidInput("the tests skip themselves, so there is nothing to pass")
    return sum(line.get("passed", False) for line in messages) / num_tests
