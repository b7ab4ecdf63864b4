"""What a person watches while a run trains: a row per round, read from the run's log.

In: a run's log. Out: lines on the terminal.
"""

from __future__ import annotations

import threading

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from cli.operate.rounds import LEGEND, rounds_table
from cli.terminal.formatting import held_out
from settings.errors import UserError, counted
from storage.log.entries import Evaluation, LogEntry, Policy, Session, Step
from storage.log.run_log import RunLog
from storage.log.runs import run_config
from storage.log.scores import own_scores


class Follower:
    """A thread that prints what is new in a run's log; use it as a context manager."""

    def __init__(self, log: RunLog, *, steps: int, console: Console) -> None:
        self._log = log
        self._shown = log.state.entries
        self._steps = steps
        self._console = console
        self._status = Status("starting", console=console, refresh_per_second=4)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)
        self._config = run_config(log)
        self._header_shown = False

    def __enter__(self) -> Follower:
        self._status.start()
        self._thread.start()
        return self

    def stop_spinner(self) -> None:
        """Take its line away and show the cursor again, also when the process is about to end without `__exit__`."""
        self._status.stop()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._show_new()
        self._status.stop()

    def _follow(self) -> None:
        while not self._stop.wait(0.5):
            self._show_new()

    def _show_new(self) -> None:
        try:
            self._log.refresh()
        except UserError:  # the store is away: the run says so, and the next look shows what has come meanwhile
            return
        for entry in self._log.entries[self._shown :]:
            self._show(entry)
        self._shown = len(self._log.entries)
        self._status.update(escape(self._stage()))

    def _stage(self) -> str:
        state = self._log.state
        if state.live is None:
            return "preparing the base model"
        if state.step >= self._steps:
            return "finishing: last evaluation, MLflow, Prefect history"
        return f"step {state.step + 1} of {self._steps}: {counted(state.pending_accepted, 'group')} ready"

    def _show(self, entry: LogEntry) -> None:
        match entry.body:
            case Session() as session:
                self._console.print(
                    f"[dim]{escape(f'run {self._log.run_id}, session {session.id}, code {session.code_version}')}[/]"
                )
            case Policy() as policy:
                self._console.print(f"[dim]base policy {escape(f'{policy.weights_sha256[:12]} at {policy.path}')}[/]")
            case Evaluation() as evaluation:
                score, facts = held_out(evaluation)
                colour = "red" if evaluation.failed else "cyan"
                self._console.print(
                    f"[bold {colour}]policy {evaluation.version}: {escape(score)}[/] [dim]{escape(facts)}[/]"
                )
            case Step() as step:
                is_first, self._header_shown = not self._header_shown, True
                if is_first:
                    self._console.print(f"[dim]{self._over_how_many()}\n{LEGEND}[/]")
                scores = own_scores(self._log, self._config)
                self._console.print(rounds_table([step], scores, wanted=self._steps, header=is_first))
            case _:
                pass

    def _over_how_many(self) -> str:
        prompts, attempts = self._config.get("batch_size"), self._config.get("n_samples")
        return f"reward: mean of a step's {prompts} × {attempts} attempts; held-out: the newest score by then"
