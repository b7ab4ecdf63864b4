"""`millrace status --follow`: the status of a run as its log grows, whoever trains it, or nobody.

In: an open run. Out: on a terminal one view, drawn again every second; elsewhere a status whenever something changed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from cli.operate.progress import HEADER, LEGEND, time_split
from cli.operate.runs import ago
from cli.operate.status import peak_memory, run_status, status_table
from cli.terminal.formatting import one_line
from settings.redaction import without_secrets
from storage.log.entries import Step
from storage.log.run_log import RunLog
from storage.log.runs import is_training
from storage.objects.object_store import StoreError

SECONDS_BETWEEN_LOOKS = 1.0
MOST_ROUNDS = 5


class RunView:
    """What the last look at a run has found. Drawn at any time, by another thread too."""

    def __init__(self, log: RunLog) -> None:
        self._log = log
        self._peak_memory, self._steps_seen = 0, 0
        self._seen: tuple[int, bool, bool] | None = None
        self._is_training = False
        self._failure = ""
        self._last_at = 0.0
        self._numbers = Group()
        """Rounds and status, made when an entry is new."""

    @property
    def is_over(self) -> bool:
        """True where the newest session has all the steps it means to do; older logs do not say how many."""
        state = self._log.state
        return bool(state.sessions) and 0 < state.sessions[-1].steps <= state.step

    def look(self) -> bool:
        """Read what is new; True where something is, other than the time. A store that fails is part of the view."""
        before = self._seen
        try:
            self._log.refresh()
            self._is_training = is_training(self._log)
            self._failure = ""
        except (OSError, StoreError) as error:
            self._failure = one_line(without_secrets(f"{type(error).__name__}: {error}"))
        entries = self._log.state.entries
        if before is None or before[0] != entries:
            self._read_numbers()
        self._seen = (entries, self._is_training, bool(self._failure))
        return self._seen != before

    def _read_numbers(self) -> None:
        state = self._log.state
        self._peak_memory = max(self._peak_memory, peak_memory(state.steps[self._steps_seen :]))
        self._steps_seen = state.step
        self._last_at = state.last_at
        wanted = state.sessions[-1].steps if state.sessions else 0
        status = status_table(run_status(self._log, peak_memory_bytes=self._peak_memory))
        self._numbers = Group(_rounds(state.steps[-MOST_ROUNDS:], wanted=wanted), status)

    def __rich__(self) -> Group:
        """The newest first: a terminal may have too few lines for all of it."""
        who = "a process of this machine trains it" if self._is_training else "nobody on this machine trains it"
        last = f"last entry {ago(time.time() - self._last_at)}" if self._last_at else "no entry yet"
        lines = [Text(f"run {self._log.run_id}: {last}, {who}", style="bold")]
        if self._failure:
            lines.append(Text(f"the store could not be read, trying again: {self._failure}", style="yellow"))
        return Group(*lines, self._numbers)


def follow_run(log: RunLog, console: Console, *, seconds: float = SECONDS_BETWEEN_LOOKS) -> None:
    """Show the run until it has its steps, or until Ctrl-C. Raises `LogDamaged` where its log contradicts itself."""
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


def _rounds(steps: Sequence[Step], *, wanted: int) -> Text:
    """What `millrace train` says of a round's time, a line for each step, the newest last."""
    rounds = Text()
    if not steps:
        return rounds
    rounds.append(f"{LEGEND}\n", style="dim")
    rounds.append(f"{'step':>8} {'reward':>6} {HEADER.partition('tokens/s ')[2]}", style="bold")
    for step in steps:
        number = f"{step.claim.step}/{wanted}" if wanted else str(step.claim.step)
        reward = f"{step.metrics['reward']:.3f}" if "reward" in step.metrics else "-"  # nothing was trained
        rounds.append(f"\n{number:>8} {reward:>6} {step.metrics['round_seconds']:>5.1f}s {time_split(step.metrics)}")
    return rounds
