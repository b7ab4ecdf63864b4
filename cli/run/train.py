"""`millrace train`: check, run the flow in this process, and show its log as it grows.

In: a run file and overrides. Out: the run, and a table a person wants to watch. What is shown is read from the run's
log, so the same view would follow a run on another machine.
"""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from cli.terminal.arguments import AdoptOption, check_target, open_named, parse_overrides, print_json, room_at
from cli.terminal.console import open_console, prints_to_stderr
from cli.terminal.formatting import lasted
from settings.errors import InvalidInput, counted
from settings.places.hints import command

if TYPE_CHECKING:
    from settings.run_file import RunConfig
    from tasks.checks.preflight import Checked

_WIDEST = 50
"""Characters of a command with a comment beside the others'."""
logger = logging.getLogger("millrace.training")


def train(
    run_file: Path,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Run files over the first, and settings over all: steps=50 train.loss=cispo"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check all, print the sizes, start nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON.")] = False,
    write: Annotated[
        Path | None, typer.Option(help="With --dry-run: write all of it, defaults too, to this run file.")
    ] = None,
    adopt_tasks: AdoptOption = False,
) -> None:
    """Train the run that a file describes, or continue it."""
    files = [run_file, *(Path(word) for word in overrides or [] if _is_run_file(word))]
    changes = parse_overrides([word for word in overrides or [] if not _is_run_file(word)])
    if not dry_run:
        if as_json or write:
            raise InvalidInput("--json and --write go with --dry-run")
        train_run(files, changes, adopt_tasks=adopt_tasks)
        return
    from infra.environment import prepare_environment

    prepare_environment(folder_of(files))
    from cli.run.dry_run import derived_values, print_values
    from settings.run_file import as_toml, load_run_file

    if write is not None:
        check_target(write, "--write", suffix=".toml")
    config = load_run_file(files, changes)
    with prints_to_stderr(as_json):
        values = derived_values(config, adopt_tasks=adopt_tasks)
    if write is not None:
        with room_at(write):
            write.write_text(as_toml(config), encoding="utf-8")
    if as_json:
        print_json(values)
    else:
        print_values(values, open_console())


