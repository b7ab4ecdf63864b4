"""Where state lives: the state folder, and the store of a command that names none.

In: the environment and a folder. Out: paths. `$MILLRACE_HOME` comes first; else the nearest `.millrace` in the folder
and those above it; else one to be made in the folder. For a run file the folder is its own, for other commands the
current one. What was found so is in `$MILLRACE_HOME` for child processes, and in `$MILLRACE_HOME_FOUND`.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from urllib.parse import unquote

HOME, HOME_FOUND, STORE = "MILLRACE_HOME", "MILLRACE_HOME_FOUND", "MILLRACE_STORE"
_NAME = ".millrace"


def find_home(folder: Path | None = None) -> Path:
    """The state folder for a run file in `folder`, or for a command that is called there; it may not exist yet."""
    chosen = os.environ.get(HOME)
    if chosen and chosen != os.environ.get(HOME_FOUND):
        return Path(chosen).resolve()
    folder = (folder or Path.cwd()).resolve()
    return next((p / _NAME for p in (folder, *folder.parents) if (p / _NAME).is_dir()), folder / _NAME)


def home() -> Path:
    """The state folder of this process: runs, databases and logs, unless the run file names other places."""
    return Path(os.environ[HOME]).resolve() if os.environ.get(HOME) else find_home()


def expanded(path: str | Path) -> Path:
    """The path with a user's folder in the place of `~`; where there is no such user it stays, as in a shell."""
    return Path(os.path.expanduser(path))


def is_address(place: str) -> bool:
    """True for what begins like a URI, also one of a single slash; a folder of such a name is `./s3:/…`."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", place) is not None


def store_uri(store: str = "", *, within: Path | None = None) -> str:
    """`store`, else `$MILLRACE_STORE`, else a folder in the state folder (`within`, or this process's); absolute."""
    store = store or os.environ.get(STORE, "")
    if is_address(store):
        return store
    return (expanded(store).resolve() if store else (within or home()) / "store").as_uri()


def store_folder(uri: str) -> Path | None:
    """The folder of a `file://` URI, in which `?` and `#` have no meaning; None for a URI of anything else."""
    return Path(unquote(uri.removeprefix("file://"))) if uri.startswith("file://") else None


def sqlite_uri(file: Path) -> str:
    """The URI of an SQLite database, in which `%` and `?` have a meaning."""
    return "sqlite:///" + str(file).replace("%", "%25").replace("?", "%3F")


def sqlite_file(uri: str) -> Path | None:
    """The file of such a URI; None for a URI of anything else."""
    return Path(unquote(uri.removeprefix("sqlite:///"))) if uri.startswith("sqlite:///") else None


def written_places(store: str = "") -> dict[str, Path]:
    """The folders that a command writes to, by what people call them; a store elsewhere is none."""
    uri = store_uri(store)
    places = {"the state folder (MILLRACE_HOME)": home(), "the temporary folder (TMPDIR)": Path(tempfile.gettempdir())}
    folder = store_folder(uri)
    return places | ({"the store": folder} if folder else {})
