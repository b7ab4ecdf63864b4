"""The `millrace` command.

In: a run file and overrides. Out: a trained run, or one clear sentence. Each command imports what it needs when it
runs, so that `millrace --help` is instant.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cli.errors import explained
from infra.environment import prepare_environment

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    help="Post-train language-model agents by reinforcement learning. State lives in .millrace (or $MILLRACE_HOME).",
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings over the run file's, as key=value: steps=50 train.scale=none"),
]

StoreOption = Annotated[str, typer.Option(help="Where the runs are; by default .millrace/store.")]


@app.callback()
def main() -> None:
    prepare_environment()


@app.command()
def train(run_file: Path, overrides: Overrides = None) -> None:
    """Train the run a file describes; continues it where it stands."""
    with explained():
        from cli.training import train_run

        train_run(run_file, parse_overrides(overrides))


@app.command()
def status(
    run: str,
    store: StoreOption = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """A run in numbers, read from its log alone."""
    with explained():
        from cli.status import print_status, run_status
        from infra.environment import store_uri
        from storage.object_store import open_store
        from storage.runs import open_run

        numbers = run_status(open_run(open_store(store_uri(store)), run))
        if as_json:
            typer.echo(json.dumps(numbers, indent=2))
        else:
            print_status(numbers, Console(highlight=False))


def parse_overrides(pairs: list[str] | None) -> dict[str, Any]:
    """`key=value` pairs; values in TOML's form, bare words as strings.

    Raises `ValueError` for a pair without `=`.
    """
    import tomllib

    parsed: dict[str, Any] = {}
    for pair in pairs or []:
        key, separator, text = pair.partition("=")
        if not separator:
            raise ValueError(f"{pair!r}: write overrides as key=value, for example steps=50")
        try:
            parsed[key.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            parsed[key.strip()] = text
    return parsed


if __name__ == "__main__":
    app()
