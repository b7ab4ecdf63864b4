"""`millrace runs`: every run of a store, from the logs alone.

In: a store. Out: a row per run, the one that was worked on last first.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from cli.terminal.arguments import JsonOption, StoreOption, open_named_store, print_json
from cli.terminal.formatting import ago, number, one_line, plain_table

if TYPE_CHECKING:
    from storage.log.run_log import RunLog
    from storage.objects.object_store import ObjectStore


def runs(store: StoreOption = "", as_json: JsonOption = False) -> None:
    """Every run in the store: steps, scores, champion, and whether it is being trained here."""
    opened, console = open_named_store(store), Console(highlight=False)
    listed = list_runs(opened)
    if as_json:
        print_json(listed)
    elif listed:
        console.print(_table(listed))
    else:
        sentence = f"no runs in {opened.uri} yet; `millrace train examples/arithmetic.toml` makes one"
        console.print(sentence, soft_wrap=True)


def list_runs(store: ObjectStore) -> list[dict[str, Any]]:
    """One dictionary of plain values per run; times in seconds since 1970."""
    from storage.log.runs import open_run

    logs = [open_run(store, name) for name in store.names("runs") if store.exists(f"runs/{name}/run.json")]
    return sorted(map(_facts, logs), key=lambda run: run["last_entry_at"] or 0.0, reverse=True)


def _facts(log: RunLog) -> dict[str, Any]:
    from storage.log.promotion import CHAMPION
    from storage.log.runs import is_training, run_config

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


def _table(runs: list[dict[str, Any]]) -> Table:
    names = ("run", "workflow", "", "steps", "attempts", "held-out", "champion", "last entry")
    table = plain_table(*names, right=("steps", "attempts", "champion"))
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
    return table
