"""`millrace status --follow` shows a run as its log grows, whoever trains it, and outlives a store that fails."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cli.main import app
from cli.operate import status
from cli.operate.status import RunView, follow_run, run_status, status_table
from storage.log.entries import Pause, Session, Step
from storage.log.run_log import RunLog
from storage.log.run_state import LogDamaged
from storage.log.runs import create_run, open_run, trainer_lock
from storage.objects.object_store import LocalStore, StoreError
from tests.builders import MemoryStore, a_log, a_shard, a_step, a_summary

METRICS = {
    "peak_memory_bytes": 2.0**30,
    "round_seconds": 2.0,
    "generate_seconds": 1.0,
    "train_seconds": 0.5,
    "idle_seconds": 0.5,
}


class MoodyStore(MemoryStore):
    """Raises `failure` while there is one, and counts the keys that were read."""

    failure: Exception | None = None
    reads = 0

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        if self.failure is not None:
            raise self.failure
        self.reads += len(keys)
        return super().get_many(keys)


@pytest.fixture(autouse=True)
def a_lock_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store in memory has its lock in the folder for temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def _train(log: RunLog, *, reward: float | None = 0.75, **metrics: float) -> Step:
    """Commit the next step; it has trained nothing where `reward` is null."""
    number = log.refresh().step + 1
    if reward is None:
        step = a_step(log.state)
        step = replace(step, claim=replace(step.claim, fallback="skip_step"))
    else:
        log.append(a_shard(f"s{number}", [a_summary(number)]))
        step = a_step(log.state, trained=[f"0.task{number}"])
        metrics = {"reward": reward, **metrics}
    step = replace(step, metrics={**METRICS, **metrics})
    log.append(step)
    return step


def _shown(view: RunView) -> str:
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(view)
    return console.export_text()


def _ctrl_c() -> None:
    raise KeyboardInterrupt


def _follow(log: RunLog, *events: Callable[[], object], terminal: bool = False, **options: Any) -> str:
    """What following prints while `events` happen, one after each look. It must have ended when there are no more."""
    coming = iter(events)
    file = io.StringIO()
    console = Console(width=120, file=file, force_terminal=terminal, **options)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(status.time, "sleep", lambda _: next(coming)())
        follow_run(log, console)
    assert next(coming, None) is None, "it ended before everything had happened"
    return file.getvalue()


def _read_anew(log: RunLog) -> RunLog:
    """The same run as another process sees it."""
    return RunLog(log.store, log.run_id)


def test_the_age_of_the_newest_entry_and_who_trains_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    log = a_log()
    monkeypatch.setattr(status.time, "time", lambda: log.state.last_at + 3.2)
    view = RunView(log)
    view.look()
    assert _shown(view).splitlines()[0] == "run run: last entry 3 s ago, nobody on this machine trains it"
    with trainer_lock(log):
        assert view.look(), "somebody trains it now"
        assert "3 s ago, a process of this machine trains it" in _shown(view)
    monkeypatch.setattr(status.time, "time", lambda: log.state.last_at + 7300)
    assert "last entry 2 h ago" in _shown(view)


def test_an_empty_log_has_no_entry_yet(tmp_path: Path) -> None:
    view = RunView(create_run(LocalStore(tmp_path), "run", {}))
    view.look()
    assert "no entry yet" in _shown(view) and "step" in _shown(view)


def test_the_last_rounds_say_where_the_time_went() -> None:
    log = a_log()
    log.append(Session(id="second", code_version="c0de", steps=40))
    for _ in range(6):
        _train(log)
    _train(log, reward=None)
    view = RunView(log)
    view.look()
    lines = [line.split() for line in _shown(view).splitlines()]
    rounds = [line for line in lines if line and line[0].endswith("/40")]
    assert [line[0] for line in rounds] == ["3/40", "4/40", "5/40", "6/40", "7/40"]
    assert rounds[0] == ["3/40", "0.750", "2.0s", "50%", "0%", "0%", "25%", "0%", "25%"]
    assert rounds[-1][:3] == ["7/40", "-", "2.0s"], "nothing was trained"
    header = lines[lines.index(rounds[0]) - 1]
    assert header == ["step", "reward", "round", "gen", "rew", "com", "tra", "pub", "idle"]


def test_columns_stand_under_their_names() -> None:
    log = a_log()
    _train(log)
    view = RunView(log)
    view.look()
    shown = _shown(view).splitlines()
    at = next(number for number, line in enumerate(shown) if line.split()[:1] == ["step"])
    header, row = shown[at : at + 2]
    ends = [match.end() for match in re.finditer(r"\S+", header)]
    assert [match.end() for match in re.finditer(r"\S+", row)] == ends


def test_it_shows_all_that_status_shows() -> None:
    log = a_log()
    _train(log, peak_memory_bytes=3.5 * 2**30)
    _train(log)
    view = RunView(log)
    view.look()
    plain = Console(width=120, file=io.StringIO(), record=True)
    plain.print(status_table(run_status(log)))
    table = plain.export_text()
    assert "3.50 GiB" in table and table in _shown(view)


def test_each_look_reads_what_is_new_and_nothing_twice() -> None:
    store = MoodyStore()
    log = a_log(store)
    view = RunView(open_run(store, "run"))
    assert view.look() and not view.look()
    _train(log, peak_memory_bytes=5 * 2.0**30)
    assert view.look()
    _train(log)
    store.reads = 0
    assert view.look() and store.reads == 3, "a shard, a step, and what would come after them"
    assert "5.00 GiB" in _shown(view), "the most of all steps"
    store.reads = 0
    assert not view.look() and store.reads == 1


@pytest.mark.parametrize("failure", [OSError("no route to [/host]"), StoreError("s3://me:secret@host refused\x1b[2J")])
def test_a_store_that_fails_for_a_moment_is_said_and_outlived(failure: Exception) -> None:
    store = MoodyStore()
    log = a_log(store)
    view = RunView(open_run(store, "run"))
    assert view.look()
    store.failure = failure
    assert view.look() and not view.look()
    shown = _shown(view)
    assert f"the store could not be read, trying again: {type(failure).__name__}" in shown
    assert "weight version" in shown, "what was read before is still there"
    assert "secret" not in shown and "\x1b[2J" not in shown
    store.failure = None
    _train(log)
    assert view.look() and "could not be read" not in _shown(view) and "0.750" in _shown(view)


def test_a_log_that_contradicts_itself_ends_it() -> None:
    store = MoodyStore()
    log = a_log(store)
    damage = {log.key(f"log/{2:020d}.json"): b"{"}
    with pytest.raises(LogDamaged):
        _follow(_read_anew(log), lambda: store.files.update(damage))


def test_it_ends_with_the_last_step_of_the_newest_session() -> None:
    log = a_log()
    log.append(Session(id="second", code_version="c0de", steps=1))
    _train(log)
    assert "1/1" in _follow(_read_anew(log)), "at once: nobody needs to train it any more"
    log.append(Session(id="third", code_version="c0de", steps=3))
    assert "3/3" in _follow(_read_anew(log), lambda: _train(log), lambda: None, lambda: _train(log))


def test_a_log_that_does_not_say_how_many_steps_is_followed_until_ctrl_c() -> None:
    log = a_log()
    _train(log)
    assert "weight version" in _follow(_read_anew(log), lambda: None, _ctrl_c)


def test_elsewhere_than_on_a_terminal_each_change_is_one_status_without_control_characters() -> None:
    log = a_log()
    pause = Pause(reason="me")
    printed = _follow(
        _read_anew(log), lambda: None, lambda: _train(log), lambda: None, lambda: log.append(pause), _ctrl_c
    )
    assert printed.count("prompt groups: submitted") == 3, "at first, after the step, after the pause"
    assert not set(printed) & {"\x1b", "\r"} and "paused                   me" in printed


def test_a_terminal_shows_one_view_in_place() -> None:
    log = a_log()
    drawn = _follow(_read_anew(log), lambda: _train(log), _ctrl_c, terminal=True, height=60)
    assert "\x1b[?25l" in drawn and drawn.rstrip().endswith("\x1b[?25h"), "the cursor is hidden and comes back"
    assert "0.750" in drawn[drawn.rindex("run run") :], "what is left standing is the newest"


def test_a_terminal_that_cannot_move_its_cursor_gets_a_status_per_change() -> None:
    log = a_log()
    options: dict[str, Any] = {"terminal": True, "_environ": {"TERM": "dumb"}}
    printed = _follow(_read_anew(log), lambda: None, lambda: _train(log), _ctrl_c, **options)
    assert printed.count("prompt groups: submitted") == 2 and "\x1b[?25l" not in printed


def test_a_terminal_with_few_lines_shows_the_newest_and_keeps_all_of_it_at_the_end() -> None:
    log = a_log()
    _train(log)
    drawn = _follow(_read_anew(log), _ctrl_c, terminal=True, height=12)
    first, last = drawn.split("run run")[1], drawn.split("run run")[-1]
    assert "0.750" in first and "submitted =" not in first and "submitted =" in last


def test_ctrl_c_leaves_with_status_0(log: RunLog, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.main", "status", "run", "-f"],
        env={**os.environ, "MILLRACE_HOME": str(tmp_path), "COLUMNS": "120", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        assert "nobody on this machine trains it" in process.stdout.readline()
        log.append(Session(id="later", code_version="c0de", steps=9))
        while "nobody on this machine trains it" not in (line := process.stdout.readline()):
            assert line, "it ended"
        process.send_signal(2)
        rest, errors = process.communicate(timeout=30)
        assert process.returncode == 0 and not errors and "\x1b" not in rest
    finally:
        process.kill()
        process.wait()


def test_the_command_ends_by_itself_when_a_run_has_its_steps(log: RunLog) -> None:
    log.append(Session(id="only", code_version="c0de", steps=1))
    _train(log)
    result = CliRunner().invoke(app, ["status", "run", "--follow"], env={"COLUMNS": "120"})
    assert result.exit_code == 0 and "1/1" in result.output


def test_json_is_not_followed(log: RunLog) -> None:
    result = CliRunner().invoke(app, ["status", "run", "--follow", "--json"])
    assert result.exit_code == 2 and "--json prints the status once" in result.output


def test_a_reason_that_looks_like_markup_is_shown_as_it_is(log: RunLog) -> None:
    log.append(Pause(reason="[/] me [red]"))
    result = CliRunner().invoke(app, ["status", "run"], env={"COLUMNS": "120"})
    assert result.exit_code == 0 and "[/] me [red]" in result.output
