"""`millrace traj sql`: any question about a run.

In: a run and SQL. Out: a table, JSON or CSV on the terminal; without SQL, the views and their columns.
"""

from __future__ import annotations

import decimal
import itertools
import json
import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from cli.terminal.arguments import JsonOption, StoreOption, open_named
from cli.terminal.console import open_console
from cli.terminal.formatting import facts_table, plain_table, shortened
from cli.traj.finding import note_left_out
from settings.errors import InvalidInput
from settings.places.hints import command
from settings.redaction import one_line, printable

if TYPE_CHECKING:
    import pyarrow as pa

    from storage.log.run_log import RunLog

MOST_ROWS = 200
"""Rows of a table on the terminal; JSON and CSV have all."""
MOST_RECORDS = 20
"""Rows if they are printed one value to a line."""
_MOST_CHARACTERS = 200  # of one value
_NARROWEST = 9  # characters that a column gets before rows are printed one value to a line


def sql(
    run: str,
    query: Annotated[str, typer.Argument(metavar="[SQL]", help="Without it, the views and their columns.")] = "",
    as_json: JsonOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    store: StoreOption = "",
) -> None:
    """Ask a run anything in SQL: trajectories, groups, turns, tokens, steps, evaluations. It only reads."""
    from storage.views.queries import open_queries

    log, console = open_named(run, store), open_console()
    if not query:
        _print_views(log, console)
        return
    if as_json and as_csv:
        raise InvalidInput("--json and --csv exclude each other")
    write = _write_json if as_json else _write_csv if as_csv else None
    queries = open_queries(log)
    queries.stream(query, lambda reader: write(reader, sys.stdout) if write else _print(reader, console))
    note_left_out(queries.left_out)


def _print_views(log: RunLog, console: Console) -> None:
    """Every view with its columns, and an example."""
    from storage.views.queries import VIEWS, open_queries

    queries = open_queries(log)
    for view, sentence in VIEWS.items():
        console.print(f"[bold cyan]{view}[/]  {escape(sentence)}", soft_wrap=False)
        columns = Text()
        for name, kind in queries.columns(view).items():
            columns.append(name)
            columns.append(f":{_short(kind)}  ", style="dim")
        console.print(Padding(columns, (0, 0, 1, 2), expand=False))
    example = "select step, avg(reward), avg(num_sampled) from trajectories group by step order by step"
    console.print(f"[dim]{escape(command('traj', 'sql', log.run_id, example, store=log.store.uri))}[/]", soft_wrap=True)
    console.print("[dim]the SQL is DuckDB's: https://duckdb.org/docs/stable/sql/introduction[/]", soft_wrap=True)


def _rows(reader: pa.RecordBatchReader) -> Iterator[list[Any]]:
    """Plain values in column order: two columns may have one name."""
    for batch in reader:
        columns = (column.to_pylist(maps_as_pydicts="lossy") for column in batch.columns)
        yield from ([_plain(value) for value in row] for row in zip(*columns, strict=True))


def _plain(value: Any) -> Any:
    """A value as JSON has it: times become ISO text, decimals numbers, NaN null."""
    match value:
        case dict():
            return {str(key): _plain(inner) for key, inner in value.items()}
        case list():
            return [_plain(inner) for inner in value]
        case float():
            return value if math.isfinite(value) else None
        case decimal.Decimal():
            return int(value) if value == value.to_integral_value() else float(value)
        case None | bool() | int() | str():
            return value
        case _:
            return str(value)


def _write_json(reader: pa.RecordBatchReader, out: TextIO) -> None:
    separator = "[\n"
    for row in _rows(reader):
        out.write(separator + json.dumps(dict(zip(reader.schema.names, row, strict=True))))
        separator = ",\n"
    out.write("[]\n" if separator == "[\n" else "\n]\n")


def _write_csv(reader: pa.RecordBatchReader, out: TextIO) -> None:
    import csv

    writer = csv.writer(out)
    writer.writerow(reader.schema.names)
    for row in _rows(reader):
        cells = [json.dumps(v, ensure_ascii=False) if isinstance(v, list | dict) else v for v in row]
        writer.writerow([printable(cell) if out.isatty() and isinstance(cell, str) else cell for cell in cells])


def _print(reader: pa.RecordBatchReader, console: Console) -> None:
    from pyarrow import types

    is_narrow = len(reader.schema) * _NARROWEST > console.width
    most = MOST_RECORDS if is_narrow else MOST_ROWS
    rows = list(itertools.islice(_rows(reader), most + 1))
    longest = _MOST_CHARACTERS if console.is_terminal else sys.maxsize
    cells = [[_cell(value, longest=longest) for value in row] for row in rows[:most]]
    if is_narrow:
        for index, row in enumerate(cells):
            record = facts_table()
            for name, cell in zip(reader.schema.names, row, strict=True):
                record.add_row(Text(name), cell)
            console.rule(f"[dim]{index + 1}[/]", align="left", style="dim")
            console.print(record)
    else:
        table = plain_table(show_header=True)
        for field in reader.schema:
            is_number = any(check(field.type) for check in (types.is_integer, types.is_floating, types.is_decimal))
            table.add_column(Text(field.name), justify="right" if is_number else "left", overflow="fold")
        for row in cells:
            table.add_row(*row)
        console.print(table)
    if len(rows) > most:
        console.print(f"[dim]the first {most} rows; all with --json or --csv, fewer with LIMIT[/]")
    elif not rows:
        console.print("[dim]no rows[/]")


def _cell(value: Any, *, longest: int) -> Text:
    if value is None:
        return Text("null", style="dim")
    if isinstance(value, float):
        return Text(f"{value:.6g}" if abs(value) < 1e6 else f"{value:.12g}")
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return Text(shortened(one_line(text), longest))


def _short(kind: str) -> str:
    """DuckDB's name of a type, the fields of structs left out."""
    if kind.startswith("STRUCT"):
        return "struct[]" if kind.endswith("[]") else "struct"
    return kind.lower().strip('"')
