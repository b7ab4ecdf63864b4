"""The `millrace` command.

In: a run file and overrides. Out: a trained run, or one clear sentence. Each command imports what it needs when it
runs, so that `millrace --help` is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

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


@app.callback()
def main() -> None:
    prepare_environment()


@app.command()
def train(run_file: Path, overrides: Overrides = None) -> None:
    """Train the run a file describes; continues it where it stands."""
    with explained():
        from cli.training import train_run

        train_run(run_file, parse_overrides(overrides))


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
