"""A database that Prefect's server could not open is one sentence before the server starts."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from infra.services import ServiceFailed, check_prefect_database


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("79e7a60e43d8", ""),
        ("ffffffffffff", "is of a newer Prefect than 3.*ffffffffffff.*: move .*prefect.db away"),
        (b"no database at all, but long enough to be one" * 100, "cannot be read.*: move .*prefect.db away"),
        (b"", ""),
    ],
    ids=["of this version", "newer", "damaged", "of a first start that was killed"],
)
def test_a_database_of_a_newer_prefect_is_named_with_what_helps(
    content: str | bytes, sentence: str, tmp_path: Path
) -> None:
    check_prefect_database(tmp_path)  # there is none yet
    file = tmp_path / "prefect" / "prefect.db"
    file.parent.mkdir()
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        with contextlib.closing(sqlite3.connect(file)) as database, database:
            database.execute("CREATE TABLE alembic_version (version_num TEXT)")
            database.execute("INSERT INTO alembic_version VALUES (?)", [content])
    with pytest.raises(ServiceFailed, match=sentence) if sentence else contextlib.nullcontext():
        check_prefect_database(tmp_path)