def _typed(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _is_run_file(word: str) -> bool:
    return word.endswith(".toml") and "=" not in word


def folder_of(run: Path | dict[str, Any] | list[Path]) -> Path:
    """The folder that a run's paths are relative to: of its first file, else the current one."""
    file = run[0] if isinstance(run, list) else run
    return Path.cwd() if isinstance(file, dict) else file.absolute().parent


def train_run(
    run: Path | dict[str, Any] | list[Path], overrides: dict[str, Any] | None = None, *, adopt_tasks: bool = False
) -> dict[str, Any]:
    """Train the run of files, or of their content, until its last step; returns its status, as `run_status` does.

    `overrides` go over the file's settings, by dotted key. Raises `ConfigError`, and what `check_run` and the flow
    raise.
    """
    from infra.environment import prepare_environment
    from settings.places.state_folder import store_uri

    prepare_environment(folder_of(run))
    from settings.run_file import default_values, load_run_file

    config, console = load_run_file(run, overrides), open_console()
    from cli.run.flow import HeadStart, imported_early, run_flow

    with imported_early(engine=config.engine.kind, trains=True):
        from cli.operate.status import run_status
        from cli.run.progress import Follower
        from storage.log.runs import create_run, trainer_lock
        from storage.objects.opening import open_store
        from tasks.checks.preflight import check_run

        checked = check_run(config, adopt_tasks=adopt_tasks)
        config = checked.config
        store, document = open_store(store_uri(config.store)), config.model_dump(mode="json")
        log = create_run(store, config.run, document, folder=folder_of(run), defaults=default_values(document))
        with trainer_lock(log):
            pass  # another trainer is an error before anything heavy starts
        with Follower(log, steps=config.steps, console=console) as follower:
            from flows.train_grpo import begin
            from tasks.session import training_session

            early = HeadStart(
                open=partial(training_session, config, tasks=checked.tasks, adopt_tasks=adopt_tasks),
                begin=partial(begin, config=config),
            )
            flow = partial(_train, config, checked, adopt_tasks)
            missing = run_flow(flow, console, early=early, on_interrupt=follower.stop_spinner)
    status = run_status(log)
    files = [] if isinstance(run, dict) else [run] if isinstance(run, Path) else run
    words = [*map(str, files), *(f"{key}={_typed(value)}" for key, value in (overrides or {}).items())]
    _print_ending(status, config, console, missing=missing, train=words if files else [])
    return status


async def _train(config: RunConfig, checked: Checked, adopt_tasks: bool) -> list[str]:
    """What MLflow, and the other places that follow the log, lack at the end."""
    import httpx

    from flows.train_grpo import train_grpo
    from settings.run_file import RunConfig, Settings
    from tasks.checks.preflight import CHECKED

    CHECKED.set(checked)
    knobs = {name: getattr(config, name) for name in RunConfig.model_fields if name not in Settings.model_fields}
    try:
        ending = await train_grpo(**knobs, settings=config.settings, adopt_tasks=adopt_tasks)
    except httpx.TransportError as error:
        if open_named(config.run, config.store).state.step < config.steps:
            raise
        logger.warning(
            "Prefect does not know that the run has ended, its server is away (%r): there it is crashed, as `millrace "
            "up` says too, and the run's log has everything",
            error,
        )
        return []
    return list(ending["missing"])


def _print_ending(
    status: dict[str, Any], config: RunConfig, console: Console, *, missing: list[str], train: list[str]
) -> None:
    """Score before and after, where everything is, and what to try next."""
    from cli.operate.status import parted, reward_text

    before, after = (
        "-" if status[key] is None else f"{status[key]:.3f}" for key in ("accuracy_before", "accuracy_after")
    )
    tasks = "" if status["accuracy_tasks"] is None else f" on {counted(status['accuracy_tasks'], 'task')}"
    run_folder = f"{status['store']}/runs/{config.run}"
    memory = f"memory   at most {status['peak_memory_bytes'] / 2**30:.1f} GiB\n" if status["step"] else ""
    console.print(f"\n[bold]run {escape(config.run)}[/]")
    console.print(
        f"held-out score [bold]{before} → {after}[/]{tasks} after {counted(status['step'], 'step')}, "
        f"{lasted(status['wall_seconds'])}"
    )
    if status["reward_steps"] is not None:
        console.print(f"reward {reward_text(status)}")
    if sentence := parted(status):
        console.print(f"[yellow]{escape(sentence)}[/]")
    mlflow = escape(f"{status['mlflow_model']} version {status['mlflow_version']}")
    if status["mlflow_model"] is None:
        mlflow = "does not have this policy, by tracking.register"
    if missing:
        mlflow = "[yellow]" + escape("\n         ".join(missing)) + "[/]"
    console.print(
        f"{memory}run      {escape(run_folder)}\n"
        f"shards   {escape(run_folder)}/shards: {counted(status['shards'], 'file')}, "
        f"{counted(status['trajectories'], 'training row')}\n"
        f"model    {escape(str(status['policy']))}\n"
        f"MLflow   {mlflow}\n",
        soft_wrap=True,
    )
    in_store = {"store": status["store"]}
    lines = [
        (command("status", config.run, **in_store), "the run in numbers; --json for scripts"),
        (command("report", config.run, **in_store), "one web page: curves, time, groups, prompts"),
        (
            command("traj", "show", config.run, "--worst", *([] if status["step"] else ["--eval"]), **in_store),
            "the worst trajectories, with reward and versions",
        ),
        (command("eval", config.run, "--version", 0, **in_store), "score another policy version"),
        (command("up"), "Prefect and MLflow in the browser, with this history"),
    ]
    width = min(_WIDEST, max(len(line) for line, _ in lines))
    if train:
        kept = [word for word in train if not word.startswith(("run=", "seed="))]
        again = command("train", *kept, f"run={config.run}-2", f"seed={config.seed + 1}")
        lines.insert(-1, (again, "the same with another seed"))
    console.print("next:")
    for line, what in lines:
        console.print(f"  {escape(f'{line:<{width}}')}   [dim]# {what}[/]", soft_wrap=True)
