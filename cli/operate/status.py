"""`millrace status` and `runs`: what the logs say, and nothing else: no MLflow, no Prefect, no torch.

In: a run's log, or a store. Out: a dictionary of plain numbers, or a table of them; a row per run, the one that was
worked on last first. With `--follow`, the last rounds and the run's table as the log grows: on a terminal one view,
drawn again every second; elsewhere a status after every change.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cli.terminal.arguments import JsonOption, StoreOption, open_named, open_named_store, print_json
from cli.terminal.formatting import ago, number, one_line, plain_table
from settings.errors import InvalidInput, in_one_line
from settings.places.hints import command
from settings.redaction import without_secrets

if TYPE_CHECKING:
    from storage.log.run_log import RunLog
    from storage.log.run_state import RunState
    from storage.objects.object_store import ObjectStore

SECONDS_BETWEEN_LOOKS = 1.0
MOST_ROUNDS = 5
PHASES_HEADER = f"{'round':>6} {'gen':>4} {'rew':>4} {'com':>4} {'tra':>4} {'pub':>4} {'idle':>4}"
LEGEND = "time in % of the round: waited for generate, reward, commit; load, train and save; publish; idle: the rest"


def status(
    run: str,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Again as it grows, until the last step.")] = False,
    store: StoreOption = "",
    as_json: JsonOption = False,
) -> None:
    """A run in numbers, read from its log alone."""
    if follow and as_json:
        raise InvalidInput("--json prints the status once: leave out --follow, or --json")
    log, console = open_named(run, store), Console(highlight=False)
    if follow:
        follow_run(log, console)
    elif as_json:
        print_json(run_status(log))
    else:
        console.print(status_table(run_status(log)))


def run_status(log: RunLog) -> dict[str, Any]:
    """The run in numbers; None for what it does not have yet. Accuracies are held-out scores, 0 to 1."""
    from storage.log.runs import own_scores, run_config

    state, live = log.state, log.state.live
    evaluations = own_scores(log, run_config(log))
    last = evaluations[-1] if evaluations else None
    registration = state.registrations.get(live.version) if live else None
    return {
        "run": log.run_id,
        "ended": end_sentence(log),
        "store": log.store.uri,
        "step": state.step,
        "weight_version": live.version if live else None,
        "weights_sha256": live.weights_sha256 if live else None,
        "policy": f"{log.store.uri}/{live.path}" if live else None,
        "accuracy_before": evaluations[0].score if evaluations else None,
        "accuracy_after": last.score if last else None,
        "accuracy_standard_error": last.standard_error if last else None,
        "pass_at": last.pass_at if last else None,
        "failed_evaluations": sum(evaluation.failed for evaluation in state.evaluations),
        "wall_seconds": round(state.worked_seconds, 1),
        "peak_memory_bytes": int(max((step.metrics["peak_memory_bytes"] for step in state.steps), default=0)),
        "mlflow_model": registration.model_name if registration else None,
        "mlflow_version": registration.registry_version if registration else None,
        "paused": state.paused or None,
        "sessions": len(state.sessions),
        "shards": len(state.shards),
        "trajectories": state.num_trajectories,
        **state.counters(),
    }


def end_sentence(log: RunLog) -> str | None:
    """How, when and why a run ended that lacks steps; None for one that is finished or may be at work."""
    from storage.log.runs import outcome

    state, how = log.state, outcome(log)
    if how in ("running", "finished"):
        return None
    at = state.ended_at if state.ended else state.last_at
    when = f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(at))}, {ago(time.time() - at)}"
    if state.ended is None:
        return f"ended without a word, after its last entry at {when}: killed, or the machine went down"
    return f"stopped at {when}" if how == "stopped" else f"crashed at {when}: {in_one_line(state.ended.reason)}"


def status_table(status: dict[str, Any]) -> Group:
    """The status as a table."""
    table = plain_table()
    for key, value in status.items():
        if key == "ended" and not value:
            continue
        if key == "peak_memory_bytes":
            key, value = "peak memory", f"{value / 2**30:.2f} GiB"
        elif key == "pass_at":
            key, value = "pass@k", ", ".join(f"{k}: {chance:.3f}" for k, chance in (value or {}).items()) or None
        elif isinstance(value, float):
            value = f"{value:.3f}" if "accuracy" in key else f"{value:.1f}"
        table.add_row(f"[dim]{key.replace('_', ' ')}[/]", Text("-" if value is None else one_line(str(value))))
    groups = "submitted = trained + filtered + stale + failed + cancelled + pending"
    return Group(table, Text(f"prompt groups: {groups}", style="dim"))


class RunView:
    """A run as it was at the last look. Another thread may draw it at any time."""

    def __init__(self, log: RunLog) -> None:
        self._log = log
        self._entries = -1
        self._is_training = False
        self._failure = ""
        self._numbers = Group()
        """Rounds and status, made when an entry is new."""

    @property
    def is_over(self) -> bool:
        """True when the newest session has done all its steps; older logs do not say how many it wants."""
        state = self._log.state
        return bool(state.sessions) and 0 < state.sessions[-1].steps <= state.step

    def look(self) -> bool:
        """Read what is new; True if anything is, other than the time. A store that fails is part of the view."""
        from storage.log.runs import is_training
        from storage.objects.object_store import StoreError

        before = (self._entries, self._is_training, bool(self._failure))
        try:
            self._log.refresh()
            self._is_training = is_training(self._log)
            self._failure = ""
        except (OSError, StoreError) as error:
            self._failure = one_line(without_secrets(f"{type(error).__name__}: {error}"))
        if before[:2] != (self._log.state.entries, self._is_training):
            self._entries = self._log.state.entries
            self._numbers = Group(_rounds(self._log.state), status_table(run_status(self._log)))
        return before != (self._entries, self._is_training, bool(self._failure))

    def __rich__(self) -> Group:
        """The newest first: a terminal may have too few lines for all of it."""
        who = "this machine trains it" if self._is_training else "this machine does not train it"
        last_at = self._log.state.last_at
        last = f"last entry {ago(time.time() - last_at)}" if last_at else "no entry yet"
        lines = [Text(f"run {self._log.run_id}: {last}, {who}", style="bold")]
        if self._failure:
            lines.append(Text(f"the store could not be read, trying again: {self._failure}", style="yellow"))
        return Group(*lines, self._numbers)


def follow_run(log: RunLog, console: Console, *, seconds: float = SECONDS_BETWEEN_LOOKS) -> None:
    """Show the run until it has its steps, or until Ctrl-C. Raises `LogDamaged` for a log that contradicts itself."""
    from rich.live import Live

    view = RunView(log)
    draws = console.is_terminal and not console.is_dumb_terminal
    with contextlib.suppress(KeyboardInterrupt):
        changed = view.look()
        with Live(view, console=console, refresh_per_second=1) if draws else contextlib.nullcontext():
            while True:
                if changed and not draws:
                    console.print(view)
                if view.is_over:
                    return
                time.sleep(seconds)
                changed = view.look()


def _rounds(state: RunState) -> Text:
    """A line for each of the last steps, as `millrace train` prints it."""
    if not state.steps:
        return Text()
    wanted = state.sessions[-1].steps if state.sessions else 0
    rounds = Text().append(f"{LEGEND}\n", style="dim")
    rounds.append(f"{'step':>8} {'reward':>6} {PHASES_HEADER}", style="bold")
    for step in state.steps[-MOST_ROUNDS:]:
        place = f"{step.claim.step}/{wanted}" if wanted else str(step.claim.step)
        reward = f"{step.metrics['reward']:.3f}" if "reward" in step.metrics else "-"  # nothing was trained
        rounds.append(f"\n{place:>8} {reward:>6} {phases(step.metrics)}")
    return rounds


def phases(metrics: dict[str, float]) -> str:
    """A round's seconds, and where they went in per cent, under `PHASES_HEADER`; the columns add up to 100."""
    columns = (("generate",), ("reward",), ("commit",), ("load", "train", "save"), ("publish",), ("wait", "idle"))
    # A step of before `wait` and `load` were measured has neither.
    seconds = [sum(metrics.get(f"{phase}_seconds", 0.0) for phase in column) for column in columns]
    shares = (f"{100 * value / max(metrics['round_seconds'], 1e-9):>3.0f}%" for value in seconds)
    return f"{metrics['round_seconds']:>5.1f}s {' '.join(shares)}"


