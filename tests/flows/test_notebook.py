"""What a notebook does with runs: trains one, looks at its tables, evaluates and replays it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.conftest import SCRIPTED, Home

_NOTEBOOK = """
import asyncio, json, sys
import millrace

run_file, model = sys.argv[1:]
status = millrace.train(run_file, steps=2, run="notes", model=model)
run = millrace.open_run("notes")
rows = run.trajectories
policy = run.policy(1)

async def cell():  # Jupyter runs a cell inside a loop
    return millrace.evaluate("notes", num_tasks=2), millrace.replay("notes", first=1, last=1)

evaluation, replayed = asyncio.run(cell())
frame = run.steps.to_pandas()
print(json.dumps({
    "shown": repr(run),
    "status": [status["step"], run.status["step"]],
    "steps": frame["step"].tolist(),
    "reward": [row["value"] for row in run.metrics.to_pylist() if row["metric"] == "reward"],
    "of steps": frame["reward"].tolist(),
    "trajectories": rows.num_rows,
    "in sql": run.sql("SELECT count(*) AS n FROM trajectories WHERE step = ?", [1])["n"].to_pylist(),
    "policy": sorted(path.name for path in policy.iterdir()),
    "evaluated": evaluation["num_tasks"],
    "evaluations": run.evaluations["version"].to_pylist(),
    "identical": replayed["identical"],
}))
"""


def test_a_notebook_trains_looks_evaluates_and_replays(home: Home, base_model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _NOTEBOOK, str(SCRIPTED), str(base_model)],
        env=home.environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["shown"] == "<run 'notes' at step 2>" and seen["status"] == [2, 2]
    assert seen["steps"] == [1, 2] and seen["reward"] == seen["of steps"]
    assert seen["trajectories"] > seen["in sql"][0] > 0
    assert "model.safetensors" in seen["policy"] and seen["evaluated"] == 2 and seen["identical"]
    assert seen["evaluations"].count(2) >= 1
