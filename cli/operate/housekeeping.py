"""`millrace gc`: what retention would remove, a question, and then removing it.

In: runs and rules. Out: a table per run, or JSON with a reason for every item.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from cli.terminal.arguments import StoreOption, open_named, open_named_store, print_json
from cli.terminal.console import open_console
from cli.terminal.formatting import plain_table
from settings.errors import InvalidInput, counted, ranges, size

if TYPE_CHECKING:
    from storage.retention.retention import RunReport

_NAMES = {
    "policy": "policies",
    "state": "optimizer states",
    "shard": "shards and their rewards",
    "orphan": "files without a log entry",
    "temporary": "leftovers of dead processes",
}


def rm(
    run: str,
    sure: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    store: StoreOption = "",
) -> None:
    """Remove a run for good: its log, shards and policies. What MLflow knows of it stays there."""
    from storage.log.run_log import LogDamaged, RunLog
    from storage.log.runs import remove_run, trainer_lock

    console = open_console()
    try:
        log = open_named(run, store)
    except (LogDamaged, InvalidInput):  # as a removal leaves it that was cut off, or damaged otherwise
        log = RunLog(open_named_store(store), run)
    with trainer_lock(log):
        num_bytes = sum(file.num_bytes for file in log.store.walk(log.prefix))
        what = f"run {run} with {counted(log.state.step, 'step')}, {counted(len(log.state.shards), 'shard')}"
        if not sure:
            typer.confirm(f"Remove {what}, {size(num_bytes)}? It cannot be undone", abort=True)
        remove_run(log)
    console.print(f"removed {what}; {size(num_bytes)} are free", soft_wrap=True)


def gc(
    runs: Annotated[list[str] | None, typer.Argument(help="Every run in the store by default.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    keep_last: Annotated[int, typer.Option(help="Keep the newest so many policies of each run.")] = 5,
    keep_every: Annotated[int, typer.Option(help="Keep every so many policy versions one more; 0: none.")] = 0,
    older_than: Annotated[str, typer.Option(help="Remove only what is older: 12h, 30d, 8w.")] = "",
    max_size: Annotated[str, typer.Option(help="Oldest first, until all named runs are no larger: 50GB.")] = "",
    sure: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    ignore_readers: Annotated[bool, typer.Option("--ignore-readers", help="Even while the run is read.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with a reason for every item.")] = False,
    store: StoreOption = "",
) -> None:
    """Remove files that no kept policy, pending group or reader needs.

    A policy is also kept while it is the base model, live, has an alias or the best score.
    """
    from storage.objects.opening import probe
    from storage.retention.retention import collect_garbage
    from storage.retention.rules import make_rules

    rules = make_rules(keep_last=keep_last, keep_every=keep_every, older_than=older_than, max_size=max_size)
    if as_json and not (dry_run or sure):
        raise InvalidInput("--json cannot ask; add --dry-run to look, or --yes to remove")
    opened, console = open_named_store(store), open_console()
    if not dry_run:
        probe(opened, with_data=False)
    collect = functools.partial(collect_garbage, opened, runs or [], rules, ignore_readers=ignore_readers)
    reports = collect(dry_run=dry_run or not as_json)
    if as_json:
        print_json([_document(report) for report in reports])
        return
    if not reports:
        console.print(f"no runs in {escape(opened.uri)}", soft_wrap=True)
    for report in reports:
        _print(report, console)
    free = [report for report in reports if not report.problem and (ignore_readers or not report.readers)]
    if dry_run or not any(report.items for report in free):
        return
    if not sure:
        typer.confirm(f"Remove {size(sum(report.freed_bytes for report in free))}? It cannot be undone", abort=True)
    reports = collect(dry_run=False)
    console.print(f"freed [bold]{size(sum(report.freed_bytes for report in reports if report.removed))}[/]")
    for report in reports:
        if not report.removed and report.run in {shown.run for shown in free}:
            console.print(f"{escape(report.run)}: a reader came in between; the next gc finishes")


def _document(report: RunReport) -> dict[str, Any]:
    """A report as JSON, every item with its reason."""
    items = [
        {"kind": item.kind, "name": item.name, "reason": item.reason}
        | {"bytes": item.num_bytes, "files": len(item.keys), "modified_at": item.modified_at}
        for item in report.items
    ]
    return {
        "run": report.run,
        "bytes": report.num_bytes,
        "freed_bytes": report.freed_bytes,
        "removed": report.removed,
        "problem": report.problem,
        "by_kind": {kind: {"count": count, "bytes": num} for kind, (count, num) in report.by_kind().items()},
        "kept_policies": {str(version): reason for version, reason in report.kept.items()},
        "readers": [vars(reader) for reader in report.readers],
        "items": items,
    }


def _print(report: RunReport, console: Console) -> None:
    if report.problem:
        console.print(f"[bold]{escape(report.run)}[/]  [yellow]left alone[/]: {escape(report.problem)}", soft_wrap=True)
        return
    console.print(
        f"[bold]{escape(report.run)}[/]  {size(report.num_bytes)}, of which would go {size(report.freed_bytes)}"
    )
    versions: dict[str, list[int]] = {}
    for version, reason in report.kept.items():
        versions.setdefault(reason, []).append(version)
    kept = "; ".join(f"{ranges(numbers)} ({reason})" for reason, numbers in versions.items())
    console.print(f"  keeps policies {escape(kept) or 'none'}", soft_wrap=True)
    table = plain_table("count", "what", "size", right=("count", "size"), show_header=False)
    for kind, (count, num_bytes) in report.by_kind().items():
        table.add_row(f"  {count}", _NAMES[kind], size(num_bytes))
    console.print(table)
    for reader in report.readers:
        console.print(
            f"  [yellow]in use[/] by {escape(reader.what)}, process {reader.pid} on {escape(reader.host)}: nothing is "
            "removed until it ends (a dead one counts for three hours); --ignore-readers removes all the same",
            soft_wrap=True,
        )
