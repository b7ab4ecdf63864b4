"""The commands of who keeps runs alive: which there are, stop or pause one, its champion, its numbers for Prometheus.

In: option values as typed. Out: a table, or one sentence.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from cli.terminal.arguments import JsonOption, StoreOption, open_named
from cli.terminal.errors import explained

operations = typer.Typer()


@operations.command()
def runs(store: StoreOption = "", as_json: JsonOption = False) -> None:
    """Every run in the store: steps, scores, champion, and whether it is being trained here."""
    with explained():
        from cli.operate.runs import list_runs, print_runs
        from infra.environment import store_uri
        from storage.objects.opening import open_store

        opened = open_store(store_uri(store))
        found = list_runs(opened)
        if as_json:
            typer.echo(json.dumps(found, indent=2))
        else:
            print_runs(found, opened, Console(highlight=False))


@operations.command()
def stop(run: str, store: StoreOption = "") -> None:
    """End the training of a run on this machine, as Ctrl-C or Prefect's Cancel would; `train` continues it."""
    with explained():
        from cli.operate.stop import stop_run

        typer.echo(f"run {run} has stopped at step {stop_run(open_named(run, store))}")


_ReasonOption = Annotated[str, typer.Option(help="For whoever wonders; by default who asked for it.")]


@operations.command()
def pause(run: str, reason: _ReasonOption = "", store: StoreOption = "") -> None:
    """Begin nothing new in a run, wherever it is trained; what runs is finished and committed."""
    with explained():
        from cli.operate.pause import pause_run

        typer.echo(pause_run(open_named(run, store), reason=reason))


@operations.command()
def resume(run: str, reason: _ReasonOption = "", store: StoreOption = "") -> None:
    """Let a paused run go on."""
    with explained():
        from cli.operate.pause import resume_run

        typer.echo(resume_run(open_named(run, store), reason=reason))


@operations.command()
def promote(
    run: str,
    version: Annotated[int | None, typer.Option(min=0, help="Policy version; the newest by default.")] = None,
    max_gap: Annotated[
        float | None, typer.Option(min=0, help="Largest trainer–engine gap of a step; by default the run's.")
    ] = None,
    as_json: JsonOption = False,
    store: StoreOption = "",
    tracking: Annotated[str, typer.Option(help="MLflow; by default $MILLRACE_TRACKING, else .millrace's.")] = "",
) -> None:
    """Put the alias `champion` on a policy, unless the log speaks against it."""
    with explained():
        from cli.operate.promote import promote_policy
        from storage.log.entries import to_json

        console = Console(highlight=False, stderr=as_json)
        log = open_named(run, store)
        alias = promote_policy(log, version=version, max_gap=max_gap, tracking=tracking, console=console)
        if as_json:
            typer.echo(json.dumps(to_json(alias), indent=2))


@operations.command()
def rollback(
    run: str,
    as_json: JsonOption = False,
    store: StoreOption = "",
    tracking: Annotated[str, typer.Option(help="MLflow; by default $MILLRACE_TRACKING, else .millrace's.")] = "",
) -> None:
    """Put the alias `champion` back on the champion before this one."""
    with explained():
        from cli.operate.promote import roll_back_champion
        from storage.log.entries import to_json

        console = Console(highlight=False, stderr=as_json)
        alias = roll_back_champion(open_named(run, store), tracking=tracking, console=console)
        if as_json:
            typer.echo(json.dumps(to_json(alias), indent=2))


@operations.command()
def exporter(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 9464,
    host: Annotated[str, typer.Option(help="Whom to listen to; the numbers need no password.")] = "127.0.0.1",
    store: StoreOption = "",
) -> None:
    """Serve the numbers of every run in the store to Prometheus, from the logs alone."""
    with explained():
        from cli.operate.exporter import serve
        from infra.environment import store_uri
        from storage.objects.opening import open_store

        serve(open_store(store_uri(store)), host=host, port=port, console=Console(highlight=False))
