"""A tool that runs a Python program of the policy in a sandbox.

In: a program. Out: its output.

    await chat.ask(task.prompt, tools=[run_python])
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from rollouts.chat.tools import ToolUnavailable, tool
from rollouts.sandbox.sandbox import require_sandbox, run_script

SECONDS = 10.0
"""Wall-clock of a program; keep `rollout.tool_timeout` above it."""
MEMORY_GB = 1.0


@tool
def run_python(code: str) -> str:
    """Run a Python program and get what it prints. Nothing is kept from one call to the next.

    Args:
        code: The whole program; it has no network, and files only in its own folder.
    """
    try:
        require_sandbox()
        with tempfile.TemporaryDirectory(prefix="millrace-code-", ignore_cleanup_errors=True) as folder:
            deadline = time.monotonic() + SECONDS
            status, printed = run_script(
                code, "", Path(folder), deadline=deadline, memory_gb=MEMORY_GB, shows_errors=True
            )
    except RuntimeError as error:  # no sandbox on this machine, or it ended before the program began
        raise ToolUnavailable(str(error)) from error
    if status == 0:
        return printed
    end = f"stopped after {SECONDS:g} s" if status is None else f"ended with status {status}"
    return f"{printed.rstrip()}\n[{end}]".lstrip()
