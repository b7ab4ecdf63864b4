"""Tables that are not shards.

In: a Parquet file. Out: rows as dictionaries.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq


def read_parquet_rows(file: Path) -> list[dict[str, Any]]:
    """All rows of a Parquet file."""
    rows: list[dict[str, Any]] = pq.read_table(file).to_pylist()
    return rows
