"""`millrace traj sql` and `export`: any question about a run, and its trajectories as a data set.

In: a run's log and SQL, or what to export. Out: a table, JSON or CSV on the terminal; or a Parquet file.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cli.terminal.formatting import counted, one_line, shortened, size
from settings.errors import InvalidInput
from storage.log.run_log import RunLog
from storage.retention.retention import reading
from storage.views.exports import export_dpo, export_sft
from storage.views.queries import VIEWS, open_queries

MOST_ROWS = 200
"""Rows of a table on the terminal; JSON and CSV have all."""
MOST_RECORDS = 20
"""Rows where they are printed one value to a line."""
_MOST_CHARACTERS = 200  # of one value
_NARROWEST = 9  # characters that a column gets before rows are printed one value to a line


def run_sql(log: RunLog, sql: str, *, as_json: bool, as_csv: bool, console: Console) -> dict[str, str]:
    """Print the answer, and return what was left out of it, by shard id.

    Raises `ValueError` for wrong SQL, with where to find the names.
    """
    if as_json and as_csv:
        raise InvalidInput("--json and --csv exclude each other")
    queries = open_queries(log)
    try:
        if as_json:
            queries.stream(sql, lambda reader: _write_json(reader, sys.stdout))
        elif as_csv:
            queries.stream(sql, lambda reader: _write_csv(reader, sys.stdout))
        else:
            queries.stream(sql, lambda reader: _print(reader, console))
    except ValueError as error:
        raise InvalidInput(f"{error}\n`millrace traj sql {log.run_id}` lists the views and their columns") from error
    return queries.left_out


def print_views(log: RunLog, console: Console) -> None:
    """Every view with its columns, and an example."""
    queries = open_queries(log)
    for view, sentence in VIEWS.items():
        console.print(f"[bold cyan]{view}[/]  {escape(sentence)}", soft_wrap=False)
        columns = Text()
        for name, kind in queries.columns(view).items():
            columns.append(name)
            columns.append(f":{_short(kind)}  ", style="dim")
        grid = Table.grid()
        grid.add_row("  ", columns)
        console.print(grid)
        console.print()
    example = "select step, avg(reward), avg(num_sampled) from trajectories group by step order by step"
    console.print(f'[dim]millrace traj sql {log.run_id} "{example}"[/]', soft_wrap=True)
    console.print("[dim]the SQL is DuckDB's: https://duckdb.org/docs/stable/sql/introduction[/]", soft_wrap=True)


def export(
    log: RunLog,
    file: Path,
    *,
    kind: str,
    where: str,
    margin: float,
    include_eval: bool,
    force: bool,
    console: Console,
) -> dict[str, str]:
    """Write a data set and say what it holds; returns what was left out, by shard id.

    Every shard is compared with its digest in the log. Raises what `export_sft` and `export_dpo` raise.
    """
    if kind not in ("sft", "dpo"):
        raise InvalidInput(f"--format {kind!r}: write sft or dpo")
    if kind == "sft" and margin:
        raise InvalidInput("--margin is about pairs: use it with --format dpo")
    with reading(log, f"traj export {kind}"):
        log.refresh()  # what retention has taken since is known from here on, and it takes nothing more
        queries = open_queries(log, verify=True)
        if kind == "sft":
            num_rows = export_sft(queries, file, where=where, include_eval=include_eval, force=force)
        else:
            num_rows = export_dpo(queries, file, where=where, margin=margin, include_eval=include_eval, force=force)
    what = counted(num_rows, "conversation" if kind == "sft" else "pair")
    console.print(f"{what}, {size(file.stat().st_size)}: {escape(str(file))}", soft_wrap=True)
    console.print(f'[dim]datasets.load_dataset("parquet", data_files="{escape(str(file))}")[/]', soft_wrap=True)
    return queries.left_out


def _rows(reader: pa.RecordBatchReader) -> Iterator[list[Any]]:
    """Values in column order: two columns may have one name."""
    for batch in reader:
        yield from map(list, zip(*(column.to_pylist() for column in batch.columns), strict=True))


def _write_json(reader: pa.RecordBatchReader, out: TextIO) -> None:
    names = reader.schema.names
    separator = "[\n"
    for row in _rows(reader):
        plain = {name: _plain(value, field.type) for name, value, field in zip(names, row, reader.schema, strict=True)}
        out.write(separator + json.dumps(plain, ensure_ascii=False))
        separator = ",\n"
    out.write("[]\n" if separator == "[\n" else "\n]\n")


def _write_csv(reader: pa.RecordBatchReader, out: TextIO) -> None:
    writer = csv.writer(out)
    writer.writerow(reader.schema.names)
    for row in _rows(reader):
        plain = [_plain(value, field.type) for value, field in zip(row, reader.schema, strict=True)]
        writer.writerow([json.dumps(v, ensure_ascii=False) if isinstance(v, list | dict) else v for v in plain])


def _print(reader: pa.RecordBatchReader, console: Console) -> None:
    schema = reader.schema
    is_narrow = len(schema) * _NARROWEST > console.width
    most = MOST_RECORDS if is_narrow else MOST_ROWS
    rows = list(itertools.islice(_rows(reader), most + 1))
    cells = [
        [_cell(_plain(value, field.type)) for value, field in zip(row, schema, strict=True)] for row in rows[:most]
    ]
    if is_narrow:
        for index, row in enumerate(cells):
            grid = Table.grid(padding=(0, 2))
            grid.add_column(justify="right", style="dim", no_wrap=True)
            grid.add_column(overflow="fold")
            for name, cell in zip(schema.names, row, strict=True):
                grid.add_row(Text(name), cell)
            console.rule(f"[dim]{index + 1}[/]", align="left", style="dim")
            console.print(grid)
    else:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for field in schema:
            is_number = pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
            is_number = is_number or pa.types.is_decimal(field.type)
            table.add_column(Text(field.name), justify="right" if is_number else "left", overflow="fold")
        for row in cells:
            table.add_row(*row)
        console.print(table)
    if len(rows) > most:
        console.print(f"[dim]the first {most} rows; all with --json or --csv, fewer with LIMIT[/]")
    elif not rows:
        console.print("[dim]no rows[/]")


def _plain(value: Any, kind: pa.DataType) -> Any:
    """A value as JSON has it: maps become objects, times ISO text, decimals numbers, NaN null."""
    if value is None:
        return None
    if pa.types.is_map(kind):
        return {str(key): _plain(inner, kind.item_type) for key, inner in value}
    if pa.types.is_struct(kind):
        return {field.name: _plain(value[field.name], field.type) for field in kind}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return [_plain(inner, kind.value_type) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if pa.types.is_decimal(kind):
        return int(value) if value == value.to_integral_value() else float(value)
    return value if isinstance(value, bool | int | str) else str(value)


def _cell(value: Any) -> Text:
    if value is None:
        return Text("null", style="dim")
    if isinstance(value, float):
        return Text(f"{value:.6g}" if abs(value) < 1e6 else f"{value:.12g}")
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return Text(shortened(one_line(text), _MOST_CHARACTERS))


def _short(kind: str) -> str:
    """DuckDB's name of a type, the fields of structs left out."""
    if kind.startswith("STRUCT"):
        return "struct[]" if kind.endswith("[]") else "struct"
    return kind.lower().strip('"')
