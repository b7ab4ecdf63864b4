"""A run keeps its configuration, and has one trainer at a time, even one that dies without a word."""

from __future__ import annotations

import multiprocessing
import platform
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from settings.errors import NotFound
from storage.log.entries import End, Pause, Session
from storage.log.runs import RunBusy, RunExists, create_run, open_run, outcome, remove_run, run_config, trainer_lock
from tests.builders import BASE, MemoryStore, a_log, a_shard, a_step, a_summary, local_store
from tests.processes import hold_trainer_lock

KEPT: dict[str, Any] = {"seed": 0, "train": {"scale": "std", "clip": 0.2}, "size": 8}
CONFIG = {**KEPT, "steps": 10, "store": "a", "tracking": "b"}
CLIP = {"kind": "clip", "clip_low": 0.2}
KINDS = {"train": {"advantage": {"kind": "grpo", "eps": 1e-4}, "loss": CLIP}}
GAE: dict[str, Any] = {"train": {"advantage": {"kind": "gae", "lam": 0.9}, "loss": {"kind": "clip"}}}
OLDER = {"seed": 7, "steps": 1, "train": {"scale": "none", "loss": "clip"}, "table": {"size": 1}}
"""Defaults of a version that knows more keys than the run's."""


@pytest.mark.parametrize(
    ("config", "again", "defaults", "differences"),
    [
        (CONFIG, CONFIG, {}, []),
        # Steps, store and tracking may change, the number of ranks, what bounds memory, and a rule that older runs lack
        (CONFIG, {**CONFIG, "rollout": {"on_out_of_room": "exclude"}}, {"rollout": {"on_out_of_room": "score"}}, []),
        (CONFIG, {**CONFIG, "steps": 99, "store": "elsewhere", "tracking": "later"}, {}, []),
        ({"train": {"num_ranks": 2, "clip": 0.2}}, {"train": {"num_ranks": 1, "clip": 0.2}}, {}, []),
        (
            {"train": {"tokens_per_microbatch": 4096}, "engine": {"vllm": {"dtype": "float32"}}},
            {
                "train": {"tokens_per_microbatch": 2048, "offload_optimizer": True},
                "engine": {"vllm": {"dtype": "float32", "gpu_memory_utilization": 0.4}, "share": "phases"},
            },
            {},
            [],
        ),
        (
            {"train": {"num_ranks": 2, "clip": 0.2}},
            {"train": {"num_ranks": 1, "clip": 0.3}},
            *({}, ["train.clip (0.2 → 0.3)"]),
        ),
        (
            CONFIG,
            {**KEPT, "seed": 1, "train": {"scale": "none", "clip": 0.2}, "added": True, "size": None},
            {},
            ["added (None → True)", "seed (0 → 1)", "size (8 → None)", "train.scale ('std' → 'none')"],
        ),
        # A key that is newer than the run differs only if it is not its default; what the run says counts first.
        (CONFIG, {**CONFIG, "train": {**CONFIG["train"], "loss": "clip"}, "table": {"size": 1}}, OLDER, []),
        (
            CONFIG,
            {**CONFIG, "seed": 7, "train": {**CONFIG["train"], "loss": "cispo"}, "table": {"size": 2}},
            OLDER,
            ["seed (0 → 7)", "table.size (1 → 2)", "train.loss ('clip' → 'cispo')"],
        ),
        # A table of another kind than the default takes nothing from it.
        (GAE, {"train": {**GAE["train"], "loss": CLIP}}, KINDS, []),
        (
            GAE,
            KINDS,
            KINDS,
            [
                "train.advantage.eps (None → 0.0001)",
                "train.advantage.kind ('gae' → 'grpo')",
                "train.advantage.lam (0.9 → None)",
            ],
        ),
    ],
)
def test_a_run_is_opened_again_unless_its_configuration_differs(
    config: dict[str, Any], again: dict[str, Any], defaults: dict[str, Any], differences: list[str]
):
    store = MemoryStore()
    log = create_run(store, "run", config, defaults=defaults)
    for entry in (BASE, a_shard("s", [a_summary(0)])):
        log.append(entry)
    log.append(a_step(log.refresh()))  # from the first step on the configuration is fixed
    frozen = run_config(log)
    create_run(store, "run-2", config)
    if differences:
        sentence = rf"differ: {re.escape(', '.join(differences))}\. .*run = 'run-3'"
        with pytest.raises(RunExists, match=sentence):
            create_run(store, "run", again, defaults=defaults)
    else:
        create_run(store, "run", again, defaults=defaults)
    assert run_config(open_run(store, "run")) == frozen, "it stays as it was"
    assert config is not CONFIG or frozen == KEPT


def test_a_run_without_a_step_begins_anew_with_other_settings():
    store = MemoryStore()
    log = create_run(store, "run", CONFIG)
    log.append(BASE)
    log.append(a_shard("s", [a_summary(0)]))
    again = create_run(store, "run", {**CONFIG, "seed": 1})
    assert run_config(again)["seed"] == 1 and again.state.entries == 0 and not again.state.policies


def test_a_run_is_removed_with_all_its_files(tmp_path: Path):
    store = local_store(tmp_path)
    for name in ("run", "other"):
        a_log(store, run_id=name).append(a_shard("s", [a_summary(0)]))
    remove_run(open_run(store, "run"))
    assert store.names("runs") == ["other"] and open_run(store, "other").state.shards
    for name in ("run", "", "other/", "../other"):
        with pytest.raises(NotFound, match=f"no run '{name}'.*runs there: other"):
            open_run(store, name)


