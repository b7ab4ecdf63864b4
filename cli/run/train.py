"""`millrace train`: check, run the flow in this process, and show its log as it grows.

In: a run file and overrides. Out: the run, and a table a person wants to watch. What is shown is read from the run's
log, so the same view would follow a run on another machine.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from cli.terminal.arguments import open_named, parse_overrides, print_json

if TYPE_CHECKING:
    from settings.run_file import RunConfig

logger = logging.getLogger("millrace.training")


def train(
    run_file: Path,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings over the run file's: steps=50 train.loss=cispo")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check all, print the sizes, start nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON.")] = False,
) -> None:
    """Train the run that a file describes, or continue it."""
    if not dry_run:
        train_run(run_file, parse_overrides(overrides))
        return
    from cli.run.dry_run import derived_values, print_values

    values = derived_values(run_file, parse_overrides(overrides))
    if as_json:
        print_json(values)
    else:
        print_values(values, Console(highlight=False))


def train_run(run: Path | dict[str, Any], overrides: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train the run of a file, or of its content, until its last step; returns its status, as `run_status` does.

    `overrides` go over the file's settings, by dotted key. Raises `ConfigError`, and what `check_run` and the flow
    raise.
    """
    from cli.operate.status import run_status
    from cli.run.flow import run_flow
    from cli.run.progress import Follower
    from infra.environment import store_uri
    from settings.run_file import default_values, load_run_file
    from storage.log.runs import create_run, trainer_lock
    from storage.objects.opening import open_store
    from tasks.preflight import check_run

    config, console = load_run_file(run, overrides), Console(highlight=False)
    check_run(config)
    store, document = open_store(store_uri(config.store)), config.model_dump(mode="json")
    log = create_run(store, config.run, document, defaults=default_values())
    with trainer_lock(log):
        pass  # another trainer is an error before anything heavy starts
    with Follower(log, steps=config.steps, console=console):
        run_flow(_train(config), console)
    status = run_status(log)
    _print_ending(status, config, console, run_file="" if isinstance(run, dict) else str(run))
    return status


async def _train(config: RunConfig) -> None:
    import httpx

    from flows.train_grpo import train_grpo
    from settings.run_file import RunConfig, Settings

    knobs = {name: getattr(config, name) for name in RunConfig.model_fields if name not in Settings.model_fields}
    try:
        await train_grpo(**knobs, settings=config.settings)
    except httpx.TransportError as error:
        if open_named(config.run, config.store).state.step < config.steps:
            raise
        logger.warning(
            "Prefect does not know that the run has ended, its server is away (%r): there it is crashed, as `millrace "
            "up` says too, and the run's log has everything",
            error,
        )


def _print_ending(status: dict[str, Any], config: RunConfig, console: Console, *, run_file: str) -> None:
    """Accuracy before and after, where everything is, and what to try next."""
    before, after = (
        "-" if status[key] is None else f"{status[key]:.3f}" for key in ("accuracy_before", "accuracy_after")
    )
    run_folder = f"{status['store']}/runs/{config.run}"
    console.rule(f"run {config.run}", align="left")
    console.print(
        f"held-out accuracy [bold]{before} → {after}[/] after {status['step']} steps, {status['wall_seconds']:.0f} s, "
        f"at most {status['peak_memory_bytes'] / 2**30:.1f} GiB\n"
        f"run      {run_folder}\n"
        f"shards   {run_folder}/shards: {status['shards']} files, {status['trajectories']} training trajectories\n"
        f"model    {status['policy']}\n"
        f"MLflow   {status['mlflow_model']} version {status['mlflow_version']}\n",
        soft_wrap=True,
    )
    command = ".venv/bin/millrace"
    again = f"  {command} train {run_file} run={config.run}-2 seed={config.seed + 1}\n" if run_file else ""
    console.print(
        "next:\n"
        f"  {command} status {config.run}              [dim]# the run in numbers; --json for scripts[/]\n"
        f"  {command} report {config.run}              [dim]# one web page: curves, time, groups, prompts[/]\n"
        f"  {command} traj show {config.run} --worst   [dim]# the worst trajectories, with reward and versions[/]\n"
        f"  {command} eval {config.run} --version 0    [dim]# score another policy version[/]\n"
        f"{again}"
        "  make up                                   [dim]# Prefect and MLflow in the browser, with this history[/]",
        soft_wrap=True,
    )
