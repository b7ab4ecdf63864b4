"""`millrace traj ls`: a line for each attempt, newest first.

In: a run and a condition. Out: a table as wide as the terminal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cli.terminal.arguments import EvalOption, StoreOption, WhereOption, open_named
from cli.terminal.console import open_console
from cli.terminal.formatting import number, versions_of
from cli.traj.finding import NEWEST, condition, newest_shards, note_left_out, outcome_of, why_missing
from settings.errors import InvalidInput, in_one_line
from settings.redaction import one_line


def ls(
    run: str,
    where: WhereOption = "",
    include_eval: EvalOption = False,
    count: Annotated[int, typer.Option("-n", min=1, help="At most this many.")] = 20,
    failed: Annotated[bool, typer.Option("--failed", help="Those that failed, with the error and its place.")] = False,
    store: StoreOption = "",
) -> None:
    """List trajectories, newest first, or the attempts that left none because they failed."""
    from storage.shards.failed_attempts import newest_failures
    from storage.views.queries import open_queries

    log, console = open_named(run, store), open_console()
    if failed:
        if where:
            raise InvalidInput("--where is about trajectories, and attempts that failed left none")
        failures = newest_failures(log, count, include_eval=include_eval)
        if not failures:
            hint = "" if include_eval else "; held-out ones are listed with --eval"
            console.print(f"no attempt of run {escape(run)} has failed{hint}")
        for failure in failures:
            console.print(f"{escape(f'{failure.id}  {failure.status}')}  [red]{escape(in_one_line(failure.error))}[/]")
        return
    shard_ids = None if where else newest_shards(log.state, count, include_eval=include_eval)
    sql = f"""
        SELECT id, sequence_idx, prompt, reply, reward, status, head_version, tail_version, outcome, step, num_sampled
        FROM trajectories WHERE {condition(where, include_eval)} ORDER BY {NEWEST} LIMIT {count + 1}
    """
    queries = open_queries(log, shard_ids=shard_ids)
    rows = queries.select(sql).to_pylist()
    if len(rows) <= count and shard_ids is not None and len(shard_ids) < len(log.state.shards):
        queries = open_queries(log)
        rows = queries.select(sql).to_pylist()
    if not rows:
        hint = "" if include_eval else "; held-out ones are listed with --eval"
        raise InvalidInput(f"run {run!r} has no such trajectory{why_missing(queries.left_out)}{hint}")
    console.print(_listing(rows[:count], console.width))
    if len(rows) > count:
        console.print(f"[dim]the newest {count}; more with -n, others with --where[/]")
    note_left_out(queries.left_out)


def _listing(rows: Sequence[Mapping[str, Any]], width: int) -> Table:
    """One line for each; prompt and reply share what the other columns leave of the width."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    ids = [row["id"] + (f" ↳{row['sequence_idx']}" if row["sequence_idx"] else "") for row in rows]
    table.add_column("id", width=min(max(map(cell_len, ids)), max(12, width // 5)), overflow="fold")
    table.add_column("prompt")
    table.add_column("reply", style="green")
    for name in ("reward", "status", "policy", "outcome", "tokens"):
        table.add_column(name, justify="left" if name in ("status", "outcome") else "right", no_wrap=True)
    for trajectory_id, row in zip(ids, rows, strict=True):
        prompt, reply = (
            Text(one_line(row[name] or ""), no_wrap=True, overflow="ellipsis") for name in ("prompt", "reply")
        )
        facts = (number(row["reward"]), row["status"], versions_of(row), outcome_of(row), str(row["num_sampled"]))
        table.add_row(Text(trajectory_id), prompt, reply, *facts)
    return table
