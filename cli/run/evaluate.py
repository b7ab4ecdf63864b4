"""`millrace eval`: the evaluation flow in this process, and what it found.

In: a run, a version and what to change about the run's own evaluation. Out: avg@n, pass@k, failures, standard error.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape

from cli.run.training import run_flow
from cli.terminal.formatting import held_out
from storage.log.entries import Evaluation


def evaluate_run(
    run: str, *, version: int | None, wanted: dict[str, Any], store: str, console: Console
) -> dict[str, Any]:
    """Run the evaluation flow here and return what it found. What cannot work is said before anything heavy starts."""
    from flows.evaluate import plan_evaluation

    plan_evaluation(run=run, store=store, version=version, wanted=wanted)

    async def flow() -> dict[str, Any]:
        from flows.evaluate import evaluate

        changes = {key: value for key, value in wanted.items() if value is not None}
        return dict(await evaluate(run=run, store=store, version=version, **changes))

    with console.status(f"evaluating {run}"):
        return run_flow(flow(), console)


def print_evaluation(found: dict[str, Any], console: Console) -> None:
    """The same for people."""
    score, facts = held_out(Evaluation(**{key: value for key, value in found.items() if key not in ("run", "gate")}))
    console.print(
        f"policy {found['version']} of run {found['run']}, split {escape(repr(found['split']))}: "
        f"[bold cyan]{score}[/] [dim]{facts}[/]",
        soft_wrap=True,
    )
