"""`millrace config`: every key of a run file, with its type, range, default and help.

In: a key, a table or nothing. Out: a table on the terminal, or JSON. The same rows are `docs/configuration.md`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from cli.terminal.arguments import JsonOption, print_json
from cli.terminal.console import open_console
from settings.places.hints import command

if TYPE_CHECKING:
    from settings.block import Key


def config(
    key: Annotated[
        str, typer.Argument(help="A key such as train.loss.clip_low, or a table such as rollout; empty: every key.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """List the keys of a run file with their types, ranges, defaults and help."""
    from rich.markup import escape

    from cli.terminal.formatting import plain_table

    rows = keys_of(key)
    if as_json:
        print_json([dataclasses.asdict(row) for row in rows])
        return
    console = open_console()
    for title, members in by_table(rows).items():
        table = plain_table(padding=(0, 2, 0, 0))
        for row in members:
            about = f"{escape(row.help)}\n[dim]{escape(row.line())}[/]"
            table.add_row(escape(row.name.rpartition(".")[2]), about, end_section=True)
        console.print(f"[bold]{escape(title)}[/]", table, "", sep="\n")


def keys_of(key: str) -> list[Key]:
    """The key of this name, or those of the table; raises `InvalidInput` with the nearest one if there is none."""
    from settings.block import keys, nearest
    from settings.errors import InvalidInput
    from settings.run_file import RunConfig

    rows = [row for row in keys(RunConfig) if not key or row.name == key or row.name.startswith(f"{key}.")]
    if not rows:
        close = nearest(key, RunConfig)
        hint = f"did you mean {close!r}?" if close else f"`{command('config')}` lists all keys"
        raise InvalidInput(f"{key}: no such key; {hint}")
    return rows


def by_table(rows: list[Key]) -> dict[str, list[Key]]:
    """Rows under the head of their table as a run file has it: `[train.loss] with kind = "clip"`."""
    tables: dict[str, list[Key]] = {}
    for row in rows:
        table = row.name.rpartition(".")[0]
        head = f"[{table}]" if table else "top level"
        tables.setdefault(f'{head} with kind = "{row.kind}"' if row.kind else head, []).append(row)
    return tables
