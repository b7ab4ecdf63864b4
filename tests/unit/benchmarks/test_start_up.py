from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.start_trace import FILE
from benchmarks.start_up import ROOT, timeline


def test_a_timeline_has_what_took_long_with_its_depth_and_processor_time() -> None:
    events = [
        [1, 10.0, 0.0, "process", "python"],
        [1, 10.5, 0.1, "begin", "outer"],
        [2, 10.6, 0.0, "begin", "elsewhere"],
        [1, 10.7, 0.2, "begin", "inner"],
        [1, 10.71, 0.2, "begin", "short"],
        [1, 10.72, 0.2, "end", "short"],
        [1, 11.0, 0.4, "end", "inner"],
        [1, 11.5, 0.5, "end", "outer"],
        [1, 11.6, 0.5, "first", "attempt"],
    ]
    rows = [(row["what"], row["depth"], round(row["begin"], 2), round(row["end"], 2)) for row in timeline(events, 10.0)]
    assert rows == [("python", 0, 0, 0), ("outer", 0, 0.5, 1.5), ("inner", 1, 0.7, 1.0), ("attempt", 0, 1.6, 1.6)]
    assert [round(row["cpu"], 1) for row in timeline(events, 10.0) if "cpu" in row] == [0.4, 0.2]


def test_a_process_notes_the_imports_that_are_named(tmp_path: Path) -> None:
    (tmp_path / "openai.py").write_text("import json")
    environment = {**os.environ, FILE: str(tmp_path / "trace"), "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    code = "from benchmarks.start_trace import install; install(); import openai; print(openai.__name__)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    events = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    assert done.stdout == "openai\n" and [event[3] for event in events] == ["process", "begin", "end"]
    assert [event[4] for event in events[1:]] == ["import openai"] * 2
