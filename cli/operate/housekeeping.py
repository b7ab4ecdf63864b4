"""`millrace gc`: what retention would remove, a question, and then removing it.

In: runs and rules. Out: a table per run, or JSON with a reason for every item.
"""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cli.terminal.formatting import ranges, size
from infra.environment import store_uri
from settings.errors import InvalidInput
from storage.objects.opening import open_store
from storage.retention.retention import RunReport, collect_garbage
from storage.retention.rules import Rules

_NAMES = {
    "policy": "policies",
    "state": "optimizer states",
    "shard": "shards and their rewards",
    "orphan": "files without a log entry",
    "temporary": "leftovers of dead processes",
}


def collect(
    runs: list[str], rules: Rules, *, dry_run: bool, sure: bool, ignore_readers: bool, store: str, as_json: bool
) -> None:
    """Show what would go; unless `dry_run`, ask (unless `sure`) and remove it.

    Raises `ValueError` where JSON is wanted and nobody said that it is sure: then nobody can be asked.
    """
    if as_json and not (dry_run or sure):
        raise InvalidInput("--json cannot ask; add --dry-run to look, or --yes to remove")
    opened, console = open_store(store_uri(store)), Console(highlight=False)
    if as_json:
        reports = collect_garbage(opened, runs, rules, dry_run=dry_run, ignore_readers=ignore_readers)
        typer.echo(json.dumps([as_document(report) for report in reports], indent=2))
        return
    reports = collect_garbage(opened, runs, rules, dry_run=True, ignore_readers=ignore_readers)
    if not reports:
        console.print(f"no runs in {escape(opened.uri)}", soft_wrap=True)
    for report in reports:
        _print(report, console)
    free = [report for report in reports if not report.problem and (ignore_readers or not report.readers)]
    if dry_run or not any(report.items for report in free):
        return
    if not sure:
        typer.confirm(f"Remove {size(sum(report.freed_bytes for report in free))}? It cannot be undone", abort=True)
    reports = collect_garbage(opened, runs, rules, dry_run=False, ignore_readers=ignore_readers)
    console.print(f"freed [bold]{size(sum(report.freed_bytes for report in reports if report.removed))}[/]")
    for report in reports:
        if not report.removed and report.run in {shown.run for shown in free}:
            console.print(f"{escape(report.run)}: a reader came in between; the next gc finishes")


def as_document(report: RunReport) -> dict[str, Any]:
    """A report as JSON, every item with its reason."""
    items = [
        {
            "kind": item.kind,
            "name": item.name,
            "reason": item.reason,
            "bytes": item.num_bytes,
            "files": len(item.keys),
            "modified_at": item.modified_at,
        }
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
        "readers": [{"what": r.what, "host": r.host, "pid": r.pid} for r in report.readers],
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
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(min_width=4, justify="right")
    table.add_column()
    table.add_column(justify="right")
    for kind, (count, num_bytes) in report.by_kind().items():
        table.add_row(f"  {count}", _NAMES[kind], size(num_bytes))
    console.print(table)
    for reader in report.readers:
        console.print(
            f"  [yellow]in use[/] by {escape(reader.what)}, process {reader.pid} on {escape(reader.host)}: nothing is "
            "removed until it ends (a dead one counts for three hours); --ignore-readers removes all the same",
            soft_wrap=True,
        )
