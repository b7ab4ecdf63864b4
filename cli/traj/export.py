"""`millrace traj export`: trajectories as a data set for other trainers.

In: a run and what to export. Out: a Parquet file; every shard in it was compared with its digest in the log.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from cli.terminal.arguments import EvalOption, StoreOption, WhereOption, check_target, open_named, room_at
from cli.terminal.console import open_console
from cli.traj.finding import note_left_out
from settings.errors import InvalidInput, counted, size


def export(
    run: str,
    file: Annotated[Path, typer.Argument(metavar="OUT.parquet")],
    kind: Annotated[str, typer.Option("--format", help="sft: conversations; dpo: best and worst of a group.")] = "sft",
    where: WhereOption = "",
    margin: Annotated[float, typer.Option(min=0, help="dpo: least difference of the two rewards.")] = 0.0,
    include_eval: EvalOption = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    store: StoreOption = "",
) -> None:
    """Write trajectories as a data set for other trainers: Parquet that Hugging Face datasets reads."""
    from storage.retention.retention import reading
    from storage.views.exports import export_rows
    from storage.views.queries import open_queries

    log, console = open_named(run, store), open_console(soft_wrap=True)
    if kind not in ("sft", "dpo"):
        raise InvalidInput(f"--format {kind!r}: write sft or dpo")
    if kind == "sft" and margin:
        raise InvalidInput("--margin is about pairs: use it with --format dpo")
    check_target(file, "OUT.parquet", suffix=".parquet")
    with reading(log, f"traj export {kind}"):
        log.refresh()  # what retention has taken since is known from here on, and it takes nothing more
        queries = open_queries(log)
        with room_at(file):
            num_rows = export_rows(
                queries, file, kind, where=where, margin=margin, include_eval=include_eval, force=force
            )
    what = counted(num_rows, "conversation" if kind == "sft" else "pair")
    console.print(f"{what}, {size(file.stat().st_size)}: {escape(str(file))}")
    console.print(f'[dim]datasets.load_dataset("parquet", data_files="{escape(str(file))}")[/]')
    note_left_out(queries.left_out)
