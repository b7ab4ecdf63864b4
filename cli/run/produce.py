"""`millrace produce`: rollouts for a run that another machine trains.

In: a run, and for how long. Out: shards in the run's log, and why that ended.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from cli.terminal.arguments import StoreOption


def produce(
    run: str,
    name: Annotated[str, typer.Option(help="What its workers are called in the log; by default as this machine.")] = "",
    shards: Annotated[int, typer.Option(min=0, help="End after so many shards; 0: when the run has its steps.")] = 0,
    patience: Annotated[float, typer.Option(help="Seconds without anything new in the run before this ends.")] = 3600.0,
    store: StoreOption = "",
) -> None:
    """Make rollouts for a run that is trained on another machine; any number of these may come and go."""
    from cli.run.flow import run_flow
    from flows.rollout import plan_rollouts, rollout

    options: dict[str, Any] = {"run": run, "store": store, "name": name, "shards": shards, "patience": patience}
    plan_rollouts(**options)  # what cannot work is said before anything heavy starts
    console = Console(highlight=False)
    ended = run_flow(rollout(**options), console)["ended"]
    console.print(f"no more rollouts for run {run} from here: {escape(ended)}")
