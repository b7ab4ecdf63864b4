"""`millrace runs`: what every log of a store says in a line, and nothing else: no MLflow, no Prefect, no torch.

In: a store. Out: a row per run, the one that was worked on last first; of a damaged one the reason.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cli.operate.status import end_sentence
from cli.terminal.arguments import JsonOption, StoreOption, open_named_store, print_json
from cli.terminal.console import open_console
from cli.terminal.formatting import ago, number, plain_table
from settings.places.hints import command
from settings.redaction import one_line

if TYPE_CHECKING:
    from storage.log.run_log import RunLog
    from storage.objects.object_store import ObjectStore

_FOLDED = 16
"""Characters of a workflow's name in a line, if the name takes several."""
_GAP = 2


def runs(store: StoreOption = "", as_json: JsonOption = False) -> None:
    """Every run in the store: steps, scores, champion, and whether it is being trained here."""
    opened, console = open_named_store(store), open_console()
    listed = list_runs(opened)
    if as_json:
        print_json(listed)
    elif listed:
        console.print(_runs_table(listed, width=console.width))
        for run in listed:
            if text := f"is damaged: {run['damaged']}" if run["damaged"] else run["ended"]:
                console.print(Text(one_line(f"{run['run']} {text}"), style="yellow"), soft_wrap=True)
    else:
        train = command("train", "RUNFILE")
        console.print(escape(f"no runs in {opened.uri} yet; `{train}` makes one"), soft_wrap=True)


def list_runs(store: ObjectStore) -> list[dict[str, Any]]:
    """One dictionary of plain values per run; times in seconds since 1970. Of what is damaged, or
    no run, there is only the reason."""
    from storage.log.runs import RunLogs

    facts, damaged = RunLogs(store).look(_run_facts)
    listed = sorted(facts.values(), key=lambda run: run["last_entry_at"] or 0.0, reverse=True)
    return listed + [{"run": run, "damaged": reason} for run, reason in damaged.items()]


def _run_facts(log: RunLog) -> dict[str, Any]:
    from storage.log.promotion import CHAMPION
    from storage.log.runs import is_training, run_config
    from storage.log.scores import own_scores

    state = log.state
    config = run_config(log)
    scores = own_scores(log, config)
    champion = state.aliases.get(CHAMPION)
    return {
        "run": log.run_id,
        "damaged": None,
        "workflow": config.get("workflow"),
        "is_training": is_training(log),
        "ended": end_sentence(log),
        "step": state.step,
        "trajectories": state.num_trajectories,
        "accuracy_before": scores[0].score if scores else None,
        "accuracy_after": scores[-1].score if scores else None,
        "accuracy_tasks": scores[-1].num_tasks if scores else None,
        "evaluations": len(scores),
        "champion": champion.version if champion is not None else None,
        "wall_seconds": round(state.worked_seconds, 1),
        "last_entry_at": log.entries[-1].written_at if log.entries else None,
    }


def _runs_table(runs: list[dict[str, Any]], *, width: int) -> Table:
    """A row per run. Where lines of `width` characters are too short for all columns, some are left out."""
    names = ["run", "workflow", "", "steps", "attempts", "held-out", "tasks", "champion", "last entry"]
    rows = []
    for run in runs:
        if run["damaged"]:
            rows.append(dict.fromkeys(names, "-") | {"run": escape(one_line(run["run"])), "": "damaged"})
            continue
        scores = [run["accuracy_before"], run["accuracy_after"]][-run["evaluations"] :]
        cells = (
            run["run"],
            run["workflow"] or "-",
            "training" if run["is_training"] else (run["ended"] or "").partition(" ")[0],
            str(run["step"]),
            f"{run['trajectories']:,}",
            "-" if scores[0] is None else " → ".join(number(score, digits=3) for score in scores),
            "-" if run["accuracy_tasks"] is None else str(run["accuracy_tasks"]),
            "-" if run["champion"] is None else str(run["champion"]),
            "-" if run["last_entry_at"] is None else ago(time.time() - run["last_entry_at"]),
        )
        rows.append(dict(zip(names, cells, strict=True)))
    if all(run.get("champion") is None for run in runs):
        names.remove("champion")
    texts = {name: [name, *(one_line(row[name]) for row in rows)] for name in names}
    widths = {name: max(map(len, column)) for name, column in texts.items()}
    widths["workflow"] = min(widths["workflow"], _FOLDED)
    for name in ("workflow", "tasks", "attempts", "last entry"):
        if sum(widths[each] for each in names) + _GAP * (len(names) - 1) > width:
            names.remove(name)
    table = plain_table(*names, right=("steps", "attempts", "tasks", "champion"))
    for row in rows:
        table.add_row(*(Text(one_line(row[name])) for name in names))
    return table
