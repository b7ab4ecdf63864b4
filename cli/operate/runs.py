"""`millrace runs`: every run of a store, from the logs alone.

In: a store. Out: a row per run, the one that was worked on last first.
"""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.table import Table

from cli.terminal.formatting import number, one_line
from storage.log.promotion import CHAMPION
from storage.log.run_log import RunLog
from storage.log.runs import is_training, open_run, run_config
from storage.objects.object_store import ObjectStore


def list_runs(store: ObjectStore) -> list[dict[str, Any]]:
    """One dictionary of plain values per run; times in seconds since 1970."""
    logs = [open_run(store, name) for name in store.names("runs") if store.exists(f"runs/{name}/run.json")]
    found = [_facts(log) for log in logs]
    return sorted(found, key=lambda run: run["last_entry_at"] or 0.0, reverse=True)


def _facts(log: RunLog) -> dict[str, Any]:
    state = log.state
    scores = sorted((e for e in state.evaluations if not e.failed), key=lambda evaluation: evaluation.version)
    champion = state.aliases.get(CHAMPION)
    return {
        "run": log.run_id,
        "workflow": run_config(log).get("workflow"),
        "is_training": is_training(log),
        "step": state.step,
        "trajectories": state.num_trajectories,
        "accuracy_before": scores[0].score if scores else None,
        "accuracy_after": scores[-1].score if scores else None,
        "champion": champion.version if champion is not None else None,
        "wall_seconds": round(state.worked_seconds, 1),
        "last_entry_at": log.entries[-1].written_at if log.entries else None,
    }


def print_runs(runs: list[dict[str, Any]], store: ObjectStore, console: Console) -> None:
    """The same for people."""
    if not runs:
        console.print(
            f"no runs in {store.uri} yet; `millrace train examples/arithmetic.toml` makes one", soft_wrap=True
        )
        return
    table = Table(box=None, pad_edge=False)
    for column in ("run", "workflow", "", "steps", "attempts", "held-out", "champion", "last entry"):
        table.add_column(column, justify="right" if column in ("steps", "attempts", "champion") else "left")
    for run in runs:
        scores = [run["accuracy_before"], run["accuracy_after"]]
        table.add_row(
            run["run"],
            one_line(run["workflow"] or "-"),
            "training" if run["is_training"] else "",
            str(run["step"]),
            f"{run['trajectories']:,}",
            "-" if scores[0] is None else " → ".join(number(score, digits=3) for score in scores),
            "-" if run["champion"] is None else str(run["champion"]),
            "-" if run["last_entry_at"] is None else ago(time.time() - run["last_entry_at"]),
        )
    console.print(table)


def ago(seconds: float) -> str:
    """`3 min ago`."""
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"
