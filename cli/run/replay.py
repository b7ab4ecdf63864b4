"""`millrace replay`: train recorded steps again and show what came out beside what was recorded.

In: a run, a span, and perhaps a change. Out: a table; exit status 1 when an unchanged replay gives other weights,
by more than another arithmetic explains.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cli.terminal.arguments import JsonOption, StoreOption, check_target, open_named, parse_overrides, print_json
from cli.terminal.console import open_console, prints_to_stderr
from cli.terminal.formatting import number, plain_table
from settings.errors import InvalidInput

_number = functools.partial(number, missing="-")

COMPARED = ("loss", "grad_norm", "entropy", "clip_fraction", "approx_kl", "reward")
"""Metrics of the table of a span; one step alone is shown with all."""


def replay(
    run: str,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings to change: train.loss.clip_high=0.3")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Only this step.")] = None,
    first: Annotated[int | None, typer.Option("--from", help="First step of a span.")] = None,
    last: Annotated[int | None, typer.Option("--to", help="Last step of a span; the newest by default.")] = None,
    lr: Annotated[float | None, typer.Option(help="Another learning rate.")] = None,
    advantage: Annotated[str | None, typer.Option(help="Another train.advantage, at its defaults: opo, …")] = None,
    loss: Annotated[str | None, typer.Option(help="Another train.loss, at its defaults: cispo, …")] = None,
    rewards: Annotated[str, typer.Option(help="Train on these rewards of `millrace rescore`.")] = "",
    save: Annotated[str, typer.Option(help="A new folder for the replayed policy.")] = "",
    as_json: JsonOption = False,
    store: StoreOption = "",
) -> None:
    """Train recorded steps again without generating: to the same weights, or to see what one change does."""
    flags = {"learning_rate": lr, "train.advantage": advantage, "train.loss": loss}
    changes = parse_overrides(overrides) | {key: value for key, value in flags.items() if value is not None}
    start, end = span_of(step=step, first=first, last=last)
    console = open_console(stderr=as_json)
    with prints_to_stderr(as_json):
        result = replay_run(
            run, first=start, last=end, changes=changes, rewards=rewards, save=save, store=store, console=console
        )
    if as_json:
        print_json(result)
    else:
        print_replay(result, console)
    if result["unchanged"] and not result["agrees"]:
        raise typer.Exit(1)


def replay_run(
    run: str,
    *,
    first: int = 1,
    last: int | None = None,
    changes: dict[str, Any] | None = None,
    rewards: str = "",
    save: str = "",
    store: str = "",
    console: Console | None = None,
) -> dict[str, Any]:
    """Run the replay flow here and return its result, a `Replay` as JSON.

    `changes` are settings of the trainer by dotted key. What cannot work is refused before anything heavy starts.
    """
    open_named(run, store)  # before seconds of imports
    from cli.run.flow import imported_early, run_flow
    from flows.replay import replay
    from settings.run_file import make_config, with_training_changes
    from tasks.replay import check_replay

    if save:
        check_target(Path(save), "--save", make_folder=True)
    _, saved = check_replay(store=store, run=run, first=first, last=last, rewards=rewards, save=save)
    with_training_changes(make_config(saved, source=f"run {run}"), changes or {})
    console = console or open_console()
    flow = functools.partial(
        replay, run=run, store=store, first=first, last=last, changes=changes, rewards=rewards, save=save
    )
    with imported_early(trains=True), console.status(f"replaying {run}") as spinner:
        return run_flow(flow, console, on_interrupt=spinner.stop)


def span_of(*, step: int | None, first: int | None, last: int | None) -> tuple[int, int | None]:
    """First and last step. Raises `InvalidInput` unless the options name either one step or a span."""
    if step is not None and first is None and last is None:
        return step, step
    if step is None and (first is not None or last is not None):
        return 1 if first is None else first, last
    raise InvalidInput("say which steps: --step 7, or --from 1 --to 10 (without --to up to the newest)")


def print_replay(result: dict[str, Any], console: Console) -> None:
    """The report for people."""
    plan, steps = result["plan"], result["steps"]
    start = f"the state saved at step {plan['resumed_from']}" if plan["resumed_from"] else "the base policy"
    changes = [f"{key} {change}" for key, change in result["changes"].items()]
    changes += [f"rewards {result['rewards']}"] if result["rewards"] else []
    console.print(
        f"run {result['run']}, steps {plan['first']} to {plan['last']}, from {start}; "
        + escape(f"changed: {', '.join(changes)}" if changes else "nothing changed"),
        soft_wrap=True,
    )
    console.print(_one_step(steps[0]) if len(steps) == 1 else _span(steps))
    if not result["start_identical"]:
        console.print(f"[yellow]steps before {plan['first']} gave other weights than recorded[/]; the span was started")
        console.print("from the recorded weights, with the optimizer state as it came out here", soft_wrap=True)
    if result["unchanged"] and result["identical"]:
        console.print("[green]every step has the recorded weights, bit for bit[/]")
    elif result["unchanged"] and result["agrees"]:
        other = next(step for step in steps if not step["identical"])
        console.print(
            f"[yellow]the weights agree within {other['tolerance']:g} of their update[/], as another arithmetic's do: "
            f"recorded with {escape(other['recorded_arithmetic'])}, replayed with "
            f"{escape(other['replayed_arithmetic'])}",
            soft_wrap=True,
        )
    elif result["unchanged"]:
        console.print(
            "[red]the weights differ from the recorded ones[/]: look for other hardware, another device, or other "
            f"code (recorded by {escape(result['recorded_code'])}, this is {result['code']})",
            soft_wrap=True,
        )
    else:
        console.print(
            "[dim]distance: ‖replayed − recorded‖ / ‖recorded − before the span‖; cosine: between the two updates "
            "since then[/]",
            soft_wrap=True,
        )


def _one_step(step: dict[str, Any]) -> Table:
    table = plain_table("", "recorded", "replayed")
    table.add_row("weights", step["recorded_sha256"][:12], f"{step['replayed_sha256'][:12]} {_verdict(step)}")
    table.add_row("distance", "", _number(step["distance"]))
    table.add_row("cosine", "", _number(step["cosine"]))
    for name, value in step["replayed"].items():
        table.add_row(escape(name), _number(step["recorded"].get(name)), _number(value))
    return table


def _span(steps: list[dict[str, Any]]) -> Table:
    table = plain_table("step", "weights", "distance", "cosine", *COMPARED)
    for step in steps:
        pairs = [(_number(step["recorded"].get(name)), _number(step["replayed"].get(name))) for name in COMPARED]
        cells = [old if old == new else f"{old} → {new}" for old, new in pairs]
        table.add_row(str(step["step"]), _verdict(step), _number(step["distance"]), _number(step["cosine"]), *cells)
    return table


def _verdict(step: dict[str, Any]) -> str:
    return "[green]same[/]" if step["identical"] else "[yellow]other[/]"
