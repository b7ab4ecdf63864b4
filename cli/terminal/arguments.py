"""What several commands take and print: where the runs are, a run by its name, settings, JSON.

In: option values as typed. Out: the run's log, settings by key; JSON on the terminal.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from settings.errors import InvalidInput, path_errors

if TYPE_CHECKING:
    from storage.log.run_log import RunLog
    from storage.objects.object_store import ObjectStore

StoreOption = Annotated[str, typer.Option(help="Where the runs are; by default $MILLRACE_STORE, or .millrace/store.")]
EvalOption = Annotated[bool, typer.Option("--eval", help="Held-out attempts too.")]
AdoptOption = Annotated[bool, typer.Option("--adopt-tasks", help="Go on although the tasks are not those of before.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
TrackingOption = Annotated[str, typer.Option(help="MLflow; by default $MILLRACE_TRACKING, else .millrace's.")]
WhereOption = Annotated[str, typer.Option(help='Only those that satisfy this SQL: "reward < 1 and num_turns > 2".')]


class Command(TyperCommand):
    """A command that says of a word too many what it takes instead."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        ctx.allow_extra_args = True
        words = super().parse_args(ctx, args)
        if ctx.args and not ctx.resilient_parsing:
            options = [param.opts[0] for param in self.params if param.opts[0].startswith("--")]
            key, separator, value = ctx.args[0].partition("=")
            option = f"--{key.strip('-').replace('_', '-')}"
            meant = (
                f"write {option} {value}"
                if separator and option in options
                else f"options: {', '.join(options) or 'none'}"
            )
            ctx.fail(f"{ctx.args[0]!r} is one word too many; {meant}")
        return words


def open_named_store(store: str, *, patience: float | None = None) -> ObjectStore:
    """The store that an option names, or the default one; `patience` as in `open_store`."""
    from settings.places.state_folder import store_uri
    from storage.objects.opening import open_store

    return open_store(store_uri(store), patience=patience)


def open_named(run: str, store: str, *, appends: bool = False, patience: float | None = None) -> RunLog:
    """The log of a run in a store, or in the default one; `appends` as in `open_run`, `patience` as in `open_store`.
    Raises `NotFound` listing the runs there are."""
    from storage.log.runs import open_run

    opened = open_named_store(store, patience=patience)
    with path_errors(f"store {opened.uri}"):
        return open_run(opened, run, appends=appends)


_FILE_TYPES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".zip", ".tar", ".gz"}
"""Endings of what is no folder, of names such as `qwen-2.5`."""


def check_target(path: Path, option: str, *, make_folder: bool = False, suffix: str = "") -> None:
    """Refuse a path that nothing can be written to, before the work whose result would be written there. With `suffix`
    the result is a file that ends in it, without it a folder.

    Raises `InvalidInput`, or `StoreFull` for a disk without room for another file.
    """
    import tempfile

    folder = path.absolute().parent
    with path_errors(f"{option} {path}", fix="name another place"), room_at(path):
        if make_folder and not folder.exists():
            folder.mkdir(parents=True)
        if not folder.is_dir():
            raise InvalidInput(f"there is no folder {folder}; make it first")
        path.exists()  # raises for a name that is too long
        with tempfile.TemporaryFile(dir=folder):
            pass
        if suffix and path.is_dir():
            raise InvalidInput(f"{option} {path} is a folder; name a file in it, such as {path / f'out{suffix}'}")
        if suffix and path.suffix.lower() != suffix:
            raise InvalidInput(f"{option} {path}: only {suffix} is written; name it {path.with_suffix(suffix)}")
        if not suffix and path.suffix.lower() in _FILE_TYPES:
            raise InvalidInput(f"{option} {path} would be a folder with this name; name it {path.with_suffix('')}")


@contextlib.contextmanager
def room_at(path: Path) -> Iterator[None]:
    """Raise `StoreFull` with the path if what a block writes there does not fit on its disk."""
    from storage.objects.object_store import room_for

    remedy = "Make room there, or name another place"
    with room_for(0, path.absolute().parent, reserve=0, what=f"the disk of {path}", remedy=remedy):
        yield


def parse_overrides(pairs: list[str] | None) -> dict[str, Any]:
    """`key=value` pairs; values in TOML's form, bare words as strings, and what is set to a string as it is written: a
    run may be called 2026-11-27.

    Of a key that is set twice the last value holds, as a script needs that adds to its arguments.
    Raises `InvalidInput` for a word that is no such pair.
    """
    import tomllib

    from settings.block import keys
    from settings.run_file import RunConfig

    parsed: dict[str, Any] = {}
    strings = {key.name for key in keys(RunConfig) if key.type == "string"} if pairs else set()
    for pair in pairs or []:
        word, separator, text = pair.partition("=")
        key = word.strip()
        if pair.startswith("-"):
            raise InvalidInput(f"no option {key} (-h lists them); settings are key=value, for example steps=50")
        if not all(key.split(".")) or not separator:
            raise InvalidInput(f"{pair!r}: write settings as key=value, for example steps=50")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError):  # no TOML
            value = text
        parsed[key] = text if key in strings and not isinstance(value, str) else value
    return parsed


def print_json(values: Any) -> None:
    """Print plain values for scripts."""
    typer.echo(json.dumps(values, indent=2))
