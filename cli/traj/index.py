"""`millrace index`: a run's search index, brought up to date with its shards.

In: a run. Out: its index on this machine, which `traj search` looks into.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from cli.terminal.arguments import StoreOption, open_named
from cli.terminal.formatting import counted
from infra.environment import cache_folder

if TYPE_CHECKING:
    from storage.log.run_log import RunLog
    from storage.views.search_index import SearchIndex, Update


def index(
    run: str,
    embedding: Annotated[
        str, typer.Option(help="module:function from texts to vectors, for `traj search --similar`; it is remembered.")
    ] = "",
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Start again from the shards.")] = False,
    store: StoreOption = "",
) -> None:
    """Bring a run's search index up to date with its shards."""
    from infra.user_code import absolute_path, load_object
    from storage.retention.retention import reading

    log, console = open_named(run, store), Console(highlight=False)
    embedding = absolute_path(embedding)
    if embedding:
        load_object(embedding)
    index, started = open_index(log), time.perf_counter()
    with reading(log, "index", quiet=True):
        report = update_index(index, console, embedding=embedding, rebuild=rebuild)
    news = f"{counted(report.shards_added, 'shard')} added" if report.shards_added else "nothing new"
    if report.shards_removed:
        news += f", {counted(report.shards_removed, 'shard')} removed"
    console.print(
        f"run {run}: {news} in {time.perf_counter() - started:.1f} s; {report.trajectories} trajectories to search, "
        f"{f'vectors by {report.embedding}' if report.embedding else 'without vectors'}\n"
        f"index    {index.folder}  [dim](safe to delete: `millrace index` makes it again)[/]",
        soft_wrap=True,
    )


def open_index(log: RunLog) -> SearchIndex:
    """The index of a run on this machine."""
    from infra.user_code import load_object
    from storage.views.search_index import SearchIndex, index_folder

    return SearchIndex(log, index_folder(log, cache_folder()), load_embedding=load_object)


def update_index(index: SearchIndex, notes: Console, **options: Any) -> Update:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("indexing"), BarColumn(), MofNCompleteColumn(), TextColumn("shards"), TimeRemainingColumn())
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as bar:
        task = bar.add_task("indexing", visible=False)  # nothing to do shows nothing

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=total > 0)

        report = index.update(progress=progress, **options)
    for shard_id, reason in report.damaged.items():
        notes.print(f"[yellow]left out:[/] shard {shard_id}: {reason}", soft_wrap=True)
    return report
