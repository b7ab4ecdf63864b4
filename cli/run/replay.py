"""`millrace replay`: train recorded steps again and show what came out beside what was recorded.

In: a run, a span, and perhaps a change. Out: a table; exit status 1 when an unchanged replay gives other weights.
"""

from __future__ import annotations

import functools
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cli.run.training import run_flow
from cli.terminal.formatting import number
from settings.errors import InvalidInput

_number = functools.partial(number, missing="-")

COMPARED = ("loss", "grad_norm", "entropy", "clip_fraction", "approx_kl", "reward")
"""Metrics of the table of a span; one step alone is shown with all."""


def replay_run(
    run: str,
    *,
    store: str,
    first: int,
    last: int | None,
    changes: dict[str, Any],
    rewards: str,
    save: str,
    console: Console,
) -> dict[str, Any]:
    """Run the replay flow here and return what it found. What cannot work is said before anything heavy starts."""
    from settings.run_file import make_config, with_training_changes
    from tasks.replay import check_replay

    _, saved = check_replay(store=store, run=run, first=first, last=last, rewards=rewards, save=save)
    with_training_changes(make_config(saved, source=f"run {run}"), changes)

    async def flow() -> dict[str, Any]:
        from flows.replay import replay

        found = await replay(run=run, store=store, first=first, last=last, changes=changes, rewards=rewards, save=save)
        return dict(found)

    with console.status(f"replaying {run}"):
        return run_flow(flow(), console)


def span_of(*, step: int | None, first: int | None, last: int | None) -> tuple[int, int | None]:
    """First and last step of what was asked for. Raises `ValueError` unless it is either one step or a span."""
    if step is not None and first is None and last is None:
        return step, step
    if step is None and (first is not None or last is not None):
        return 1 if first is None else first, last
    raise InvalidInput("say which steps: --step 7, or --from 1 --to 10 (without --to up to the newest)")


def print_replay(found: dict[str, Any], console: Console) -> None:
    """The report for people."""
    plan, steps = found["plan"], found["steps"]
    start = f"the state saved at step {plan['resumed_from']}" if plan["resumed_from"] else "the base policy"
    changes = [f"{key} {change}" for key, change in found["changes"].items()]
    changes += [f"rewards {found['rewards']}"] if found["rewards"] else []
    console.print(
        f"run {found['run']}, steps {plan['first']} to {plan['last']}, from {start}; "
        + escape(f"changed: {', '.join(changes)}" if changes else "nothing changed"),
        soft_wrap=True,
    )
    console.print(_one_step(steps[0]) if len(steps) == 1 else _span(steps))
    if not found["start_identical"]:
        console.print(f"[yellow]steps before {plan['first']} gave other weights than recorded[/]; the span was started")
        console.print("from the recorded weights, with the optimizer state as it came out here", soft_wrap=True)
    if found["unchanged"] and found["identical"]:
        console.print("[green]every step has the recorded weights, bit for bit[/]")
    elif found["unchanged"]:
        console.print(
            "[red]the weights differ from the recorded ones[/]: look for other hardware, another device, or other "
            f"code (recorded by {found['recorded_code']}, this is {found['code']})",
            soft_wrap=True,
        )
    else:
        console.print(
            "[dim]distance: ‖replayed − recorded‖ / ‖recorded − before the span‖; cosine: between the two updates "
            "since then[/]",
            soft_wrap=True,
        )


def _one_step(step: dict[str, Any]) -> Table:
    table = Table("", "recorded", "replayed", box=None, pad_edge=False)
    table.add_row("weights", step["recorded_sha256"][:12], f"{step['replayed_sha256'][:12]} {_verdict(step)}")
    table.add_row("distance", "", _number(step["distance"]))
    table.add_row("cosine", "", _number(step["cosine"]))
    for name, value in step["replayed"].items():
        table.add_row(name, _number(step["recorded"].get(name)), _number(value))
    return table


def _span(steps: list[dict[str, Any]]) -> Table:
    table = Table("step", "weights", "distance", "cosine", *COMPARED, box=None, pad_edge=False)
    for step in steps:
        pairs = [(_number(step["recorded"].get(name)), _number(step["replayed"].get(name))) for name in COMPARED]
        cells = [old if old == new else f"{old} → {new}" for old, new in pairs]
        table.add_row(str(step["step"]), _verdict(step), _number(step["distance"]), _number(step["cosine"]), *cells)
    return table


def _verdict(step: dict[str, Any]) -> str:
    return "[green]same[/]" if step["identical"] else "[yellow]other[/]"
