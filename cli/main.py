"""The `millrace` command.

In: a run file and overrides. Out: a trained run, or one clear sentence. Each command imports what it needs when it
runs, so that `millrace --help` is instant.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from cli.errors import explained
from infra.environment import prepare_environment

if TYPE_CHECKING:
    from storage.run_log import RunLog

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

traj = typer.Typer(no_args_is_help=True, help="Look at trajectories.")
app.add_typer(traj, name="traj")

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

        numbers = run_status(_open(run, store))
        if as_json:
            typer.echo(json.dumps(numbers, indent=2))
        else:
            print_status(numbers, Console(highlight=False))


@app.command(name="eval")
def evaluate(
    run: str,
    version: Annotated[int | None, typer.Option(help="Policy version; the newest by default.")] = None,
    num_tasks: Annotated[int, typer.Option(help="At most this many problems; 0: as the run evaluates.")] = 0,
    n_samples: Annotated[int, typer.Option(help="Attempts per problem; 0: as the run evaluates.")] = 0,
    store: StoreOption = "",
) -> None:
    """Score one policy version on held-out tasks, on an engine of its own."""
    with explained():
        from cli.training import evaluate_run

        evaluate_run(run, version=version, num_tasks=num_tasks, n_samples=n_samples, store=store)


@traj.command()
def show(
    run: str,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest reward first.")] = False,
    best: Annotated[bool, typer.Option("--best", help="Highest reward first.")] = False,
    group: Annotated[str | None, typer.Option(help="Only this group id.")] = None,
    step: Annotated[int | None, typer.Option(help="Only what this step trained on.")] = None,
    include_eval: Annotated[bool, typer.Option("--eval", help="Held-out trajectories too.")] = False,
    count: Annotated[int, typer.Option("-n", help="How many.")] = 1,
    store: StoreOption = "",
) -> None:
    """Print decoded trajectories with reward, logprobs and the policy version of every token."""
    with explained():
        from cli.trajectories import find_trajectories, load_tokenizer, show_trajectory

        log = _open(run, store)
        console, tokenizer = Console(highlight=False), load_tokenizer(log)
        for row in find_trajectories(
            log, worst=worst, best=best, group=group, step=step, include_eval=include_eval, count=count
        ):
            show_trajectory(row, tokenizer, console)


@app.command()
def doctor(run_file: Annotated[Path | None, typer.Argument(help="Check this run file's places too.")] = None) -> None:
    """Check that everything a run needs is here, and say how to fix what is not."""
    with explained():
        from cli.doctor import diagnose
        from flows.config import load_run_file

        config = load_run_file(run_file) if run_file else None
        if not diagnose(config, Console(highlight=False)):
            raise typer.Exit(1)


@app.command()
def up() -> None:
    """Start Prefect, MLflow and a worker on this machine, and deploy prefect.yaml."""
    with explained():
        from cli.services import up as start

        start(Console(highlight=False))


@app.command()
def down() -> None:
    """Stop what `millrace up` started."""
    from cli.services import down as stop

    stop(Console(highlight=False))


def _open(run: str, store: str) -> RunLog:
    from infra.environment import store_uri
    from storage.object_store import open_store
    from storage.runs import open_run

    return open_run(open_store(store_uri(store)), run)


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
