"""The `millrace` command: it names every command and does nothing itself.

In: a command line. Out: the exit status. Each command is a file, which imports what it needs when it runs, so that
`millrace --help` is instant.
"""

from __future__ import annotations

from collections.abc import Callable

import typer

from cli.operate.doctor import doctor
from cli.operate.export import export
from cli.operate.exporter import exporter
from cli.operate.housekeeping import gc
from cli.operate.lineage import lineage
from cli.operate.pause import pause, resume
from cli.operate.promote import promote, rollback
from cli.operate.runs import runs
from cli.operate.services import down, up
from cli.operate.status import status
from cli.operate.stop import stop
from cli.report.report import report
from cli.run.config import config
from cli.run.eval import evaluate
from cli.run.produce import produce
from cli.run.replay import replay
from cli.run.rescore import rescore
from cli.run.rollout import once
from cli.run.train import train
from cli.terminal.errors import explained
from cli.traj.diff import diff
from cli.traj.export import export as export_trajectories
from cli.traj.index import index
from cli.traj.ls import ls
from cli.traj.search import search
from cli.traj.show import show
from cli.traj.sql import sql
from cli.traj.stats import stats
from infra.environment import prepare_environment

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Post-train language-model agents by reinforcement learning. State lives in .millrace (or $MILLRACE_HOME).",
)
traj = typer.Typer(no_args_is_help=True, help="Look at trajectories; `traj ls` lists their ids, GROUP/ATTEMPT.")
rollout = typer.Typer(no_args_is_help=True, help="Try a workflow without training.")
app.add_typer(traj, name="traj")
app.add_typer(rollout, name="rollout")


@app.callback()
@explained()
def main() -> None:
    prepare_environment()


command: Callable[..., None]
for command in (
    *(train, config, status, evaluate, produce, lineage, gc, replay, rescore, export, index, report, doctor, up, down),
    *(runs, stop, pause, resume, promote, rollback, exporter),
):
    app.command("eval" if command is evaluate else None)(explained()(command))
for command in (ls, show, diff, stats, sql, export_trajectories, search):
    traj.command()(explained()(command))
rollout.command()(explained()(once))

if __name__ == "__main__":
    app()
