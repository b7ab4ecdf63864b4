"""A run keeps its configuration, and has one trainer at a time, even one that dies without a word."""

from __future__ import annotations

import multiprocessing
import re
import time
from pathlib import Path
from typing import Any

import pytest

from settings.errors import NotFound
from storage.log.entries import End, Session
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
        # Steps, store and tracking may change, and the number of ranks.
        (CONFIG, {**CONFIG, "steps": 99, "store": "elsewhere", "tracking": "later"}, {}, []),
        ({"train": {"num_ranks": 2, "clip": 0.2}}, {"train": {"num_ranks": 1, "clip": 0.2}}, {}, []),
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
    with pytest.raises(NotFound, match="no run 'run'.*runs there: other"):
        open_run(store, "run")


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


def test_how_a_run_ended_is_what_its_newest_session_said_or_what_its_lock_says(tmp_path: Path):
    log = create_run(local_store(tmp_path), "run", CONFIG)
    assert outcome(log) == "running", "it has not begun"
    log.append(Session(id="first", code_version="", steps=1))
    with trainer_lock(log):
        assert outcome(log) == "running"
    assert outcome(log) == "crashed"
    assert outcome(a_log()) == "running", "the lock of this machine tells nothing of another's session"
    for ended in ("stopped", "failed", "finished"):
        log.append(Session(id=f"which {ended}", code_version="", steps=1))
        log.append(End(session_id="first", outcome="finished"))  # from a process that came too late
        assert log.state.ended is None
        log.append(End(session_id=f"which {ended}", outcome=ended, reason="so"))
        log.append(End(session_id=f"which {ended}", outcome="failed"))
        assert (outcome(log), log.state.ended and log.state.ended.reason) == (ended, "so")
    log.append(Session(id="older", code_version="", steps=1))
    for body in (BASE, a_shard("s0", [a_summary(0)])):
        log.append(body)
    log.append(a_step(log.state, trained=["0.task0"]))
    assert outcome(log) == "finished", "sessions of older versions do not say so"