@pytest.mark.parametrize("run_id", ["", "a/b", "../up", ".hidden", "with space", "x" * 101, "grün", "line\n"])
def test_an_id_that_is_no_file_name_everywhere_is_refused(run_id: str):
    with pytest.raises(ValueError, match="use letters, digits"):
        create_run(MemoryStore(), run_id, {})


def test_an_unknown_run_is_an_error_that_lists_the_known_ones():
    store = MemoryStore()
    with pytest.raises(FileNotFoundError, match="none yet"):
        open_run(store, "run")
    create_run(store, "first", {})
    create_run(store, "second", {})
    with pytest.raises(FileNotFoundError, match="no run 'third'.*first, second"):
        open_run(store, "third")


def test_a_second_trainer_is_refused_and_told_who_holds_the_run_until_that_one_is_killed(tmp_path: Path):
    log = a_log(local_store(tmp_path))
    held = tmp_path / "held"
    holder = multiprocessing.get_context("spawn").Process(target=hold_trainer_lock, args=(log.store.uri, "run", held))
    holder.start()
    deadline = time.monotonic() + 60
    while not (held.exists() and held.read_text()):
        assert time.monotonic() < deadline and holder.is_alive()
        time.sleep(0.02)
    with pytest.raises(RunBusy, match=f"'run' is being trained by process {holder.pid}"), trainer_lock(log):
        pass
    with trainer_lock(create_run(log.store, "other", {})):
        pass
    held.unlink()
    holder.join(timeout=60)
    assert holder.exitcode == -9
    for _ in range(2):  # killed, and left as it should be
        with trainer_lock(log):
            pass


_HERE = platform.node()


@pytest.mark.parametrize(
    ("session", "later", "age", "expected"),
    [
        *(({"host": host}, [End(session_id="a", outcome="failed")], 0, "failed") for host in (_HERE, "other")),
        (
            {"host": _HERE},
            [End(session_id="a", outcome="stopped"), End(session_id="a", outcome="failed")],
            0,
            "stopped",
        ),
        ({"host": _HERE}, [], 0, "vanished"),
        ({"host": "other"}, [], 0, "running"),  # its lock is on another machine
        ({"host": "other"}, [], 2 * 60 + 1, "vanished"),  # it would have reported a stall
        ({"host": _HERE, "steps": 0}, [], 0, "vanished"),
        ({}, [], 0, "vanished"),  # from before hosts were recorded: the lock of a local store counts
        ({"host": _HERE}, [Pause(reason="later")], 0, "running"),
        # A session that began since is at work, whatever the one before ended with, or says too late.
        ({}, [End(session_id="a", outcome="failed"), Session(id="b", code_version="", host="o")], 0, "running"),
        ({}, [Session(id="b", code_version="", host="o"), End(session_id="a", outcome="failed")], 0, "running"),
    ],
)
def test_how_a_run_ended_is_what_its_newest_session_said_or_what_its_lock_says(
    session: dict[str, Any],
    later: list[Any],
    age: float,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    log = create_run(local_store(tmp_path), "run", {"rollout": {"stall_timeout": 60}})
    assert outcome(log) == "running", "it has not begun"
    for body in (Session(**{"id": "a", "code_version": "", "steps": 2, **session}), BASE, *later):
        log.append(body)
    last_at = log.state.last_at
    monkeypatch.setattr(time, "time", lambda: last_at + age)
    assert outcome(open_run(log.store, "run")) == expected


@pytest.mark.parametrize("skew", [-5 * 3600.0, 0.0, 5 * 3600.0])
def test_a_clock_that_is_off_elsewhere_makes_no_run_dead_or_alive_and_no_time_negative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skew: float
):
    log = create_run(local_store(tmp_path), "run", {"rollout": {"stall_timeout": 60}})
    now = time.time()
    log.append(Session(id="a", code_version="", steps=2, host="other"))
    monkeypatch.setattr(time, "time", lambda: now + skew)
    log.append(BASE)
    assert log.state.last_at == now + skew and log.state.worked_seconds >= 0.0
    monkeypatch.setattr(time, "time", lambda: now)
    assert outcome(log) == "running"
    monkeypatch.setattr(time, "time", lambda: now + 130)
    assert outcome(log) == "vanished"


def test_the_lock_of_a_run_on_s3_is_in_the_state_folder_which_is_each_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("mine", "yours", "shared"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "shared"))
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "mine"))
    log = a_log(MemoryStore())
    log.append(Session(id="a", code_version="", steps=2, host=_HERE))
    with trainer_lock(log):
        [lock] = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert lock.parent == tmp_path / "mine" / "locks" and lock.name.endswith(".trainer.lock")
        assert outcome(log) == "running"
        monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "yours"))
        assert outcome(log) == "running", "it is trained with another state folder"
        with trainer_lock(log):
            pass  # the log refuses the second trainer's first step
        monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "mine"))
    assert outcome(log) == "vanished"
    lock.chmod(0o444)
    assert outcome(log) == "vanished"


def test_a_run_that_is_trained_or_has_its_steps_has_not_ended_too_early(tmp_path: Path):
    log = create_run(local_store(tmp_path), "run", {})
    for body in (Session(id="a", code_version="", steps=1, host=_HERE), BASE, a_shard("s", [a_summary(0)])):
        log.append(body)
    with trainer_lock(log):
        assert outcome(log) == "running"
    assert outcome(log) == "vanished"
    log.append(a_step(log.state))
    assert outcome(log) == "finished", "sessions of older versions do not say so"
