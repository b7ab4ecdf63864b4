"""`millrace produce`: rollouts for a run that another machine trains; `rollout once`: some that are only looked at.

In: a run, and how much of it. Out: shards in the run's log; or every attempt with its messages, tool calls and reward.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from cli.terminal.arguments import StoreOption, open_named
from cli.terminal.console import open_console, working
from cli.terminal.formatting import number
from settings.errors import counted

if TYPE_CHECKING:
    from infra.ray.hosted import Hosted
    from settings.run_file import RunConfig
    from storage.log.run_log import RunLog
    from storage.records import RolloutGroup, Trajectory

_MOST_CALLS = 64
"""Calls that wait for one worker at once."""


def produce(
    run: str,
    name: Annotated[str, typer.Option(help="What its workers are called in the log; by default as this machine.")] = "",
    shards: Annotated[int, typer.Option(min=0, help="End after so many shards; 0: when the run has its steps.")] = 0,
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds without anything new in the run before this ends.")
    ] = 3600.0,
    store: StoreOption = "",
) -> None:
    """Make rollouts for a run that is trained on another machine; any number of these may come and go."""
    from cli.run.flow import run_flow
    from flows.rollout import plan_rollouts, rollout

    options: dict[str, Any] = {"run": run, "store": store, "name": name, "shards": shards, "patience": patience}
    plan_rollouts(**options)  # refuses what cannot work before anything heavy starts
    console = open_console()
    ended = run_flow(partial(rollout, **options), console)["ended"]
    console.print(f"no more rollouts for run {escape(run)} from here: {escape(ended)}")


def once(
    run: Annotated[str, typer.Argument(help="A run; `millrace train FILE steps=0` makes one without training it.")],
    n: Annotated[int, typer.Option("--n", min=1, help="Prompts to attempt, each as often as the run does.")] = 1,
    store: StoreOption = "",
) -> None:
    """Attempt a run's first prompts once with its live policy and show everything; nothing is committed."""
    import asyncio

    from settings.run_file import make_config
    from storage.log.runs import local_config

    console = open_console()
    log = open_named(run, store)
    config = make_config(local_config(log), source=f"run {run}")
    prompts = f"{counted(n, 'prompt')} of run {run}, {counted(config.n_samples, 'attempt')} each"
    with working(f"starting the inference engine, then {prompts}") as show:
        groups = asyncio.run(_attempt(log, config, num_prompts=n, show=show))
    for group in groups:
        verdict = "accepted" if group.accepted else f"rejected: {group.reject_reason}"
        console.print(f"[bold]{escape(group.id)}[/]  {len(group.usable)} of {group.expected} usable, {escape(verdict)}")
        for trajectory in group.trajectories:
            _print_attempt(trajectory, console)
    console.print(escape(summary(groups)))
    accepted = sum(group.accepted for group in groups)
    console.print(f"{accepted} of {counted(len(groups), 'group')} accepted; nothing was committed")


def summary(groups: Sequence[RolloutGroup]) -> str:
    """What has become of all attempts, in one line: `8 attempts: 7 ok, 1 error; mean reward 0.43 of 7, from 0 to 1; …`.

    A group teaches if its rewards differ.
    """
    attempts = [trajectory for group in groups for trajectory in group.trajectories]
    statuses = Counter(trajectory.status for trajectory in attempts).most_common()
    facts = [f"{counted(len(attempts), 'attempt')}: {', '.join(f'{count} {status}' for status, count in statuses)}"]
    if rewards := [trajectory.reward for trajectory in attempts if trajectory.reward is not None]:
        spread = f"from {number(min(rewards))} to {number(max(rewards))}"
        facts.append(f"mean reward {number(sum(rewards) / len(rewards))} of {len(rewards)}, {spread}")
    differ = sum(len({trajectory.reward for trajectory in group.usable}) > 1 for group in groups)
    facts.append(f"rewards differ within {differ} of {counted(len(groups), 'group')}")
    return "; ".join(facts)


async def _attempt(
    log: RunLog, config: RunConfig, *, num_prompts: int, show: Callable[[str], None]
) -> list[RolloutGroup]:
    """Attempt the run's first prompts with its live policy, on an engine of its own; commits nothing. Says how far it
    is each time a tenth of the prompts is done.

    What the engine and its libraries print goes to a log file; if something fails, its path is printed.
    """
    from cli.run.flow import imported_early
    from infra.environment import cache_folder, code_version
    from infra.ray.cluster import Cluster
    from settings.places.state_folder import home

    gpus = config.engine.num_gpus
    folder = home() / "logs" / log.run_id
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(imported_early(engine=config.engine.kind))
        cluster = Cluster(log_folder=folder, home=home(), num_workers=gpus, gpus_per_engine=gpus)
        await stack.enter_async_context(cluster)
        path = "rollouts.production.worker:RolloutWorker"
        worker = await cluster.host("rollout-once", path, num_gpus=cluster.gpus_per_engine)
        facts = {"store_uri": log.store.uri, "cache": str(cache_folder()), "code_version": code_version()}
        try:
            await worker.call("open", config, name="debug", **facts)
            return await _play(worker, config, num_prompts=num_prompts, show=show)
        except Exception:
            open_console(stderr=True).print(f"its log is {worker.log_file}", soft_wrap=True)
            raise


async def _play(
    worker: Hosted, config: RunConfig, *, num_prompts: int, show: Callable[[str], None]
) -> list[RolloutGroup]:
    import asyncio

    positions = iter(range(num_prompts))
    groups: dict[int, RolloutGroup] = {}

    async def play() -> None:
        for position in positions:
            groups[position] = await worker.call("rollout_prompt", position)
            if (done := len(groups)) < num_prompts and done * 10 // num_prompts > (done - 1) * 10 // num_prompts:
                show(f"{done} of {counted(num_prompts, 'prompt')} attempted")

    at_once = min(config.rollout.max_concurrent, _MOST_CALLS, num_prompts)
    await asyncio.gather(*(play() for _ in range(at_once)))
    return [groups[position] for position in range(num_prompts)]


def _print_attempt(trajectory: Trajectory, console: Console) -> None:
    parts = ", ".join(f"{name} {number(value)}" for name, value in trajectory.reward_parts.items())
    facts = f"reward {number(trajectory.reward)}" + (f" ({parts})" if parts else "")
    console.print(f"  attempt {trajectory.attempt}: {escape(f'{trajectory.status}, {facts}')}", style="cyan")
    if trajectory.error:
        console.print(escape(indent(trajectory.error, "    ")), style="red")
    for message in trajectory.messages:
        console.print(f"    [dim]{escape(f'{message.role:>9}')}[/] {escape(message.content)}")
    for turn in trajectory.turns:
        for call in turn.tool_calls:
            outcome = "failed" if call.failed else "→"
            console.print(f"    [dim]     tool[/] {escape(f'{call.name}({call.arguments}) {outcome} {call.result}')}")
