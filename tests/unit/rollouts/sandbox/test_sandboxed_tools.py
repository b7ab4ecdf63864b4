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

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(bool(sandbox_report()), reason="; ".join(sandbox_report())),
]


def _call(called: Tool, **arguments: Any) -> tuple[ToolCall, ToolUnavailable | None]:
    request = CallRequest(id="1", name=called.name, arguments=json.dumps(arguments))
    calls, unavailable = asyncio.run(run_calls([request], [called], timeout=60, output_chars=4000))
    return calls[0], unavailable


def _printed(code: str) -> str:
    """The result of a program that a policy runs."""
    call, unavailable = _call(run_python, code=code)
    assert unavailable is None and not call.failed
    return call.result


def test_a_programs_output_and_its_error_are_the_result_and_nothing_else_is_kept():
    assert _printed("import math\nopen('here', 'w')\nx = math.factorial(5)\nprint(x)\nprint('done')") == "120\ndone\n"
    assert _printed("import os\nif os.path.exists('here') or 'x' in globals(): print('kept')") == ""
    printed = _printed("print('begin')\nprint(1 / 0)")
    assert printed.startswith("begin\n") and "ZeroDivisionError" in printed
    assert printed.endswith("[ended with status 1]")
    assert "SyntaxError" in _printed("print(")
    assert "PermissionError" in _printed(f"print(open({__file__!r}).read())")


def test_a_program_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sandboxed_tools, "SECONDS", 2.0)
    assert _printed("print('begin', flush=True)\nwhile True: pass").startswith("begin\n[")


def test_a_call_runs_in_a_process_of_its_own_with_what_its_module_loaded_and_gets_at_nothing_else():
    call, unavailable = _call(tools.describe, words=["a", "ö"])
    result = json.loads(call.result)
    assert result["words"] == ["a", "ö", "a", "ö"] and result["loaded"] == '"""'
    assert result["process"] != os.getpid() and unavailable is None and not call.failed
    assert tools.describe.schema["function"]["parameters"]["required"] == ["words"]
    assert _call(tools.read, path=__file__)[0].result.startswith("error: PermissionError")


def test_a_call_that_does_not_end_is_stopped_and_the_attempt_goes_on():
    call, unavailable = _call(tools.spin)
    assert call.result == "error: TimeoutError: stopped after 1 s" and unavailable is None


def test_what_a_tool_raises_is_told_as_it_is_without_a_sandbox():
    assert _call(tools.fail, kind="luck")[0].result == "error: ValueError: no luck"
    call, unavailable = _call(tools.fail, kind="unavailable")
    assert str(unavailable) == "the table is gone" and call.failed
    assert "ended with status 3" in _call(tools.fail, kind="exit")[0].result
    assert _call(tools.fail, kind="space")[0].result == "error: RuntimeError: stopped: more than 64 MiB of files"
    assert _call(tools.fail, kind="answer")[0].result == "error: RuntimeError: it wrote something that is no answer"


def test_a_tool_in_a_file_of_its_own_is_found_by_the_sandbox_unless_it_starts_threads(tmp_path: Path):
    text = Path(tools.__file__).read_text()
    busy = "import os\nimport threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    (tmp_path / "mine.py").write_text(text)
    (tmp_path / "busy.py").write_text(text.replace("import os\n", busy, 1))
    call, _ = _call(load_object(f"{tmp_path}/mine.py:describe"), words=["x"], count=1)
    assert json.loads(call.result)["words"] == ["x"]
    _, unavailable = _call(load_object(f"{tmp_path}/busy.py:describe"), words=["x"])
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
