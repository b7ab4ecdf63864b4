"""Prefect's database in the state folder: there at once, and refused in a sentence if Prefect could not open it.

In: a state folder. Out: `prefect/prefect.db` as Prefect's migrations leave it. In an empty folder they take 5 of
the 8 s of processor time until its server answers, so what they make is kept in `prefect_schema.sql`. A newer Prefect
takes it from there. After `prefect` has got another version:

    python -m infra.services.prefect_database        # writes prefect_schema.sql anew
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from infra.environment import prefect_database_url
from settings.errors import UserError

SCHEMA = Path(__file__).with_name("prefect_schema.sql")


class UnusableDatabase(UserError):
    """Prefect's database is none that the installed Prefect can open. The message has the way out."""


def prepare_prefect_database(home: Path) -> None:
    """Make the state folder's database if there is none.

    Raises `UnusableDatabase` if a newer Prefect has written it, or if it is none: Prefect would try for its whole
    patience, and print pages.
    """
    file = home / "prefect" / "prefect.db"
    if not file.exists():
        if os.environ.get("PREFECT_HOME") == str(file.parent) and _is_database_of_ours(file):
            _make(file)
        return
    fix = f"move {file} away (runs lose nothing: their logs are in the store), or set PREFECT_HOME to another folder"
    try:
        with contextlib.closing(sqlite3.connect(file)) as database:
            unknown = _unknown(_revisions(database))
    except sqlite3.DatabaseError as error:
        if "no such table" in str(error):  # a first start that was killed
            return
        raise UnusableDatabase(f"Prefect's database cannot be read ({error}): {fix}") from error
    if unknown:
        raise UnusableDatabase(
            f"Prefect's database is of a newer Prefect than {version('prefect')} (at {unknown[0]}): {fix}"
        )


def _is_database_of_ours(file: Path) -> bool:
    named = [f"PREFECT_{name}_DATABASE_CONNECTION_URL" for name in ("SERVER", "API")]
    return {os.environ[name] for name in named if name in os.environ} <= {prefect_database_url(file)}


def _make(file: Path) -> None:
    """Whole or not at all, and never over one that another process makes meanwhile."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent)
    os.close(handle)
    try:
        with contextlib.closing(sqlite3.connect(name)) as database:
            database.executescript(SCHEMA.read_text(encoding="utf-8"))
            if not _unknown(_revisions(database)):
                with contextlib.suppress(FileExistsError):
                    os.link(name, file)
    finally:
        os.unlink(name)


def _revisions(database: sqlite3.Connection) -> list[str]:
    return [row[0] for row in database.execute("SELECT version_num FROM alembic_version")]


def _unknown(revisions: Sequence[str]) -> list[str]:
    """The revisions that the installed Prefect does not have."""
    [package] = importlib.util.find_spec("prefect").submodule_search_locations  # type: ignore[union-attr, misc]
    migrations = Path(package, "server", "database", "_migrations", "versions", "sqlite")
    texts = [migration.read_text(encoding="utf-8") for migration in migrations.glob("*.py")]
    return [name for name in revisions if not any(f'revision = "{name}"' in text for text in texts)]


def migrated() -> str:
    """What Prefect's migrations make of an empty file, as SQL."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "prefect.db")
        url = {"PREFECT_API_DATABASE_CONNECTION_URL": prefect_database_url(file)}
        command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "-y"]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, **url})
        with contextlib.closing(sqlite3.connect(file)) as database:
            return "\n".join(database.iterdump()) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(migrated(), encoding="utf-8")
