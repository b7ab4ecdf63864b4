"""The `millrace` command: it names every command and does nothing itself.

In: a command line. Out: the exit status. Each command is a file, which imports what it needs when it runs, so that
`millrace --help` is instant.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.operate.doctor import doctor
from cli.operate.export import export
from cli.operate.exporter import exporter
from cli.operate.housekeeping import gc, rm
from cli.operate.lineage import lineage
from cli.operate.promote import promote, rollback, sync
from cli.operate.runs import runs
from cli.operate.services import down, up
from cli.operate.status import status
from cli.operate.stop import pause, resume, stop
from cli.run.config import config
from cli.run.eval import evaluate
from cli.run.replay import replay
from cli.run.rescore import rescore
from cli.run.rollout import once, produce
from cli.run.train import train
from cli.terminal.arguments import Command
from cli.terminal.console import open_streams
from cli.terminal.errors import end_threads, explained
from cli.traj.diff import diff
from cli.traj.export import export as export_trajectories
from cli.traj.ls import ls
from cli.traj.runs_diff import runs_diff
from cli.traj.search import index, search
from cli.traj.show import show
from cli.traj.sql import sql
from cli.traj.stats import stats
from cli.ui.report import report
from cli.ui.ui import ui
from infra.environment import prepare_environment
from settings.errors import path_errors

_NAMES = {"help_option_names": ["-h", "--help"]}


class _App(typer.Typer):
    """Ends with its command, whatever threads the user's code has started."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().__call__(*arguments, **options)
        except SystemExit as ended:
            end_threads(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
            raise


app = _App(
    no_args_is_help=True,
    context_settings=_NAMES,
    pretty_exceptions_enable=False,
    help="Post-train language-model agents by reinforcement learning. State lives in .millrace (or $MILLRACE_HOME).",
)
traj = typer.Typer(no_args_is_help=True, help="Look at trajectories; `traj ls` lists their ids, GROUP/ATTEMPT.")
rollout = typer.Typer(no_args_is_help=True, help="Try a workflow without training.")

_RUN, _LOOK, _POLICIES, _PLATFORM = "Train and evaluate", "Look at runs", "Policies and files", "Machine and services"
COMMANDS: dict[str, dict[Callable[..., None], str]] = {
    _RUN: {
        train: "train examples/arithmetic.toml steps=20",
        config: "config train.kl",
        evaluate: "eval arithmetic --version 0",
        produce: "produce arithmetic --store s3://bucket/lake",
        pause: 'pause arithmetic --reason "another job needs the GPU"',
        resume: "resume arithmetic",
        stop: "stop arithmetic",
    },
    _LOOK: {
        runs: "runs",
        status: "status arithmetic --follow",
        ui: "ui arithmetic --port 4300",
        report: "report arithmetic",
        index: "index arithmetic",
        lineage: "lineage arithmetic@rollout",
        runs_diff: "diff arithmetic arithmetic-2",
        replay: "replay arithmetic --step 13",
        rescore: "rescore arithmetic --reward my/file.py:f",
    },
    _POLICIES: {
        export: "export arithmetic --to out",
        promote: "promote arithmetic --version 20",
        rollback: "rollback arithmetic",
        sync: "sync arithmetic",
        gc: "gc arithmetic",
        rm: "rm arithmetic",
    },
    _PLATFORM: {
        doctor: "doctor examples/arithmetic.toml",
        up: "up",
        down: "down",
        exporter: "exporter --port 9464",
    },
}
"""Every command but those of `traj` and `rollout`, in the groups of `millrace --help`, with an example."""
TRAJ: dict[Callable[..., None], str] = {
    ls: 'traj ls arithmetic --where "step = 13"',
    show: "traj show arithmetic --worst",
    diff: "traj diff arithmetic ID_A ID_B",
    stats: "traj stats arithmetic",
    sql: 'traj sql arithmetic "SELECT step, avg(reward) FROM trajectories GROUP BY step"',
    export_trajectories: "traj export arithmetic pairs.parquet --format dpo",
    search: 'traj search arithmetic "a carry is lost"',
}


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"millrace {version('millrace')}")
        raise typer.Exit()


@app.callback()
@explained()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    open_streams()
    with path_errors("the current folder was removed; change to another one"):
        Path.cwd()
    prepare_environment()


def _add(to: typer.Typer, command: Callable[..., None], example: str, *, panel: str | None = None) -> None:
    named = {evaluate: "eval", runs_diff: "diff"}.get(command)
    context = {**_NAMES, "ignore_unknown_options": command is train}  # which has a better word for `--steps 5`
    epilog = f"Example: millrace {example}"
    to.command(named, cls=Command, context_settings=context, epilog=epilog, rich_help_panel=panel)(explained()(command))


for title, members in COMMANDS.items():
    for member, usage in members.items():
        _add(app, member, usage, panel=title)
for member, usage in TRAJ.items():
    _add(traj, member, usage)
_add(rollout, once, "rollout once arithmetic --n 4")
app.add_typer(traj, name="traj", context_settings=_NAMES, rich_help_panel=_LOOK)
app.add_typer(rollout, name="rollout", context_settings=_NAMES, rich_help_panel=_RUN)

if __name__ == "__main__":
    app()
