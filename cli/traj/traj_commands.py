"""`millrace traj …`: looking at what the policy did.

In: a run's name and what is wanted of it. Out: trajectories, as tables, text, JSON or a data set. Each command imports
what it needs when it runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cli.terminal.arguments import EvalOption, JsonOption, StoreOption, open_named
from cli.terminal.errors import explained
from settings.errors import InvalidInput

traj = typer.Typer(no_args_is_help=True, help="Look at trajectories; `traj ls` lists their ids, GROUP/ATTEMPT.")

WhereOption = Annotated[
    str, typer.Option(help='Only those for which this SQL holds, for example "reward < 1 and num_turns > 2".')
]


@traj.command()
def ls(
    run: str,
    where: WhereOption = "",
    include_eval: EvalOption = False,
    count: Annotated[int, typer.Option("-n", min=1, help="At most this many.")] = 20,
    store: StoreOption = "",
) -> None:
    """List trajectories, newest first."""
    with explained():
        from cli.traj.trajectories import list_trajectories, note_left_out

        console = Console(highlight=False)
        left_out = list_trajectories(
            open_named(run, store), where=where, include_eval=include_eval, count=count, console=console
        )
        note_left_out(left_out, Console(highlight=False, stderr=True))


@traj.command()
def show(
    run: str,
    trajectory: Annotated[str, typer.Argument(metavar="[ID]", help="Take one from `traj ls`; else the newest.")] = "",
    worst: Annotated[bool, typer.Option("--worst", help="Lowest reward first.")] = False,
    best: Annotated[bool, typer.Option("--best", help="Highest reward first.")] = False,
    group: Annotated[str | None, typer.Option(help="Only this group id.")] = None,
    step: Annotated[int | None, typer.Option(help="Only what this step trained on.")] = None,
    where: WhereOption = "",
    include_eval: EvalOption = False,
    color: Annotated[
        str,
        typer.Option(help="Colour by logprob, advantage, version, or gap: trainer's minus engine's logprob."),
    ] = "logprob",
    count: Annotated[int, typer.Option("-n", min=1, help="How many.")] = 1,
    store: StoreOption = "",
) -> None:
    """Print decoded trajectories with reward, logprobs and the policy version of every token."""
    with explained():
        from cli.traj.token_signals import COLORS, Colorist
        from cli.traj.trajectories import find_trajectories, load_tokenizer
        from cli.traj.trajectory_view import show_trajectory
        from infra.environment import home

        if color not in COLORS:
            raise InvalidInput(f"--color {color!r}: write one of {', '.join(COLORS)}")
        log = open_named(run, store)
        colorist, tokenizer, console = (
            Colorist(log, cache=home() / "cache"),
            load_tokenizer(log),
            Console(highlight=False),
        )
        rows = find_trajectories(
            log,
            trajectory_id=trajectory,
            worst=worst,
            best=best,
            group=group,
            step=step,
            where=where,
            include_eval=include_eval,
            count=count,
            notes=Console(highlight=False, stderr=True),
        )
        for row in rows:
            show_trajectory(row, tokenizer, console, colorist.color(row, color))


@traj.command()
def diff(
    run: str,
    a: Annotated[str, typer.Argument(metavar="ID_A", help="Take both from `traj ls`.")],
    b: Annotated[str, typer.Argument(metavar="ID_B")],
    run_b: Annotated[str, typer.Option(help="The run of ID_B, where it is another one.")] = "",
    store: StoreOption = "",
) -> None:
    """Two trajectories side by side: rewards, where their tokens part, and logprobs up to there."""
    with explained():
        from cli.traj.trajectories import find_trajectories, load_tokenizer
        from cli.traj.trajectory_diff import show_diff, sides

        logs = [open_named(run, store)]
        logs.append(open_named(run_b, store) if run_b else logs[0])
        tokenizers = [load_tokenizer(log) for log in logs]
        notes = Console(highlight=False, stderr=True)
        rows = [
            find_trajectories(log, trajectory_id=name, notes=notes)[0] for log, name in zip(logs, (a, b), strict=True)
        ]
        names = [f"{log.run_id}: {name}" if run_b else name for log, name in zip(logs, (a, b), strict=True)]
        left, right = sides(rows, names, tokenizers)
        by_text = tokenizers[0].to_str() != tokenizers[1].to_str()
        show_diff(left, right, Console(highlight=False), by_text=by_text)


@traj.command()
def stats(
    run: str,
    by: Annotated[str, typer.Option(help="Also by version, step, prompt or status.")] = "",
    where: WhereOption = "",
    include_eval: EvalOption = False,
    solved: Annotated[float, typer.Option(help="An attempt is solved from this reward on.")] = 1.0,
    as_json: JsonOption = False,
    store: StoreOption = "",
) -> None:
    """Rewards, lengths, statuses and repeated replies in numbers."""
    with explained():
        from cli.traj.trajectories import note_left_out
        from cli.traj.trajectory_stats import print_stats, trajectory_stats
        from storage.views.queries import open_queries

        queries = open_queries(open_named(run, store))
        numbers = trajectory_stats(queries, by=by, where=where, include_eval=include_eval, solved=solved)
        if as_json:
            typer.echo(json.dumps(numbers, indent=2, ensure_ascii=False))
        else:
            print_stats(numbers, Console(highlight=False), by=by)
        note_left_out(queries.left_out, Console(highlight=False, stderr=True))


@traj.command()
def sql(
    run: str,
    query: Annotated[str, typer.Argument(metavar="[SQL]", help="Without it, the views and their columns.")] = "",
    as_json: JsonOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    store: StoreOption = "",
) -> None:
    """Ask a run anything in SQL: trajectories, groups, turns, tokens, steps, evaluations. It only reads."""
    with explained():
        from cli.traj.queries import print_views, run_sql
        from cli.traj.trajectories import note_left_out

        log, console = open_named(run, store), Console(highlight=False)
        if query:
            left_out = run_sql(log, query, as_json=as_json, as_csv=as_csv, console=console)
            note_left_out(left_out, Console(highlight=False, stderr=True))
        else:
            print_views(log, console)


@traj.command()
def export(
    run: str,
    file: Annotated[Path, typer.Argument(metavar="OUT.parquet")],
    kind: Annotated[
        str, typer.Option("--format", help="sft: conversations; dpo: best and worst of each group.")
    ] = "sft",
    where: WhereOption = "",
    margin: Annotated[float, typer.Option(min=0, help="dpo: least difference of the two rewards.")] = 0.0,
    include_eval: EvalOption = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    store: StoreOption = "",
) -> None:
    """Write trajectories as a data set for other trainers: Parquet that Hugging Face datasets reads."""
    with explained():
        from cli.traj import queries
        from cli.traj.trajectories import note_left_out

        left_out = queries.export(
            open_named(run, store),
            file,
            kind=kind,
            where=where,
            margin=margin,
            include_eval=include_eval,
            force=force,
            console=Console(highlight=False),
        )
        note_left_out(left_out, Console(highlight=False, stderr=True))


@traj.command()
def search(
    run: str,
    text: Annotated[str, typer.Argument(help='Words, all of which must be there; "quoted": exactly so.')],
    reward: Annotated[str, typer.Option(help="For example '<0.5', '>=1', '!=0'.")] = "",
    status: Annotated[str, typer.Option(help="ok, truncated or max_turns.")] = "",
    version: Annotated[str, typer.Option(help="Sampled by this policy version or range: 5, 3..7, 3.., ..7.")] = "",
    step: Annotated[int | None, typer.Option(help="Only groups this step passed over.")] = None,
    outcome: Annotated[str, typer.Option(help="trained, filtered, stale, failed or pending.")] = "",
    include_eval: EvalOption = False,
    similar: Annotated[bool, typer.Option("--similar", help="Nearest in meaning, by the index's embedding.")] = False,
    update: Annotated[bool, typer.Option(help="First index what was committed since.")] = True,
    count: Annotated[int, typer.Option("-n", min=1, help="At most this many.")] = 10,
    as_json: JsonOption = False,
    store: StoreOption = "",
) -> None:
    """Find trajectories by what was said and which tools were called, best match first."""
    with explained():
        from cli.traj import search as searching
        from storage.views.search_query import SearchQuery

        log, query = open_named(run, store), SearchQuery(text)
        filters = searching.parse_filters(
            log.state,
            reward=reward,
            status=status,
            version=version,
            step=step,
            outcome=outcome,
            include_eval=include_eval,
        )
        notes = Console(highlight=False, stderr=True)
        found = searching.search(log, query, filters, count=count, similar=similar, update=update, notes=notes)
        if as_json:
            typer.echo(json.dumps([searching.as_json(one) for one in found], indent=2, ensure_ascii=False))
        else:
            searching.print_found(found, query, Console(highlight=False))
