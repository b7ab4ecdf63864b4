"""`millrace status`: what a run's log says, and nothing else: no MLflow, no Prefect, no torch.

In: a run's log. Out: a dictionary of plain numbers, or a table of them. With `--follow`, the last rounds and the run's
table as the log grows: on a terminal one view, drawn again every second; elsewhere a status after every change.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from cli.terminal.arguments import JsonOption, StoreOption, open_named, print_json
from cli.terminal.console import open_console
from cli.terminal.formatting import ago, lasted, plain_table
from settings.errors import InvalidInput, counted, in_one_line
from settings.redaction import one_line, without_secrets

if TYPE_CHECKING:
    from storage.log.run_log import RunLog
    from storage.log.run_state import RunState

SECONDS_BETWEEN_LOOKS = 1.0
MOST_ROUNDS = 5
MOST_STEPS_OF_TREND = 10


def status(
    run: str,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Again as it grows, until the last step.")] = False,
    store: StoreOption = "",
    as_json: JsonOption = False,
) -> None:
    """A run in numbers, read from its log alone."""
    if follow and as_json:
        raise InvalidInput("--json prints the status once: leave out --follow, or --json")
    log, console = open_named(run, store), open_console()
    if follow:
        follow_run(log, console)
    elif as_json:
        print_json(run_status(log))
    else:
        console.print(status_table(run_status(log)))


def run_status(log: RunLog, config: dict[str, Any] | None = None) -> dict[str, Any]:
    """The run in numbers; None for what it does not have yet. Accuracies are held-out scores, 0 to 1; times are in
    seconds since 1970. `config` is the run's configuration, read if it is not given."""
    from settings.run_file import changed_settings
    from storage.log.claims import following
    from storage.log.promotion import CHAMPION
    from storage.log.runs import run_config
    from storage.log.scores import own_scores

    state, live = log.state, log.state.live
    config = run_config(log) if config is None else config
    evaluations = own_scores(log, config)
    last = evaluations[-1] if evaluations else None
    registration = state.registrations.get(live.version) if live else None
    champion = state.aliases.get(CHAMPION)
    wanted = state.sessions[-1].steps if state.sessions else 0
    return {
        "run": log.run_id,
        "ended": end_sentence(log),
        "store": log.store.uri,
        "workflow": config.get("workflow"),
        "model": config.get("model") or None,
        "step": state.step,
        "target_steps": wanted or config.get("steps"),
        "begun_at": state.started_at or None,
        "ended_at": state.worked_until if 0 < wanted <= state.step else None,
        "last_entry_at": state.last_at or None,
        "wall_seconds": round(state.worked_seconds, 1),
        "sessions": len(state.sessions),
        "weight_version": live.version if live else None,
        "weights_sha256": live.weights_sha256 if live else None,
        "policy": f"{log.store.uri}/{live.path}" if live else None,
        "champion": champion.version if champion is not None else None,
        **reward_trend(state),
        "accuracy_before": evaluations[0].score if evaluations else None,
        "accuracy_after": last.score if last else None,
        "accuracy_versions": [evaluations[0].version, evaluations[-1].version] if evaluations else None,
        "accuracy_split": last.split if last else None,
        "accuracy_tasks": last.num_tasks if last else None,
        "accuracy_attempts_per_task": (last.n_samples or None) if last else None,
        "accuracy_standard_error": last.standard_error if last else None,
        "pass_at": last.pass_at if last else None,
        "pass_all": last.pass_all if last else None,
        "maj_at": last.maj_at if last else None,
        "evaluations": len(state.evaluations),
        "failed_evaluations": sum(evaluation.failed for evaluation in state.evaluations),
        "peak_memory_bytes": int(max((step.metrics.get("peak_memory_bytes", 0) for step in state.steps), default=0)),
        "mlflow_model": registration.model_name if registration else None,
        "mlflow_version": registration.registry_version if registration else None,
        "paused": state.paused or None,
        "reproducible": following(state, config) or None,
        "shards": len(state.shards),
        "trajectories": state.num_trajectories,
        **state.counters(),
        "settings": changed_settings(config),
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


def reward_trend(state: RunState) -> dict[str, Any]:
    """Mean reward of the first and of the last steps, a fifth of those with a reward but at most ten; from two on."""
    steps = [step for step in state.steps if "reward" in step.metrics]
    count = min(MOST_STEPS_OF_TREND, max(1, len(steps) // 5)) if len(steps) > 1 else 0
    first, last = (
        sum(step.metrics["reward"] for step in part) / count if count else None
        for part in (steps[:count], steps[len(steps) - count :])
    )
    return {"reward_before": first, "reward_after": last, "reward_steps": count or None}


def parted(status: dict[str, Any]) -> str:
    """A sentence if reward and held-out score went opposite ways; else nothing."""
    before, after, error = (status[f"accuracy_{name}"] for name in ("before", "after", "standard_error"))
    if status["reward_steps"] is None or before is None:
        return ""
    reward, score = status["reward_after"] - status["reward_before"], after - before
    if reward * score >= 0:
        return ""
    is_noise = error is not None and abs(score) <= 2 * error
    first, second = ("rose", "fell") if reward > 0 else ("fell", "rose")
    doubt = "; that is within two standard errors, so more tasks would tell" if is_noise else ""
    return (
        f"reward and held-out score part: the reward {first} ({reward_text(status)}), the score {second} "
        f"({before:.3f} → {after:.3f} on {counted(status['accuracy_tasks'], 'task')}){doubt}"
    )


def reward_text(status: dict[str, Any]) -> str:
    """`0.438 → 0.562, mean of the first and last 8 of 40 steps`."""
    count, of = status["reward_steps"], counted(status["step"], "step")
    which = "first and last" if count == 1 else f"first and last {count}"
    return f"{status['reward_before']:.3f} → {status['reward_after']:.3f}, mean of the {which} of {of}"


def status_table(status: dict[str, Any], *, one_line_each: bool = False) -> Table:
    """The status as a table; with `one_line_each` what is too long for the terminal ends in `…`."""
    table = plain_table()
    table.add_column(style="dim", no_wrap=True, min_width=8)
    table.add_column(no_wrap=one_line_each, overflow="ellipsis" if one_line_each else "fold")
    for name, text in _facts(status).items():
        if text:
            table.add_row(name, Text(one_line(text)))
    return table


def _facts(status: dict[str, Any]) -> dict[str, str]:
    """What there is to say, by name; empty for what does not deserve a line."""
    present = {key: value for key, value in status.items() if value is not None}
    steps = counted(status["step"], "step")
    of = f"{status['step']} of {present['target_steps']}" if "target_steps" in present else str(status["step"])
    version = "none yet"
    if "weight_version" in present:
        version = f"{status['weight_version']}, weights {status['weights_sha256'][:12]}"
    begun = "not yet"
    if "begun_at" in present:
        ended = f", ended {_at(status['ended_at'])}" if "ended_at" in present else ", not at its last step"
        worked = f"worked {lasted(status['wall_seconds'])} in {counted(status['sessions'], 'session')}"
        begun = f"{_at(status['begun_at'])}{ended}; {worked}"
    parts = ("trained", "filtered", "stale", "failed", "cancelled", "pending")
    groups = " + ".join(f"{status[part]} {part}" for part in parts if status[part])
    return {
        "run": status["run"],
        "ended": present.get("ended", ""),
        "workflow": present.get("workflow", ""),
        "model": present.get("model", "made from the workflow's demonstrations" if "workflow" in present else ""),
        "steps": of + (f", paused: {status['paused']}" if "paused" in present else ""),
        "time": begun,
        "as filed": present.get("reproducible", ""),
        "reward": reward_text(status) if "reward_steps" in present else "",
        "held-out": _held_out(status),
        "policy": version + (f"; champion {status['champion']}" if "champion" in present else "; no champion"),
        "MLflow": f"{status['mlflow_model']} version {status['mlflow_version']}" if "mlflow_model" in present else "",
        "groups": f"{status['submitted']} submitted" + (f" = {groups}" if groups else ""),
        "shards": f"{status['shards']} with {counted(status['trajectories'], 'training row')}, "
        f"{status['quarantined']} quarantined",
        "memory": f"at most {status['peak_memory_bytes'] / 2**30:.2f} GiB in {steps}" if status["step"] else "",
        "weights": present.get("policy", ""),
        "settings": ", ".join(f"{key} = {_value(value)}" for key, value in status["settings"].items())
        or "all at their defaults",
    }


def _held_out(status: dict[str, Any]) -> str:
    if status["accuracy_after"] is None:
        scored = "no score yet"
    else:
        first, last = status["accuracy_versions"]
        error = status["accuracy_standard_error"]
        attempts = status["accuracy_attempts_per_task"]
        before = f"{status['accuracy_before']:.3f} → " if first != last else ""
        scored = f"{before}{status['accuracy_after']:.3f}"
        scored += "" if error is None else f" ± {error:.3f}"
        scored += f" on {counted(status['accuracy_tasks'], 'task')} of {status['accuracy_split']}"
        scored += f" × {counted(attempts, 'attempt')}" if attempts else ""
        scored += f", policies {first} and {last}" if first != last else f", policy {last}"
        several = [f"pass@{k} {chance:.3f}" for k, chance in (status["pass_at"] or {}).items() if (attempts or 0) > 1]
        scored += "".join(f", {text}" for text in several)
    if not status["evaluations"]:
        return scored
    failed = f", {status['failed_evaluations']} failed" if status["failed_evaluations"] else ""
    return f"{scored}; {counted(status['evaluations'], 'evaluation')}{failed}"


def _at(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _value(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value)


class RunView:
    """A run as it was at the last look. Another thread may draw it at any time."""

    def __init__(self, log: RunLog, *, is_drawn: bool = False) -> None:
        """With `is_drawn` it fits on a terminal of 24 lines."""
        from storage.log.runs import run_config

        self._log = log
        self._config = run_config(log)
        self._entries = -1
        self._is_training = False
        self._failure = ""
        self._is_drawn = is_drawn
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
            numbers = run_status(self._log, self._config)
            facts = status_table(numbers, one_line_each=self._is_drawn)
            self._numbers = Group(*_rounds(self._log, self._config), facts)
        return before != (self._entries, self._is_training, bool(self._failure))

    def __rich__(self) -> Group:
        """The newest first: a terminal may have too few lines for all of it."""
        who = "this machine trains it" if self._is_training else "this machine does not train it"
        last_at = self._log.state.last_at
        last = f"last entry {ago(time.time() - last_at)}" if last_at else "no entry yet"
        ends: Any = {"no_wrap": True, "overflow": "ellipsis"} if self._is_drawn else {}
        lines = [Text(f"run {self._log.run_id}: {last}, {who}", style="bold", **ends)]
        if self._failure:
            lines.append(Text(f"the store could not be read, trying again: {self._failure}", style="yellow", **ends))
        return Group(*lines, self._numbers)


def follow_run(log: RunLog, console: Console, *, seconds: float = SECONDS_BETWEEN_LOOKS) -> None:
    """Show the run until it has its steps, or until Ctrl-C. Raises `LogDamaged` for a log that contradicts itself."""
    from rich.live import Live

    draws = console.is_terminal and not console.is_dumb_terminal
    view = RunView(log, is_drawn=draws)
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


def _rounds(log: RunLog, config: dict[str, Any]) -> list[RenderableType]:
    """The last steps, as `millrace train` prints them."""
    from cli.operate.rounds import LEGEND, rounds_table
    from storage.log.scores import own_scores

    state = log.state
    if not state.steps:
        return []
    wanted = state.sessions[-1].steps if state.sessions else 0
    return [
        Text(LEGEND, style="dim"),
        rounds_table(state.steps[-MOST_ROUNDS:], own_scores(log, config), wanted=wanted),
    ]
