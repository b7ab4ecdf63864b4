"""Paths in a run's settings: which keys hold one, and what a relative one is relative to.

    run file ── absolute_paths(folder of the file) ──▶ RunConfig, which every process reads, wherever it stands
                                                           │ recorded_paths
    run.json, relative to `folder`, which is in it too  ◀──┘
       └── local_paths: where they are now, on this machine

A path is found again if the folder was moved, or lies elsewhere on another machine: then it is looked for where one
stands, and beside the state folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from settings.places.state_folder import expanded, is_address

OWN_PACKAGES = ("millrace", "cli", "infra", "rollouts", "settings", "storage", "tasks", "trainers", "flows")
"""Packages that are ours in every process, whatever else has their name: `millrace/__init__.py` imports them first."""
_PRODUCT = Path(__file__).resolve().parents[2]
_SHIPPED = ("examples", "benchmarks")
"""Packages beside ours with workflows in them: every process finds these modules, whatever folder it stands in."""
_FILES = (".jsonl", ".json", ".parquet", ".csv", ".txt", ".gguf")


def absolute_paths(document: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The document with absolute paths in place of those relative to `folder`; ids of the hub and addresses stay.

    A module that lies in `folder` becomes its file.
    """
    return _changed(document, lambda absolute, value: absolute(value, folder))


def recorded_paths(document: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The document with paths relative to `folder` if they are below it or below the folder above."""

    def relative(_: Any, value: str) -> str:
        path, name = _file_and_name(value)
        if not os.path.isabs(path) or not Path(path).is_relative_to(folder.absolute().parent):
            return value
        path = os.path.relpath(path, folder)
        return f"{path}:{name}" if name else os.path.join(os.curdir, path)  # so that it is no id of the hub

    return _changed(document, relative)


def local_paths(document: Mapping[str, Any], folders: Sequence[Path]) -> dict[str, Any]:
    """A recorded document with absolute paths: each in the first of `folders` where it is, else in the very first."""

    def local(absolute: Any, value: str) -> str:
        places = [absolute(value, folder) for folder in folders]
        return next((place for place in places if place != value and is_there(place)), places[0])

    return _changed(document, local)


def moved_paths(recorded: Mapping[str, Any], here: dict[str, Any], requested: Mapping[str, Any]) -> dict[str, Any]:
    """`here`, which `local_paths` made of `recorded`, with the paths of `requested` for files that were moved, and for
    a file, or a module of ours, that is named in another way.

    A file was moved if nothing is left at its old place, and the new path ends like the recorded relative one.
    """
    for key, absolute in PATHS.items():
        old, local, new = (_value(document, key) for document in (recorded, here, requested))
        if not (isinstance(old, str) and isinstance(local, str) and isinstance(new, str)):
            continue
        if (absolute is _code and _with_file(local) == _with_file(new)) or _is_same_file(local, new):
            here = _with(here, key, new)
        if os.path.isabs(old):
            continue
        tail = [part for part in Path(old).parts if part != os.pardir]
        if local != new and not is_there(local) and os.path.isabs(new) and list(Path(new).parts[-len(tail) :]) == tail:
            here = _with(here, key, new)
    return here


def is_there(path: str) -> bool:
    """True if an absolute path, or import path of a file, names something that exists."""
    return os.path.isabs(path) and os.path.exists(_file_and_name(path)[0])


def _is_same_file(value: str, other: str) -> bool:
    """True if both are there and one is reached through a link, say."""
    (path, name), (other_path, other_name) = _file_and_name(value), _file_and_name(other)
    return name == other_name and is_there(value) and is_there(other) and os.path.samefile(path, other_path)


def _file_and_name(value: str) -> tuple[str, str]:
    """`file.py` and `Name`, or another path and an empty name."""
    file, _, name = value.rpartition(":")
    return (file, name) if file.endswith(".py") else (value, "")


def _code(value: str, folder: Path) -> str:
    """`file.py:Name` or `module:Name`."""
    module, colon, name = value.rpartition(":")
    if module.endswith(".py"):
        return f"{_absolute(module, folder)}:{name}"
    parts = module.split(".")
    if not colon or not all(parts) or parts[0] in OWN_PACKAGES:
        return value
    places = [folder.joinpath(*parts).with_suffix(".py"), folder.joinpath(*parts, "__init__.py")]
    packages = [folder.joinpath(*parts[:length], "__init__.py") for length in range(1, len(parts))]
    file = next((place for place in places if place.is_file()), None)
    if folder == _PRODUCT and parts[0] in _SHIPPED:
        return value
    if file is None or (folder == Path.cwd() and not all(package.is_file() for package in packages)):
        return value  # a package without __init__.py is found from its parent alone
    return f"{_absolute(str(file), folder)}:{name}"


def _with_file(value: str) -> str:
    """An import path with the file of a module of ours in its place."""
    module, _, name = value.rpartition(":")
    is_ours = module.partition(".")[0] in _SHIPPED and not module.endswith(".py")
    return f"{_PRODUCT.joinpath(*module.split('.'))}.py:{name}" if is_ours else value


def _named(value: str, folder: Path) -> str:
    """A file, a folder, or an id of the hub, which has the form of a path too."""
    is_path = value.startswith((".", "/", "~")) or value.endswith(_FILES) or (value and (folder / value).exists())
    return _absolute(value, folder) if is_path else value


def _place(value: str, folder: Path) -> str:
    """A folder or an address."""
    return value if not value or is_address(value) else _absolute(value, folder)


def _tracking(value: str, folder: Path) -> str:
    """An address; SQLite's has a relative path with three strokes, and an absolute one with four or three."""
    scheme, separator, path = value.partition(":///")
    if scheme == "sqlite" and separator and not os.path.isabs(path):
        return f"{scheme}:///{_absolute(path, folder)}"
    return value


def _absolute(path: str, folder: Path) -> str:
    return os.path.abspath(folder / expanded(path))


PATHS: dict[str, Callable[[str, Path], str]] = {
    "workflow": _code,
    "store": _place,
    "tracking": _tracking,
    "tracking.uri": _tracking,
    "model": _named,
    "dataset": _named,
    "train.reference.model": _named,
    "train.loss.path": _code,
    "engine.vllm.tokenizer": _named,
    "engine.vllm.hf_config_path": _named,
    "engine.vllm.spec_model": _named,
    "engine.vllm.speculative_config.model": _named,
    "engine.vllm.download_dir": _place,
    "engine.vllm.allowed_local_media_path": _place,
    "engine.vllm.log_config_file": _place,
}
"""Every key with a path in it, and how a relative one becomes absolute."""


def _changed(document: Mapping[str, Any], change: Callable[[Callable[[str, Path], str], str], str]) -> dict[str, Any]:
    changed = dict(document)
    for key, absolute in PATHS.items():
        if isinstance(value := _value(changed, key), str) and value:
            changed = _with(changed, key, change(absolute, value))
    return changed


def _value(document: Mapping[str, Any], key: str) -> Any:
    if key in document:
        return document[key]  # an override, by its dotted key
    table, _, rest = key.partition(".")
    inner = document.get(table)
    return _value(inner, rest) if rest and isinstance(inner, Mapping) else None


def _with(document: Mapping[str, Any], key: str, value: str) -> dict[str, Any]:
    table, _, rest = key.partition(".")
    if key in document or not rest:
        return {**document, key: value}
    return {**document, table: _with(document[table], rest, value)}