def runs(store: StoreOption = "", as_json: JsonOption = False) -> None:
    """Every run in the store: steps, scores, champion, and whether it is being trained here."""
    opened, console = open_named_store(store), Console(highlight=False)
    listed = list_runs(opened)
    if as_json:
        print_json(listed)
    elif listed:
        console.print(_runs_table(listed))
        for run in listed:
            if run["ended"]:
                console.print(Text(one_line(f"{run['run']} {run['ended']}"), style="yellow"), soft_wrap=True)
    else:
        train = command("train", "RUNFILE")
        console.print(escape(f"no runs in {opened.uri} yet; `{train}` makes one"), soft_wrap=True)


def list_runs(store: ObjectStore) -> list[dict[str, Any]]:
    """One dictionary of plain values per run; times in seconds since 1970."""
    from storage.log.runs import open_run

    logs = [open_run(store, name) for name in store.names("runs") if store.exists(f"runs/{name}/run.json")]
    return sorted(map(_run_facts, logs), key=lambda run: run["last_entry_at"] or 0.0, reverse=True)


def _run_facts(log: RunLog) -> dict[str, Any]:
    from storage.log.promotion import CHAMPION
    from storage.log.runs import is_training, own_scores, run_config

    state = log.state
    config = run_config(log)
    scores = own_scores(log, config)
    champion = state.aliases.get(CHAMPION)
    return {
        "run": log.run_id,
        "workflow": config.get("workflow"),
        "is_training": is_training(log),
        "ended": end_sentence(log),
        "step": state.step,
        "trajectories": state.num_trajectories,
        "accuracy_before": scores[0].score if scores else None,
        "accuracy_after": scores[-1].score if scores else None,
        "champion": champion.version if champion is not None else None,
        "wall_seconds": round(state.worked_seconds, 1),
        "last_entry_at": log.entries[-1].written_at if log.entries else None,
    }


def _runs_table(runs: list[dict[str, Any]]) -> Table:
    names = ("run", "workflow", "", "steps", "attempts", "held-out", "champion", "last entry")
    table = plain_table(*names, right=("steps", "attempts", "champion"))
    for run in runs:
        scores = [run["accuracy_before"], run["accuracy_after"]]
        table.add_row(
            run["run"],
            one_line(run["workflow"] or "-"),
            "training" if run["is_training"] else (run["ended"] or "").partition(" ")[0],
            str(run["step"]),
            f"{run['trajectories']:,}",
            "-" if scores[0] is None else " → ".join(number(score, digits=3) for score in scores),
            "-" if run["champion"] is None else str(run["champion"]),
            "-" if run["last_entry_at"] is None else ago(time.time() - run["last_entry_at"]),
        )
    return table
