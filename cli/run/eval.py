"""`millrace eval`: the evaluation flow in this process, and its result.

In: a run, a version and what to change about the run's own evaluation. Out: avg@n, pass@k, failures, standard error.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from cli.terminal.arguments import AdoptOption, JsonOption, StoreOption, open_named, print_json
from cli.terminal.console import open_console, prints_to_stderr
from cli.terminal.formatting import held_out


def evaluate(
    run: str,
    version: Annotated[int | None, typer.Option(min=0, help="Policy version; the newest by default.")] = None,
    split: Annotated[str, typer.Option(help="Split of the workflow; by default the one the run evaluates.")] = "",
    num_tasks: Annotated[int | None, typer.Option(min=1, help="Most problems; by default as the run.")] = None,
    n_samples: Annotated[int | None, typer.Option(min=1, help="Attempts per problem; by default as the run.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy; by default as the run.")] = None,
    adopt_tasks: AdoptOption = False,
    as_json: JsonOption = False,
    store: StoreOption = "",
) -> None:
    """Score one policy version on held-out tasks, on an engine of its own: avg@n, pass@k, failures."""
    console = open_console(stderr=as_json)
    changes = {"split": split or None, "num_tasks": num_tasks, "n_samples": n_samples, "temperature": temperature}
    with prints_to_stderr(as_json):
        evaluation = evaluate_run(
            run, version=version, store=store, console=console, adopt_tasks=adopt_tasks, **changes
        )
    if as_json:
        print_json(evaluation)
    else:
        print_evaluation(evaluation, console)


def evaluate_run(
    run: str,
    *,
    version: int | None = None,
    store: str = "",
    adopt_tasks: bool = False,
    console: Console | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Run the evaluation flow here and return its result.

    `changes` are settings of the run's own evaluation: `split`, `num_tasks`, `n_samples`, `temperature`. What cannot
    work is refused before anything heavy starts; so are other tasks than the run has had, unless `adopt_tasks`.
    """
    open_named(run, store)  # before seconds of imports
    from cli.run.flow import HeadStart, imported_early, run_flow
    from flows.evaluate import begin, evaluate, plan_evaluation
    from tasks.session import reading_session

    changes = {key: value for key, value in changes.items() if value is not None}
    config, chosen = plan_evaluation(run=run, store=store, version=version, wanted=changes, adopt_tasks=adopt_tasks)
    early = HeadStart(
        open=partial(reading_session, config, store=store, what="evaluate"),
        begin=partial(begin, version=chosen, settings=config.evaluation, adopt_tasks=adopt_tasks),
    )
    console = console or open_console()
    with imported_early(engine=config.engine.kind), console.status(f"evaluating {run}") as spinner:
        flow = partial(evaluate, run=run, store=store, version=chosen, adopt_tasks=adopt_tasks, **changes)
        return run_flow(flow, console, early=early, on_interrupt=spinner.stop)


def print_evaluation(evaluation: dict[str, Any], console: Console) -> None:
    """The same for people."""
    from storage.log.entries import Evaluation

    fields = {key: value for key, value in evaluation.items() if key not in ("run", "gate")}
    score, facts = held_out(Evaluation(**fields))
    what = f"policy {evaluation['version']} of run {evaluation['run']}, split {evaluation['split']!r}"
    console.print(
        f"{escape(what)}: [bold cyan]{escape(score)}[/] [dim]{escape(facts)}[/]",
        soft_wrap=True,
    )
