"""Tools that run in a sandbox work as any other, and the policy's programs and arguments get at nothing."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from infra.user_code import load_object
from rollouts.chat.tool_parsing import CallRequest
from rollouts.chat.tools import Tool, ToolUnavailable, run_calls
from rollouts.sandbox import sandboxed_tools
from rollouts.sandbox.sandbox import SandboxUnavailable, sandbox_report
from rollouts.sandbox.sandboxed_tools import run_python, sandboxed
from storage.records import ToolCall
from tests.unit.rollouts import sandboxed_tools_of_a_user as tools

pytestmark = pytest.mark.skipif(bool(sandbox_report()), reason="; ".join(sandbox_report()))


def _call(called: Tool, **arguments: Any) -> tuple[ToolCall, ToolUnavailable | None]:
    request = CallRequest(id="1", name=called.name, arguments=json.dumps(arguments))
    calls, unavailable = asyncio.run(run_calls([request], [called], timeout=60, output_chars=4000))
    return calls[0], unavailable


def _printed(code: str) -> str:
    """The result of a program that a policy runs."""
    call, unavailable = _call(run_python, code=code)
    assert unavailable is None and not call.failed
    return call.result


def test_a_program_s_output_is_the_result():
    assert _printed("import math\nprint(math.factorial(20))\nprint('done')") == "2432902008176640000\ndone\n"
    assert _printed("x = 1") == ""


def test_an_error_is_told_with_what_was_printed_before():
    printed = _printed("print('begin')\nprint(1 / 0)")
    assert printed.startswith("begin\n") and "ZeroDivisionError" in printed
    assert printed.endswith("[ended with status 1]")
    assert "SyntaxError" in _printed("print(")


def test_a_program_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sandboxed_tools, "SECONDS", 2.0)
    assert _printed("print('begin', flush=True)\nwhile True: pass").startswith("begin\n[")


def test_two_programs_share_nothing():
    _printed("open('here', 'w').write('x'); y = 1")
    assert _printed("import os; print(os.path.exists('here'), 'y' in globals())") == "False False\n"


def test_a_call_runs_in_a_process_of_its_own_with_what_its_module_loaded():
    call, unavailable = _call(tools.describe, words=["a", "ö"])
    result = json.loads(call.result)
    assert result["words"] == ["a", "ö", "a", "ö"] and result["loaded"] == '"""'
    assert result["process"] != os.getpid() and unavailable is None and not call.failed


def test_the_policy_sees_the_function_s_own_schema_and_is_told_what_does_not_fit_it():
    assert tools.describe.schema["function"]["parameters"]["required"] == ["words"]
    call, _ = _call(tools.describe, words=3)
    assert call.failed and "words" in call.result


def test_programs_and_arguments_of_a_policy_get_at_nothing():
    assert "PermissionError" in _printed(f"print(open({__file__!r}).read())")
    assert _call(tools.read, path=__file__)[0].result.startswith("error: PermissionError")


def test_a_call_that_does_not_end_is_stopped_and_the_attempt_goes_on():
    call, unavailable = _call(tools.spin)
    assert call.result == "error: TimeoutError: stopped after 3 s" and unavailable is None


def test_what_a_tool_raises_is_told_as_it_is_without_a_sandbox():
    assert _call(tools.fail, kind="luck")[0].result == "error: ValueError: no luck"
    call, unavailable = _call(tools.fail, kind="unavailable")
    assert str(unavailable) == "the table is gone" and call.failed
    assert "ended with status 3" in _call(tools.fail, kind="exit")[0].result


def test_a_tool_in_a_file_of_its_own_is_found_by_the_sandbox(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(Path(tools.__file__).read_text())
    call, _ = _call(load_object(f"{file}:describe"), words=["x"], count=1)
    assert json.loads(call.result)["words"] == ["x"]


def test_a_module_that_starts_threads_is_refused(tmp_path: Path):
    file = tmp_path / "busy.py"
    busy = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    head, _, rest = Path(tools.__file__).read_text().partition("import os\n")
    file.write_text(f"{head}import os\n{busy}{rest}")
    _, unavailable = _call(load_object(f"{file}:describe"), words=["x"])
    assert "started threads" in str(unavailable)


def test_without_a_sandbox_the_attempt_ends_without_a_reward(monkeypatch: pytest.MonkeyPatch):
    def refuse() -> None:
        raise SandboxUnavailable("no Landlock here")

    monkeypatch.setattr(sandboxed_tools, "require_sandbox", refuse)
    with pytest.raises(ToolUnavailable, match="no Landlock here"):
        tools.describe(words=["x"])
    with pytest.raises(ToolUnavailable, match="no Landlock here"):
        run_python("print(1)")


def test_what_a_sandbox_could_not_find_is_refused_when_it_is_written():
    with pytest.raises(ValueError, match="top level of a module"):

        @sandboxed()
        def nested() -> None: ...
