"""A table as Arrow IPC bytes, and the rows of a Parquet file as dictionaries."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa


def ipc_bytes(table: pa.Table, *, compression: str) -> bytes:
    """The table as an Arrow IPC file, its metadata included."""
    file = io.BytesIO()
    with pa.ipc.new_file(file, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table)
    return file.getvalue()  # shares its buffer; Arrow's own stream would copy it


def read_unpacked(file: Path) -> bytes:
    """A file's bytes, unpacked if its name ends in .gz, .zst or .bz2. Raises `ValueError` if it is cut off."""
    with pa.input_stream(str(file), compression="detect") as stream:
        try:
            data: bytes = stream.read()
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"it cannot be unpacked: {error}") from error
    return data


def read_parquet_rows(file: Path) -> list[dict[str, Any]]:
    """All rows of a Parquet file. A number of 32 bits becomes the shortest decimal that means it: 0.1.

    Raises `ValueError` if it cannot be read, or has a column twice.
    """
    import pyarrow.parquet as pq

    try:
        if doubled := _doubled(pa.struct(pq.read_schema(file))):
            raise ValueError(f"it has the column {doubled!r} twice; rename one of them, or leave one out")
        table = pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # it is not there, or may not be read
            raise
        raise ValueError(f"it is no Parquet file, or damaged: {error}") from error
    if (texts := _with_float32_as(pa.struct(table.schema), pa.string())) != pa.struct(table.schema):
        numbers = _with_float32_as(pa.struct(table.schema), pa.float64())
        table = table.cast(pa.schema(texts)).cast(pa.schema(numbers))
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def _doubled(kind: pa.DataType) -> str:
    """The first name that a struct, or one inside of it, has twice; empty if there is none."""
    fields = [kind.field(number) for number in range(kind.num_fields)]
    names = [field.name for field in fields] if pa.types.is_struct(kind) else []
    twice = [name for number, name in enumerate(names) if name in names[:number]]
    return next(filter(None, [*twice, *(_doubled(field.type) for field in fields)]), "")


def _with_float32_as(kind: pa.DataType, other: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_with_float32_as(field.type, other)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_with_float32_as(kind.value_type, other)))
    return other if pa.types.is_float32(kind) else kind
