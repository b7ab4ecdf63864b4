"""`make train` without a Prefect server: the in-process API must not take the history with it when it ends."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from tests.conftest import SCRIPTED, Home


def test_the_whole_history_survives_the_in_process_api(tmp_path: Path, base_model: Path) -> None:
    home = Home(tmp_path, prefect_api="")
    del home.environment["PREFECT_API_URL"]
    home.run("train", str(SCRIPTED), f"model={base_model}", "steps=4")
    with sqlite3.connect(tmp_path / "prefect" / "prefect.db") as database:
        flows = database.execute("select name, state_type from flow_run").fetchall()
        tasks = dict(database.execute("select name, state_type from task_run").fetchall())
    assert flows == [("scripted", "COMPLETED")]
    wanted = {f"{verb}-{step}" for verb in ("train", "publish") for step in range(1, 5)}
    assert wanted <= tasks.keys()
    assert sum(name.startswith("collect-") for name in tasks) == 4
    assert set(tasks.values()) == {"COMPLETED"}
    assert len(tasks) <= 10 * 4, "at most ten task runs a round"
