"""What a deployed flow refuses before it has a session is recorded by Prefect, and says no secret."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import PROJECT

SECRET = "hunter2hunter2"
INDISCREET = """
import os
from millrace import Workflow

class Says(Workflow):
    async def run(self, task, chat):
        return 0

    def tasks(self, split):
        raise ValueError(f"refused: {os.environ['JUDGE_API_KEY']}")
"""
CALLS = f"""
import asyncio, logging
from flows.evaluate import evaluate
from flows.maintain import maintain
from flows.replay import replay
from flows.rollout import rollout
from flows.train_grpo import train_grpo
from tasks.maintain import collect_from_runs
import flows.maintain

flows.maintain.collect_from_runs = collect_from_runs.fn
calls = (
    (train_grpo, dict(workflow="env.py:Says")),
    (evaluate, dict(run="{SECRET}")),
    (replay, dict(run="{SECRET}")),
    (rollout, dict(run="{SECRET}")),
    (maintain, dict(runs=["{SECRET}"])),
)
logging.getLogger("of.prefect").addHandler(logging.StreamHandler())
make = logging.getLogRecordFactory()
for each, arguments in calls:
    logging.setLogRecordFactory(make)  # as in a process of its own
    try:
        asyncio.run(each.fn(**arguments))
    except Exception as error:
        print(each.name, "state:", error)
        logging.getLogger("of.prefect").exception("Encountered exception during execution of %s", each.name)
"""


def test_what_each_flow_refuses_says_no_secret(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(INDISCREET)
    (tmp_path / "store").mkdir()
    variables = {"JUDGE_API_KEY": SECRET, "MILLRACE_HOME": str(tmp_path), "PYTHONPATH": str(PROJECT)}
    calls = [sys.executable, "-c", CALLS]
    done = subprocess.run(
        calls, cwd=tmp_path, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for name in ("train-grpo", "evaluate", "replay", "rollout", "maintain"):
        (state,) = (line for line in done.stdout.splitlines() if line.startswith(f"{name} state: "))
        assert "***" in state
        assert f"execution of {name}\nTraceback" in done.stderr
    assert SECRET not in done.stdout + done.stderr
