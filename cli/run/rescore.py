"""`millrace rescore`: new rewards for a run's recorded attempts, beside the recorded ones.

In: a run and a reward function. Out: files and log entries, and how the new rewards differ from the old.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from cli.terminal.arguments import AdoptOption, EvalOption, JsonOption, StoreOption, open_named, print_json
from cli.terminal.console import open_console, prints_to_stderr
from cli.terminal.formatting import plain_table
from settings.errors import counted
from settings.places.hints import command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollouts.rewards.rescoring import Rescored
    from storage.log.run_log import RunLog
    from storage.records import Task


def rescore(
    run: str,
    reward: Annotated[str, typer.Option(help="module:function or file.py:function of (reply, answer).")],
    name: Annotated[str, typer.Option(help="What the new rewards are called; by default like the function.")] = "",
    include_eval: EvalOption = False,
    adopt_tasks: AdoptOption = False,
    processes: Annotated[int, typer.Option(min=0, help="Reward processes; 0: one per core.")] = 0,
    as_json: JsonOption = False,
    store: StoreOption = "",
) -> None:
    """Compute new rewards for recorded attempts, beside the recorded ones; nothing is overwritten."""
    import asyncio

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from infra.user_code import absolute_path, load_object
    from rollouts.production.prompts import task_set
    from rollouts.rewards.rescoring import Rescoring, load_reward
    from settings.run_file import make_config
    from storage.log.runs import local_config
    from storage.retention.retention import reading

    log, console = open_named(run, store, appends=True), open_console(stderr=as_json)
    with prints_to_stderr(as_json):
        config = make_config(local_config(log), source=f"run {run}")
        function, rewards = load_reward(absolute_path(reward), name=name)
        workflow = load_object(config.workflow)(config.dataset or None)

        def tasks_of(split: str) -> Sequence[Task]:
            tasks: Sequence[Task] = workflow.tasks(split)
            task_set(log.state, tasks, run=run, split=split, adopt=adopt_tasks)
            return tasks

        eval_split = config.evaluation.split if include_eval else None
        rescoring = Rescoring(log, function, rewards, tasks_of=tasks_of, eval_split=eval_split)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with reading(log, "rescore"), Progress(*columns, console=console) as bar:
            attempts = bar.add_task(f"rewards {rewards.name}", total=rescoring.num_attempts)
            running = rescoring.run(
                num_processes=processes or os.cpu_count() or 1,
                timeout=config.reward.timeout,
                on_attempts=lambda count: bar.advance(attempts, count),
            )
            result = asyncio.run(running)
    if as_json:
        print_json(_document(result))
    else:
        _print(log, result, console)


def _print(log: RunLog, result: Rescored, console: Console) -> None:
    """The report for people."""
    table = plain_table("split", "attempts", "None", "mean old → new", "changed", "correlation")
    for split, comparison in result.comparisons.items():
        means = f"{comparison.means[0]:.4f} → {comparison.means[1]:.4f}" if comparison.means else "-"
        correlation = "-" if comparison.correlation is None else f"{comparison.correlation:.4f}"
        share = f"{comparison.changed} ({100 * comparison.changed / max(1, comparison.attempts):.1f} %)"
        table.add_row(escape(split), str(comparison.attempts), str(comparison.nulls), means, share, correlation)
    console.print(table)
    name = result.rewards.name
    already = f", {result.known_shards} had them" if result.known_shards else ""
    console.print(
        f"rewards [bold]{escape(name)}[/]: {counted(result.new_shards, 'shard')} scored{already}; "
        + escape(f"{log.store.uri}/{log.key(f'rewards/{name}')}"),
        soft_wrap=True,
    )
    if result.failures:
        counts = ", ".join(f"{count} {reason}" for reason, count in result.failures.items())
        console.print(f"[yellow]None instead of a reward: {escape(counts)}[/]; the first: {escape(result.first_error)}")
    for shard_id, reason in result.skipped.items():
        console.print(f"[yellow]shard {escape(shard_id)} was left out[/]: {escape(reason)}", soft_wrap=True)
    if log.state.step:
        replay = command("replay", log.run_id, "--step", log.state.step, "--rewards", name, store=log.store.uri)
        console.print(f"[dim]train on them: {escape(replay)}[/]", soft_wrap=True)


def _document(result: Rescored) -> dict[str, object]:
    """The report for scripts."""
    return {
        "name": result.rewards.name,
        "reward": result.rewards.reward,
        "reward_sha256": result.rewards.reward_sha256,
        "new_shards": result.new_shards,
        "known_shards": result.known_shards,
        "skipped": result.skipped,
        "failures": dict(result.failures),
        "splits": {
            split: {
                "attempts": comparison.attempts,
                "nulls": comparison.nulls,
                "changed": comparison.changed,
                "mean_old": comparison.means[0] if comparison.means else None,
                "mean_new": comparison.means[1] if comparison.means else None,
                "correlation": comparison.correlation,
            }
            for split, comparison in result.comparisons.items()
        },
    }
