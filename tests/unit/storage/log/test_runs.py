"""A run keeps its configuration, and has one trainer at a time, even one that dies without a word."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest

from settings.errors import NotFound
from storage.log.runs import RunBusy, RunExists, create_run, open_run, remove_run, run_config, trainer_lock
from tests.builders import BASE, MemoryStore, a_log, a_shard, a_step, a_summary, local_store
from tests.processes import hold_trainer_lock, run_together, try_trainer_lock

CONFIG = {"seed": 0, "steps": 10, "store": "a", "tracking": "b", "train": {"scale": "std", "clip": 0.2}, "size": 8}


def _begun(store: MemoryStore, config: dict[str, Any], **options: Any) -> None:
    """A run with this configuration that has taken a step: from then on the configuration is fixed."""
    log = create_run(store, "run", config, **options)
    log.append(BASE)
    log.append(a_shard("s", [a_summary(0)]))
    log.append(a_step(log.refresh()))


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


def test_the_same_configuration_opens_the_run_again():
    store = MemoryStore()
    create_run(store, "run", CONFIG)
    again = create_run(store, "run", CONFIG)
    assert run_config(again) == {"seed": 0, "train": {"scale": "std", "clip": 0.2}, "size": 8}


def test_steps_store_and_tracking_may_change():
    store = MemoryStore()
    create_run(store, "run", CONFIG)
    create_run(store, "run", {**CONFIG, "steps": 99, "store": "elsewhere", "tracking": "later"})


def test_a_run_may_go_on_at_another_number_of_ranks_and_remembers_the_first():
    store = MemoryStore()
    _begun(store, {**CONFIG, "train": {"num_ranks": 2, "clip": 0.2}})
    again = create_run(store, "run", {**CONFIG, "train": {"num_ranks": 1, "clip": 0.2}})
    assert run_config(again)["train"]["num_ranks"] == 2
    with pytest.raises(RunExists, match="train.clip"):
        create_run(store, "run", {**CONFIG, "train": {"num_ranks": 2, "clip": 0.3}})


def test_another_configuration_is_refused_with_the_keys_that_differ_and_a_free_id():
    store = MemoryStore()
    _begun(store, CONFIG)
    create_run(store, "run-2", CONFIG)
    changed = {**CONFIG, "seed": 1, "train": {"scale": "none", "clip": 0.2}, "added": True}
    del changed["size"]
    with pytest.raises(RunExists) as caught:
        create_run(store, "run", changed)
    message = str(caught.value)
    assert "seed (0 → 1)" in message and "train.scale ('std' → 'none')" in message
    assert "added (None → True)" in message and "size (8 → None)" in message
    assert "clip" not in message
    assert "'run-3'" in message
    assert run_config(open_run(store, "run"))["seed"] == 0


def test_a_table_of_another_kind_than_the_default_takes_nothing_from_it():
    store = MemoryStore()
    config = {"train": {"advantage": {"kind": "gae", "lam": 0.9}, "loss": {"kind": "clip"}}}
    defaults = {"train": {"advantage": {"kind": "grpo", "eps": 1e-4}, "loss": {"kind": "clip", "clip_low": 0.2}}}
    _begun(store, config, defaults=defaults)
    with_default = {"train": {**config["train"], "loss": {"kind": "clip", "clip_low": 0.2}}}
    create_run(store, "run", with_default, defaults=defaults)
    with pytest.raises(RunExists, match=r"train.advantage.kind \('gae' → 'grpo'\)"):
        create_run(store, "run", defaults, defaults=defaults)


def test_a_key_that_is_newer_than_the_run_differs_only_where_it_is_not_its_default():
    store = MemoryStore()
    _begun(store, CONFIG)
    defaults = {"seed": 7, "steps": 1, "train": {"scale": "none", "loss": "clip"}, "table": {"size": 1}}
    newer = {**CONFIG, "train": {**CONFIG["train"], "loss": "clip"}, "table": {"size": 1}}
    again = create_run(store, "run", newer, defaults=defaults)
    assert run_config(again) == {"seed": 0, "train": {"scale": "std", "clip": 0.2}, "size": 8}, "it stays as it was"
    changed = {**newer, "seed": 7, "train": {**newer["train"], "loss": "cispo"}, "table": {"size": 2}}
    with pytest.raises(RunExists) as caught:
        create_run(store, "run", changed, defaults=defaults)
    message = str(caught.value)
    assert "train.loss ('clip' → 'cispo')" in message and "table.size (1 → 2)" in message
    assert "seed (0 → 7)" in message, "what the run says counts, not the default"
    assert "scale" not in message and "steps" not in message


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


def test_opening_folds_the_log():
    log = a_log()
    assert open_run(log.store, "run").state == log.state


def test_a_second_trainer_is_refused_and_told_who_holds_the_run(tmp_path: Path):
    log = a_log(local_store(tmp_path))
    with trainer_lock(log):
        [refusal] = run_together(try_trainer_lock, 1, log.store.uri, "run")
        assert f"run 'run' is being trained by process {os.getpid()}" in refusal
        with pytest.raises(RunBusy), trainer_lock(log):
            pass
        create_run(log.store, "other", {})
        with trainer_lock(open_run(log.store, "other")):
            pass
    assert run_together(try_trainer_lock, 1, log.store.uri, "run") == [""]


def test_a_trainer_that_is_killed_frees_the_run(tmp_path: Path):
    log = a_log(local_store(tmp_path))
    held = tmp_path / "held"
    holder = multiprocessing.get_context("spawn").Process(target=hold_trainer_lock, args=(log.store.uri, "run", held))
    holder.start()
    deadline = time.monotonic() + 60
    while not (held.exists() and held.read_text()):
        assert time.monotonic() < deadline and holder.is_alive()
        time.sleep(0.02)
    with pytest.raises(RunBusy, match=f"process {holder.pid}"), trainer_lock(log):
        pass
    held.unlink()
    holder.join(timeout=60)
    assert holder.exitcode == -9
    with trainer_lock(log):
        pass


def test_without_a_local_store_the_lock_is_a_file_of_this_machine():
    log = a_log()
    with trainer_lock(log), pytest.raises(RunBusy), trainer_lock(open_run(log.store, "run")):
        pass
