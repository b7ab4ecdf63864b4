"""Problems from files: JSONL or Parquet, local or from the Hugging Face hub.

In: a `dataset` value and a split. Out: rows as dictionaries of strings. A broken line is an error that names it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from settings.errors import InvalidInput, NotFound, path_errors
from storage.objects.hub import fetch_from_hub


def read_dataset(dataset: str, split: str, *, required: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of one split.

    `dataset` is a file, which then serves every split; a folder with files per split (`train.jsonl`,
    `test-00000.parquet`, …); or a hub id.
    Raises `InvalidInput` with file, line and key for a broken line or a missing key, and `NotFound` if the folder has
    no such split; for a hub id also as `storage.objects.hub.fetch_from_hub`.
    """
    path = Path(dataset).expanduser()
    with path_errors(f"dataset = {dataset!r}"):
        if path.is_file():
            return read_rows(path, required=required)
        if not path.is_dir():
            if dataset.startswith((".", "/", "~")) or dataset.count("/") != 1:
                raise NotFound(f"dataset = {dataset!r}: no such file or folder, and not a Hugging Face id")
            path = fetch_from_hub(dataset, "dataset", patterns=[f"*{split}*.jsonl", f"*{split}*.parquet"])
        files = sorted(f for suffix in ("jsonl", "parquet") for f in path.rglob(f"*{split}*.{suffix}"))
        if not files:
            raise NotFound(f"{path} has no file for split {split!r}; expected {split}.jsonl or {split}*.parquet")
        return [row for file in files for row in read_rows(file, required=required)]


def read_rows(file: Path, *, required: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of one JSONL or Parquet file. Raises `InvalidInput` with the number of the line."""
    if file.suffix == ".parquet":
        from storage.objects.tables import read_parquet_rows

        try:
            numbered = list(enumerate(read_parquet_rows(file), start=1))
        except ValueError as error:
            raise InvalidInput(f"{file}: {error}") from error
    else:
        numbered = _json_lines(file)
    rows = []
    for number, row in numbered:
        missing = [key for key in required if not isinstance(row, dict) or not str(row.get(key) or "").strip()]
        if missing:
            raise InvalidInput(f"{file}, line {number}: {' and '.join(map(repr, missing))} missing or empty")
        rows.append(row)
    if not rows:
        raise InvalidInput(f"{file} has no rows")
    return rows


def _json_lines(file: Path) -> list[tuple[int, Any]]:
    rows = []
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                rows.append((number, json.loads(line)))
            except ValueError as error:
                what = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
                raise InvalidInput(f"{file}, line {number}: not JSON ({what}); mend or remove the line") from None
    return rows
