"""Commands that messages tell a user to type: they work where they are printed.

In: the words of a command. Out: the command with the executable as it was called, quoted for a shell.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from settings.places.state_folder import find_home, store_folder, store_uri

COMMAND = "MILLRACE_COMMAND"
"""Environment variable: how the user calls `millrace`, for the processes below."""


def command(*words: object, store: str = "") -> str:
    """`millrace WORDS …`, with `--store` if the command would not look in `store`, an address, without it.

    >>> os.environ["MILLRACE_COMMAND"] = ".venv/bin/millrace"
    >>> command("traj", "sql", "my run", "SELECT 1")
    ".venv/bin/millrace traj sql 'my run' 'SELECT 1'"
    """
    elsewhere = ["--store", _written(store)] if store and store != store_uri(within=find_home()) else []
    return f"{executable()} {shlex.join([str(word) for word in words] + elsewhere)}"


def executable() -> str:
    """How `millrace` is called here, quoted: as it was, and by its name alone if that finds the same file."""
    if chosen := os.environ.get(COMMAND):
        return chosen
    called = Path(sys.argv[0])
    if called.name == "__main__.py" and called.parent.name == "millrace":
        return f"{shlex.quote(sys.orig_argv[0])} -m millrace"
    if called.name != "millrace":  # a notebook, or a process of Prefect or Ray
        called = Path(sys.executable).with_name("millrace")
    return _shown(called) if called.exists() else f"{shlex.quote(sys.executable)} -m millrace"


def program(name: str) -> str:
    """Another program of this environment, quoted."""
    return _shown(Path(sys.executable).with_name(name))


def _written(store: str) -> str:
    """A folder as a path, below the current one as a relative path; another address as it is."""
    folder = store_folder(store)
    if folder is None:
        return store
    return os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)


def _shown(file: Path) -> str:
    on_path = shutil.which(file.name)
    if on_path is not None and os.path.realpath(on_path) == os.path.realpath(file):
        return file.name
    return shlex.quote(os.path.relpath(file) if file.is_relative_to(Path.cwd()) else str(file))
