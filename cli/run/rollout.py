"""`millrace rollout once`: a few prompts attempted once, looked at and thrown away; for debugging a workflow.
`millrace produce`: rollouts for a run that another machine trains.

In: a run and a number of prompts, or for how long. Out: every attempt with its messages, tool calls, reward and error;
or shards in the run's log, and why that ended.
"""

from __future__ import annotations

import asyncio
from typing import Any

from rich.console import Console
from rich.markup import escape

from cli.run.training import run_flow
from cli.terminal.formatting import number, printable
from storage.log.run_log import RunLog
from storage.records import RolloutGroup, Trajectory


def rollout_once(log: RunLog, *, num_prompts: int, console: Console) -> list[RolloutGroup]:
    """Attempt the run's first prompts with its live policy, on an engine in this process; commits nothing."""
    from infra.environment import cache_folder, code_version, prepare_environment
    from rollouts.production.worker import RolloutWorker
    from settings.run_file import make_config
    from storage.log.runs import run_config

    prepare_environment()
    config = make_config(run_config(log), source=f"run {log.run_id}")

    async def once() -> list[RolloutGroup]:
        cache, store = str(cache_folder()), log.store.uri
        worker = await RolloutWorker.open(
            config, store_uri=store, name="debug", cache=cache, code_version=code_version()
        )
        try:
            return await worker.rollout_batch(num_prompts)
        finally:
            await worker.close()

    with console.status("starting the inference engine"):
        return asyncio.run(once())


def produce_for(run: str, *, store: str, console: Console, **limits: Any) -> None:
    """Run the producer flow here. What cannot work is said before anything heavy starts."""
    from flows.rollout import plan_rollouts

    plan_rollouts(run=run, store=store, **limits)

    async def flow() -> dict[str, Any]:
        from flows.rollout import rollout

        return dict(await rollout(run=run, store=store, **limits))

    found = run_flow(flow(), console)
    console.print(f"no more rollouts for run {run} from here: {escape(found['ended'])}")


def print_groups(groups: list[RolloutGroup], console: Console) -> None:
    """Every attempt of every group."""
    for group in groups:
        verdict = "accepted" if group.accepted else f"rejected: {group.reject_reason}"
        console.print(f"[bold]{escape(group.id)}[/]  {len(group.usable)} of {group.expected} usable, {escape(verdict)}")
        for trajectory in group.trajectories:
            _print_attempt(trajectory, console)
    accepted = sum(group.accepted for group in groups)
    console.print(f"{accepted} of {len(groups)} groups accepted; nothing was committed")


def _print_attempt(trajectory: Trajectory, console: Console) -> None:
    parts = ", ".join(f"{name} {number(value)}" for name, value in trajectory.reward_parts.items())
    facts = f"reward {number(trajectory.reward)}" + (f" ({parts})" if parts else "")
    console.print(f"  attempt {trajectory.attempt}: {trajectory.status}, {escape(facts)}", style="cyan")
    if trajectory.error:
        console.print(f"    {escape(trajectory.error)}", style="red")
    for message in trajectory.messages:
        console.print(f"    [dim]{message.role:>9}[/] {escape(printable(message.content))}")
    for turn in trajectory.turns:
        for call in turn.tool_calls:
            outcome = "failed" if call.failed else "→"
            console.print(f"    [dim]     tool[/] {escape(f'{call.name}({call.arguments}) {outcome} {call.result}')}")
