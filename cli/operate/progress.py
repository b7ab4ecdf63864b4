"""What a person watches while a run trains: a row per round, read from the run's log.

In: a store and a run. Out: lines on the terminal. Because only the log is read, the view is the same whoever trains.
"""

from __future__ import annotations

import threading
from pathlib import Path

from rich.console import Console
from rich.status import Status

from cli.operate.status import run_status
from cli.terminal.formatting import held_out
from infra.environment import home
from settings.run_file import RunConfig
from storage.log.entries import Evaluation, LogEntry, Policy, Session, Step
from storage.log.runs import open_run
from storage.objects.opening import open_store

HEADER = (
    f"{'step':>8} {'reward':>6} {'held-out':>8} {'staleness':>10} {'tokens/s':>8} {'round':>6} "
    f"{'gen':>4} {'rew':>4} {'com':>4} {'tra':>4} {'pub':>4} {'idle':>4}"
)
LEGEND = "time in % of the round: waited for generate, reward, commit; load, train and save; publish; idle: the rest"


class Follower:
    """A thread that prints what is new in a run's log; use it as a context manager."""

    def __init__(self, store_uri: str, config: RunConfig, console: Console) -> None:
        self._log = open_run(open_store(store_uri), config.run)
        self._shown = self._log.state.entries
        self._steps = config.steps
        self._console = console
        self._status = Status("starting", console=console, refresh_per_second=4)
        self._warmup_log = home() / "logs" / config.run / "warmup.log"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)
        self._score: float | None = None
        self._header_shown = False

    def __enter__(self) -> Follower:
        if self._shown:
            self._console.print(f"continuing run [bold]{self._log.run_id}[/] at step {self._log.state.step}")
            scores = [evaluation.score for evaluation in self._log.state.evaluations if not evaluation.failed]
            self._score = scores[-1] if scores else None
        self._status.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._show_new()
        self._status.stop()

    def _follow(self) -> None:
        while not self._stop.wait(0.5):
            self._show_new()

    def _show_new(self) -> None:
        self._log.refresh()
        for entry in self._log.entries[self._shown :]:
            self._show(entry)
        self._shown = len(self._log.entries)
        self._status.update(self._stage())

    def _stage(self) -> str:
        state = self._log.state
        if state.live is None:
            return last_line(self._warmup_log, "base model") or "preparing the base model"
        if state.step >= self._steps:
            return "finishing: last evaluation, MLflow, Prefect history"
        return f"step {state.step + 1} of {self._steps}: {state.pending_accepted} groups ready"

    def _show(self, entry: LogEntry) -> None:
        match entry.body:
            case Session() as session:
                self._console.print(
                    f"[dim]run {self._log.run_id}, session {session.id}, code {session.code_version}[/]"
                )
            case Policy() as policy:
                self._console.print(f"[dim]base policy {policy.weights_sha256[:12]} at {policy.path}[/]")
            case Evaluation() as evaluation:
                score, facts = held_out(evaluation)
                if not evaluation.failed:
                    self._score = evaluation.score
                colour = "red" if evaluation.failed else "cyan"
                self._console.print(f"[bold {colour}]policy {evaluation.version}: {score}[/] [dim]{facts}[/]")
            case Step() as step:
                if not self._header_shown:
                    self._console.print(f"[dim]{LEGEND}[/]")
                    self._console.print(f"[bold]{HEADER}[/]", soft_wrap=True)
                    self._header_shown = True
                self._console.print(self._row(step), soft_wrap=True)
            case _:
                pass

    def _row(self, step: Step) -> str:
        metrics = step.metrics
        score = "-" if self._score is None else f"{self._score:.3f}"
        reward, staleness = "-", step.claim.fallback  # a step with nothing to train has neither
        if not step.claim.fallback:
            reward = f"{metrics['reward']:.3f}"
            staleness = f"{metrics['staleness_mean']:.1f} max {metrics['staleness_max']:.0f}"
        return (
            f"{f'{step.claim.step}/{self._steps}':>8} {reward:>6} {score:>8} {staleness:>10} "
            f"{metrics['tokens_per_second']:>8.0f} {metrics['round_seconds']:>5.1f}s {time_split(metrics)}"
        )


def time_split(metrics: dict[str, float]) -> str:
    """Where a round's time went, in per cent of its wall-clock; the columns add up to 100."""
    columns = (("generate",), ("reward",), ("commit",), ("load", "train", "save"), ("publish",), ("wait", "idle"))
    # A step of before `wait` and `load` were measured has neither.
    seconds = [sum(metrics.get(f"{phase}_seconds", 0.0) for phase in column) for column in columns]
    return " ".join(f"{100 * value / max(metrics['round_seconds'], 1e-9):>3.0f}%" for value in seconds)


def print_ending(store_uri: str, config: RunConfig, console: Console, run_file: Path) -> None:
    """Accuracy before and after, where everything is, and what to try next."""
    log = open_run(open_store(store_uri), config.run)
    status = run_status(log)

    def score(key: str) -> str:
        return "-" if status[key] is None else f"{status[key]:.3f}"

    memory = status["peak_memory_bytes"] / 2**30
    run_folder = f"{store_uri}/runs/{config.run}"
    console.rule(f"run {config.run}", align="left")
    console.print(
        f"held-out accuracy [bold]{score('accuracy_before')} → {score('accuracy_after')}[/] after {status['step']} "
        f"steps, {status['wall_seconds']:.0f} s, at most {memory:.1f} GiB\n"
        f"run      {run_folder}\n"
        f"shards   {run_folder}/shards: {status['shards']} files, {status['trajectories']} training trajectories\n"
        f"model    {status['policy']}\n"
        f"MLflow   {status['mlflow_model']} version {status['mlflow_version']}\n",
        soft_wrap=True,
    )
    command = ".venv/bin/millrace"
    console.print(
        "next:\n"
        f"  {command} status {config.run}              [dim]# the run in numbers; --json for scripts[/]\n"
        f"  {command} report {config.run}              [dim]# one web page: curves, time, groups, prompts[/]\n"
        f"  {command} traj show {config.run} --worst   [dim]# the worst trajectories, with reward and versions[/]\n"
        f"  {command} eval {config.run} --version 0    [dim]# score another policy version[/]\n"
        f"  {command} train {run_file} run={config.run}-2 seed={config.seed + 1}\n"
        "  make up                                   [dim]# Prefect and MLflow in the browser, with this history[/]",
        soft_wrap=True,
    )


def last_line(file: Path, word: str) -> str | None:
    """The end of a log file's last line that contains `word`, from there on; null without one."""
    if not file.exists():
        return None
    found = [line for line in file.read_text(errors="replace").splitlines() if word in line]
    return found[-1][found[-1].index(word) :] if found else None
