"""The tool that runs a policy's Python: it is told what the program prints, and the program gets at nothing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from rollouts.chat.tool_parsing import CallRequest
from rollouts.chat.tools import ToolUnavailable, run_calls
from rollouts.sandbox import code_tool
from rollouts.sandbox.code_tool import run_python
from rollouts.sandbox.sandbox import SandboxUnavailable, sandbox_report

pytestmark = pytest.mark.skipif(bool(sandbox_report()), reason="; ".join(sandbox_report()))


def _told(code: str) -> str:
    """What a policy is told that calls the tool."""
    request = CallRequest(id="1", name="run_python", arguments=json.dumps({"code": code}))
    calls, unavailable = asyncio.run(run_calls([request], [run_python], timeout=60, output_chars=4000))
    assert unavailable is None and not calls[0].failed
    return calls[0].result


def test_a_program_s_output_is_the_result():
    assert _told("import math\nprint(math.factorial(20))\nprint('done')") == "2432902008176640000\ndone\n"
    assert _told("x = 1") == ""


def test_an_error_is_told_with_what_was_printed_before():
    told = _told("print('begin')\nprint(1 / 0)")
    assert told.startswith("begin\n") and "ZeroDivisionError" in told and told.endswith("[ended with status 1]")
    assert "SyntaxError" in _told("print(")


def test_a_program_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(code_tool, "SECONDS", 2.0)
    assert _told("print('begin', flush=True)\nwhile True: pass").startswith("begin\n[")


def test_a_program_gets_at_nothing():
    assert "PermissionError" in _told(f"print(open({str(Path(__file__))!r}).read())")


def test_two_calls_share_nothing():
    _told("open('here', 'w').write('x'); y = 1")
    told = _told("import os; print(os.path.exists('here'), 'y' in globals())")
    assert told == "False False\n"


def test_without_a_sandbox_the_attempt_ends_without_a_reward(monkeypatch: pytest.MonkeyPatch):
    def refuse() -> None:
        raise SandboxUnavailable("no Landlock here")

    monkeypatch.setattr(code_tool, "require_sandbox", refuse)
    with pytest.raises(ToolUnavailable, match="no Landlock here"):
        run_python("print(1)")
