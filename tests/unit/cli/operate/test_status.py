"""`millrace status` says what a run's log says, with `--follow` as it grows; `millrace runs` what a store holds."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from cli.operate import status
from cli.operate.status import RunView, follow_run, run_status, status_table
from storage.log.claims import NOTHING
from storage.log.entries import Alias, End, LogEntry, Pause, Policy, Session, Step, TaskSet
from storage.log.run_log import RunLog
from storage.log.run_state import LogDamaged
from storage.log.runs import create_run, open_run, trainer_lock
from storage.objects.object_store import LocalStore, StoreError
from tests.builders import BASE, MemoryStore, a_log, a_shard, a_step, a_summary
from tests.unit.cli.builders import an_evaluation, printed, running

METRICS = {"round_seconds": 2.0, "generate_seconds": 1.0, "train_seconds": 0.5, "idle_seconds": 0.5}
METRICS |= {"peak_memory_bytes": 2.0**30}


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
def a_lock_of_its_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store in memory has its lock in the folder for temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(home))


def _train(log: RunLog, *, reward: float | None = 0.75, **metrics: float) -> Step:
    """Commit the next step; it has trained nothing if `reward` is None."""
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


def _look(log: RunLog) -> RunView:
    view = RunView(log)
    assert view.look()
    return view


def _shown(view: Any) -> str:
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(view)
    return console.export_text()


def _ctrl_c() -> None:
    raise KeyboardInterrupt


def _follow(log: RunLog, *events: Callable[[], object], terminal: bool = False, **options: Any) -> str:
    """What another process that follows it prints while `events` happen, one after each look; they must end it."""
    coming = iter(events)
    file = io.StringIO()
    console = Console(width=120, file=file, force_terminal=terminal, **options)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(status.time, "sleep", lambda _: next(coming)())
        follow_run(RunLog(log.store, log.run_id), console)
    assert next(coming, None) is None, "it ended before everything had happened"
    return file.getvalue()


def test_a_run_without_steps_has_nulls_and_an_unknown_one_lists_the_others(store: LocalStore, log: RunLog) -> None:
    numbers = json.loads(printed("status run --json"))
    assert (numbers["step"], numbers["weight_version"], numbers["accuracy_before"]) == (0, 0, None)
    log.append(Pause(reason="[/] me [red]"))
    assert "paused: [/] me [red]" in printed("status run", columns=120), "no markup"
    assert "runs there: run" in printed("status unknown", status=2)
    assert "--json prints the status once" in printed("status run --follow --json", status=2)
    view = _look(create_run(store, "empty", {}))
    assert "no entry yet" in _shown(view) and "step" in _shown(view)


def test_accuracies_are_those_of_the_first_and_last_version_that_has_a_score(log: RunLog) -> None:
    facts = {"num_tasks": 2, "n_samples": 2, "pass_at": {"1": 0.5, "2": 0.5}, "standard_error": 0.1}
    facts |= {"pass_all": {"1": 0.5, "2": 0.25}, "maj_at": {"2": 0.75}, "temperature": 0.0}
    facts |= {"tasks": TaskSet(count=9, sha256="t", ids_sha256="i")}
    for version, score, num_failed in ((5, 0.9, 1), (0, 0.4, 0), (6, 0.0, 4)):
        log.append(an_evaluation(version, score, num_failed=num_failed, **facts))
    others = ({"split": "train"}, {"num_tasks": 1}, {"n_samples": 4}, {"temperature": 1.0})  # are no before and after
    for other in others:
        log.append(an_evaluation(5, 0.1, **{**facts, "shard_id": str(other), **other}))
    asked = {"split": "test", "num_tasks": 2, "n_samples": 2, "temperature": 0.0}
    numbers = run_status(log, config={"evaluation": asked})
    assert (numbers["accuracy_before"], numbers["accuracy_after"], numbers["failed_evaluations"]) == (0.4, 0.9, 1)
    assert numbers["accuracy_standard_error"] == 0.1 and numbers["pass_at"] == {"1": 0.5, "2": 0.5}
    assert (numbers["pass_all"], numbers["maj_at"]) == ({"1": 0.5, "2": 0.25}, {"2": 0.75})
    shown = _shown(status_table(numbers))
    shown = " ".join(shown.split())
    assert "0.400 → 0.900 ± 0.100 on 2 tasks of test × 2 attempts, policies 0 and 5" in shown
    assert "pass@1 0.500, pass@2 0.500; 7 evaluations, 1 failed" in shown


def test_scores_of_a_run_that_was_never_asked_as_its_settings_say_are_those_asked_as_the_newest(log: RunLog) -> None:
    for version, num_tasks, score in ((0, 2, 0.1), (0, 3, 0.2), (1, 3, 0.6)):
        log.append(an_evaluation(version, score, num_tasks=num_tasks, n_samples=7, shard_id=f"{version}-{num_tasks}"))
    numbers = run_status(log, config={"evaluation": {"n_samples": 1}})
    assert (numbers["accuracy_before"], numbers["accuracy_after"], numbers["accuracy_tasks"]) == (0.2, 0.6, 3)


def test_wall_seconds_leave_out_the_time_between_sessions_and_what_others_append(store: LocalStore) -> None:
    log = create_run(store, "run", {})
    policy = Policy(version=0, path="x", weights_sha256="", parent=None)
    first, second = (Session(id=name, code_version="") for name in ("a", "b"))
    for number, (at, body) in enumerate(
        [
            *((100, first), (110, policy), (500, second), (505, replace(policy, version=1))),
            *((900, Alias(name="champion", version=1, checksum="")), (950, an_evaluation(1))),
        ]
    ):
        kind = {"evaluation": "eval"}.get(name := type(body).__name__.lower(), name)
        log.state.apply(LogEntry(number=number, kind=kind, written_at=at, body=body))
    assert run_status(log)["wall_seconds"] == 15.0


def test_the_age_of_the_newest_entry_and_who_trains_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    log = a_log()
    monkeypatch.setattr(status.time, "time", lambda: log.state.last_at + 3.2)
    view = _look(log)
    assert _shown(view).splitlines()[0] == "run run: last entry 3 s ago, this machine does not train it"
    with trainer_lock(log):
        assert view.look(), "it is trained now"
        assert "3 s ago, this machine trains it" in _shown(view)
    monkeypatch.setattr(status.time, "time", lambda: log.state.last_at + 7300)
    assert "last entry 2 h ago" in _shown(view)


def test_the_last_rounds_say_where_the_time_went_above_the_status() -> None:
    log = a_log()
    log.append(Session(id="second", code_version="c0de", steps=40))
    for size in range(6):
        _train(log, peak_memory_bytes=(6 - size) * 2.0**30)
    _train(log, reward=None)
    shown = _shown(_look(log))
    table = _shown(status_table(run_status(log)))
    assert "6.00 GiB" in table and table in shown
    lines = [line.rstrip() for line in shown.splitlines()]
    at = next(number for number, line in enumerate(lines) if line.split()[:1] == ["step"])
    phases = ["round", "gen", "rew", "com", "tra", "pub", "idle"]
    assert lines[at].split() == ["step", "reward", "held-out", "staleness", "tokens/s", *phases]
    rounds = [line.split() for line in lines[at + 1 : at + 6]]
    assert [line[0] for line in rounds] == ["3/40", "4/40", "5/40", "6/40", "7/40"]
    assert rounds[0] == ["3/40", "0.750", "-", "-", "-", "2.0s", "50", "0", "0", "25", "0", "25"]
    assert rounds[-1][:3] == ["7/40", "-", "-"] and "skip step" in lines[at + 5], "nothing was trained"
    header, row = ([match.end() for match in re.finditer(r"\S+", line)] for line in lines[at : at + 2])
    assert header == row, "columns stand under their names"


def test_each_look_reads_what_is_new_and_nothing_twice() -> None:
    store = MoodyStore()
    log = a_log(store)
    view = _look(open_run(store, "run"))
    assert not view.look()
    _train(log)
    assert view.look()
    _train(log)
    store.reads = 0
    assert view.look() and store.reads == 3, "a shard, a step, and what would come after them"
    store.reads = 0
    assert not view.look() and store.reads == 1


@pytest.mark.parametrize("failure", [OSError("no route to [/host]"), StoreError("s3://me:secret@host refused\x1b[2J")])
def test_a_store_that_fails_for_a_moment_is_said_and_outlived(failure: Exception) -> None:
    store = MoodyStore()
    log = a_log(store)
    view = _look(open_run(store, "run"))
    store.failure = failure
    assert view.look() and not view.look()
    shown = _shown(view)
    assert f"the store could not be read, trying again: {type(failure).__name__}" in shown
    assert "weights 00000000" in shown, "what was read before is still there"
    assert "secret" not in shown and "\x1b[2J" not in shown
    store.failure = None
    _train(log)
    assert view.look() and "could not be read" not in _shown(view) and "0.750" in _shown(view)


def test_a_log_that_contradicts_itself_ends_it() -> None:
    store = MoodyStore()
    log = a_log(store)
    damage = {log.key(f"log/{2:020d}.json"): b"{"}
    with pytest.raises(LogDamaged):
        _follow(log, lambda: store.files.update(damage))


def test_it_ends_with_the_last_step_of_the_newest_session() -> None:
    log = a_log()
    log.append(Session(id="second", code_version="c0de", steps=1))
    _train(log)
    assert "1/1" in _follow(log), "at once: its training has ended"
    log.append(Session(id="third", code_version="c0de", steps=3))
    assert "3/3" in _follow(log, lambda: _train(log), lambda: None, lambda: _train(log))


def test_elsewhere_than_on_a_terminal_each_change_is_one_status_without_control_characters() -> None:
    """The log does not say how many steps there will be: it is followed until Ctrl-C."""
    log = a_log()
    pause = Pause(reason="me")
    events = (lambda: None, lambda: _train(log), lambda: None, lambda: log.append(pause), _ctrl_c)
    dumb: dict[str, Any] = {"terminal": True, "_environ": {"TERM": "dumb"}}
    for options in ({}, dumb):
        log = a_log()
        shown = _follow(log, *events, **options)
        assert shown.count("submitted") == 3, "at first, after the step, after the pause"
        assert "paused: me" in shown and "\x1b[?25l" not in shown
        assert options or not set(shown) & {"\x1b", "\r"}


def test_a_terminal_shows_one_view_in_place() -> None:
    log = a_log()
    drawn = _follow(log, lambda: _train(log), _ctrl_c, terminal=True, height=60)
    assert "\x1b[?25l" in drawn and drawn.rstrip().endswith("\x1b[?25h"), "the cursor is hidden and comes back"
    assert "0.750" in drawn[drawn.rindex("run run") :], "what is left standing is the newest"
    drawn = _follow(log, _ctrl_c, terminal=True, height=12)
    first, last = drawn.split("run run")[1], drawn.split("run run")[-1]
    assert "0.750" in first and "settings" not in first and "settings" in last, "few lines show the newest"


def test_ctrl_c_leaves_with_status_0(log: RunLog) -> None:
    with running("-m", "cli.main", "status", "run", "-f") as process:
        assert "this machine does not train it" in process.stdout.readline()
        log.append(Session(id="later", code_version="c0de", steps=9))
        while "this machine does not train it" not in (line := process.stdout.readline()):
            assert line, "it ended"
        process.send_signal(2)
        rest, errors = process.communicate(timeout=30)
        assert process.returncode == 0 and not errors and "\x1b" not in rest


def test_the_command_ends_by_itself_when_a_run_has_its_steps(log: RunLog) -> None:
    log.append(Session(id="only", code_version="c0de", steps=1))
    _train(log)
    assert "1/1" in printed("status run --follow", columns=120)


def test_runs_have_steps_scores_champion_and_who_trains(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    create_run(store, "empty", {"workflow": "some.module:Thing"})
    log = create_run(store, "done", {"workflow": "examples.arithmetic:Arithmetic"})
    log.append(BASE)
    log.append(an_evaluation(0, 0.25))
    log.append(a_shard("s1", [a_summary(1)]))
    step = a_step(log.state, trained=["0.task1"])
    log.append(step)
    log.append(an_evaluation(1, 0.75))
    log.append(Alias(name="champion", version=1, checksum=step.policy.weights_sha256))
    written_at = log.entries[-1].written_at
    clock = SimpleNamespace(time=lambda: written_at)  # a test that stalls is no older
    monkeypatch.setattr("cli.operate.status.time", clock)
    with trainer_lock(log):
        first, second = json.loads(printed("runs --json"))
        lines = printed("runs").splitlines()
    assert first["run"] == "done" and second["run"] == "empty"
    assert first["is_training"] and not second["is_training"]
    assert (first["step"], first["accuracy_before"], first["accuracy_after"], first["champion"]) == (1, 0.25, 0.75, 1)
    assert second["step"] == 0 and second["accuracy_after"] is None and second["last_entry_at"] is None
    assert "done" in lines[1] and "training" in lines[1] and "0.25 → 0.75" in lines[1] and "0 s ago" in lines[1]
    assert "empty" in lines[2] and "training" not in lines[2]


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_a_narrow_terminal_has_a_line_for_each_run_with_its_steps_and_scores(store: LocalStore, columns: int) -> None:
    for name in ("a-run-of-a-name", "another"):
        log = create_run(store, name, {"workflow": "module:Thing"})
        log.append(BASE)
        log.append(an_evaluation(0, 0.25))
        log.append(a_shard("s1", [a_summary(1)]))
        log.append(a_step(log.state, trained=["0.task1"]))
        log.append(an_evaluation(1, 0.75))
    head, *lines = printed("runs", columns=columns).splitlines()
    assert len(lines) == 2 and head.split()[:1] == ["run"] and all("0.25 → 0.75" in line for line in lines)
    assert ("workflow" in head) == (columns == 80)


def test_an_empty_store_says_what_makes_a_run(store: LocalStore) -> None:
    assert "no runs in" in printed("runs") and "millrace train" in printed("runs")
    assert json.loads(printed("runs --json")) == []


def test_a_run_that_crashed_says_when_and_why_in_status_and_runs(log: RunLog) -> None:
    log.append(Session(id="s", code_version="", steps=5))
    assert "run ended without a word, after its last entry at 20" in printed("runs")
    log.append(End(session_id="s", outcome="failed", reason="KeyError: 'answr' at my/env.py:31"))
    shown = printed("status run", columns=160)
    assert re.search(r"^ended +crashed at 20.* ago: KeyError: .answr. at my/env.py:31 *$", shown, re.M)
    shown = printed("runs")
    assert re.search(r"^run .* crashed .*\n.*^run crashed at 20.* ago: KeyError: 'answr'", shown, re.M)
    assert json.loads(printed("runs --json"))[0]["ended"].startswith("crashed at 20")
    with trainer_lock(log):
        log.append(Session(id="t", code_version="", steps=5))
        assert run_status(log)["ended"] is None and "crashed" not in printed("runs"), "it is at work again"


def test_the_view_fits_a_terminal_of_24_lines_and_80_columns_and_reads_the_settings_once(store: LocalStore) -> None:
    reads: list[str] = []
    config = {"workflow": "my.environments:" + "Long" * 30, "model": "m" * 200, "steps": 40, "n_samples": 3}
    log = create_run(store, "run", config)
    log.append(BASE)
    log.append(Session(id="s", code_version="", steps=40))
    for _ in range(6):
        _train(log, staleness_mean=1.0, staleness_max=2.0, tokens_per_second=123456.0)
    log.append(an_evaluation(6))
    log.append(Pause(reason="why " * 50))
    with pytest.MonkeyPatch.context() as patched:
        get = LocalStore.get
        patched.setattr(LocalStore, "get", lambda self, key: reads.append(key) or get(self, key))
        view = RunView(open_run(store, "run"), is_drawn=True)
        for _ in range(2):
            view.look()
            _train(log)
    assert len([key for key in reads if key.endswith("run.json")]) == 2  # to open the run, and to show it
    console = Console(width=80, height=24, file=io.StringIO(), record=True)
    console.print(view)
    lines = console.export_text().splitlines()
    assert len(lines) <= 23 and max(map(len, lines)) <= 80
    assert "settings  n_samples = 3" in lines[-1] or "n_samples = 3" in "".join(lines)
    elsewhere = printed("status run", columns=None)
    assert "m" * 200 in elsewhere and "Long" * 30 in elsewhere, "outside of a terminal nothing is folded"


@pytest.mark.parametrize(
    ("rewards", "scores", "sentence"),
    [
        (
            [0.2, 0.8],
            [0.5, 0.25],
            "the reward rose (0.200 → 0.800, mean of the first and last of 2 steps), the score fell",
        ),
        ([0.8, 0.2], [0.25, 0.5], "the reward fell"),
        ([0.2, 0.8], [0.25, 0.5], ""),
        ([0.2], [0.5, 0.25], ""),
    ],
)
def test_reward_and_score_that_part_are_named(
    log: RunLog, rewards: list[float], scores: list[float], sentence: str
) -> None:
    for reward in rewards:
        _train(log, reward=reward)
    for version, score in enumerate(scores):
        log.append(an_evaluation(version, score, standard_error=0.2))
    said = status.parted(run_status(log))
    assert said == "" if not sentence else sentence in said and "within two standard errors" in said


def test_status_and_json_say_model_workflow_steps_champion_times_and_settings(store: LocalStore) -> None:
    config = {"workflow": "a:B", "model": "org/model", "train": {"loss": {"kind": "gspo", "clip_low": 0.5}}, "seed": 0}
    log = create_run(store, "run", config | {"max_staleness": 1.0})
    log.append(BASE)
    log.append(Session(id="s", code_version="", steps=1))
    _train(log)
    log.append(Alias(name="champion", version=1, checksum=""))
    numbers = json.loads(printed("status run --json"))
    assert (numbers["model"], numbers["workflow"], numbers["target_steps"]) == ("org/model", "a:B", 1)
    assert numbers["champion"] == 1 and numbers["begun_at"] <= numbers["ended_at"] <= numbers["last_entry_at"]
    changed = {"train.loss.kind": "gspo", "train.loss.clip_low": 0.5, "max_staleness": 1.0}
    assert numbers["settings"] == changed
    shown = printed("status run")
    assert "max_staleness = 1\n" in shown, "as it is written in a run file"
    assert "champion 1" in shown and "1 of 1" in shown and "train.loss.kind = gspo, train.loss.clip_low = 0.5" in shown


def test_how_far_the_run_follows_from_its_file_and_what_ended_that() -> None:
    log = a_log()
    assert run_status(log)["reproducible"] is None
    sentences = []
    for number, owes in enumerate((NOTHING, "group '0.task1': timeout", NOTHING)):
        log.append(a_shard(f"s{number}", [a_summary(number)]))
        log.append(replace(a_step(log.state, trained=[f"0.task{number}"]), owes=owes))
        sentences.append(run_status(log)["reproducible"])
    bits = "steps, where log-probabilities have the same bits"
    ended = f"the first 1 of 2 {bits}; step 2: group '0.task1': timeout"
    assert sentences == [f"all 1 of 1 {bits}", ended, ended.replace("of 2", "of 3")]
    assert run_status(log, {"reproducible": True})["reproducible"] == ended.replace("of 2", "of 3").replace(
        bits, "steps"
    )
    assert ended.replace("of 2", "of 3") in " ".join(_shown(status_table(run_status(log))).split())
