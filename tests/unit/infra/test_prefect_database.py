"""Prefect's database is there before its server starts, and one that it could not open is one sentence."""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from infra.services.prefect_database import SCHEMA, UnusableDatabase, migrated, prepare_prefect_database


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
    file = tmp_path / "prefect" / "prefect.db"
    file.parent.mkdir()
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        with contextlib.closing(sqlite3.connect(file)) as database, database:
            database.execute("CREATE TABLE alembic_version (version_num TEXT)")
            database.execute("INSERT INTO alembic_version VALUES (?)", [content])
    with pytest.raises(UnusableDatabase, match=sentence) if sentence else contextlib.nullcontext():
        prepare_prefect_database(tmp_path)


def test_the_schema_is_what_the_installed_prefects_migrations_make() -> None:
    def parts(sql: str) -> Counter[str]:  # their order changes from run to run
        return Counter(line.strip(" \t,") for line in sql.splitlines())

    assert parts(SCHEMA.read_text()) == parts(migrated()), "make it anew: python -m infra.services.prefect_database"


@pytest.mark.parametrize("other", ["", "PREFECT_SERVER_DATABASE_CONNECTION_URL", "PREFECT_HOME"])
def test_it_is_made_whole_and_only_where_prefect_looks_for_it(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    if other:
        monkeypatch.setenv(other, "postgresql+asyncpg://elsewhere")
    prepare_prefect_database(tmp_path)
    file = tmp_path / "prefect" / "prefect.db"
    if other:
        assert not file.exists()
        return
    assert [each.name for each in file.parent.iterdir()] == [file.name]
    with contextlib.closing(sqlite3.connect(file)) as database:
        assert database.execute("SELECT count(*) FROM flow_run").fetchall() == [(0,)]
    made = file.stat()
    prepare_prefect_database(tmp_path)
    assert file.stat() == made
