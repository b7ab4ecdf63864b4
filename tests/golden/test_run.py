"""A run that an earlier version recorded is the contract of the store's format.

`run/` is a store with one run of 16 steps, recorded with commit c16d22f: `train run.toml`, paused, resumed, continued,
evaluated, promoted, rescored and collected by `gc`; then two producers were killed, and a shard was damaged by hand and
quarantined. Every kind of log entry of that time is in it. Of its shards, policies and states only a few are kept.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from settings.run_file import RunConfig
from storage.log.claims import next_claim
from storage.log.entries import ENTRY_KINDS
from storage.log.run_log import RunLog
from storage.log.runs import open_run, run_config
from storage.objects.digests import verify_folder
from storage.objects.object_store import LocalStore
from storage.policies.policies import PolicyReader
from storage.shards.reward_sets import read_rewards
from storage.shards.shards import DamagedShard, read_shard
from tests.builders import MemoryStore, a_step

FOLDER = Path(__file__).parent / "run"
ENTRIES = sorted((FOLDER / "runs/golden/log").glob("*.json"))
TRAINED, PENDING = "000015-rollout-0-e19e7bca", "000016-vm-4aebd7-0-52ce3e1d"
DAMAGED = "000016-vm-4aebd7-0-a51f1b60"


@pytest.fixture
def log(tmp_path: Path) -> RunLog:
    shutil.copytree(FOLDER, tmp_path / "store")
    return open_run(LocalStore(tmp_path / "store"), "golden")


def test_it_folds_to_the_counters_that_were_recorded(log: RunLog) -> None:
    state = log.state
    assert state.counters() == {
        "submitted": 70,
        "trained": 32,
        "filtered": 36,
        "stale": 0,
        "failed": 0,
        "cancelled": 0,
        "pending": 2,
        "quarantined": 1,
    }
    assert (state.entries, state.step, state.newest_version, state.num_trajectories) == (170, 16, 16, 144)
    assert [session.steps for session in state.sessions] == [8, 16, 20]
    assert {name: alias.version for name, alias in state.aliases.items()} == {"rollout": 16, "champion": 16}
    assert [(evaluation.version, evaluation.score) for evaluation in state.evaluations] == [
        (0, 0.0),
        (8, 0.5),
        (16, 0.5),
        (12, 1.0),
    ]
    assert list(state.producers) == ["vm-4aebd7-0", "vm-515cbf-0"] and state.num_leases == 51
    assert state.leased == {72: "vm-4aebd7-0", 73: "vm-4aebd7-0"} and state.free_positions(2) == [68, 69]
    assert state.retries == {68: 1, 69: 1} and state.positions == set(range(72)) - {68, 69}
    assert list(state.pending) == ["0.25+49", "0.77+31"] and state.pending_accepted == 2
    assert state.groups["0.25+49"].mean_reward == 0.5 and state.step_of["0.77+54"] == 16
    assert state.registrations[9].registry_version == "10" and state.policies[12].parent == 11
    assert len(state.retired_shards) == 26 and len(state.retired_policies) == 14 and not state.retired_states
    assert len(state.rescored["parity"].files) == 14 and state.paused == ""
    assert state.worked_seconds == pytest.approx(63.945, abs=0.001), "what other commands appended is no work"


def test_its_segments_and_its_entries_fold_to_the_same(log: RunLog) -> None:
    log.store.delete([file.key for file in log.store.walk(log.key("log/segments"))])
    one_by_one = open_run(log.store, "golden")
    assert one_by_one.state == log.state and list(one_by_one.entries) == list(log.entries)
    assert {entry.kind for entry in log.entries} == ENTRY_KINDS.keys() - {"end"}, "which later versions write"


def test_its_files_are_read(log: RunLog, tmp_path: Path) -> None:
    shards = log.state.shards
    assert read_shard(log, shards[TRAINED])["group_id"].to_pylist() == 2 * ["0.77+54"] + 2 * ["0.30+0"]
    assert set(read_shard(log, shards[PENDING])["weight_versions"].combine_chunks().flatten().to_pylist()) == {-1, 16}
    with pytest.raises(DamagedShard, match="sha256"):
        read_shard(log, shards[DAMAGED])
    assert len(read_rewards(log, shards[TRAINED], "parity")) == 4
    live = log.state.policies[16]
    assert verify_folder(PolicyReader(log, tmp_path / "cache").fetch(live)) == live.weights_sha256


def test_it_goes_on(log: RunLog) -> None:
    config = RunConfig.model_validate(run_config(log))
    claim = next_claim(log.state, config)
    assert claim is not None and [group.group_id for group in claim.trained] == ["0.25+49", "0.77+31"]
    state = log.append(a_step(log.state, claim))
    assert (state.entries, state.step, state.counters()["trained"]) == (171, 17, 34)
    assert open_run(log.store, "golden").state == state


def test_todays_writer_writes_the_same_bytes(log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(entry.written_at for entry in log.entries)
    monkeypatch.setattr("storage.log.run_log.time", SimpleNamespace(time=lambda: next(clock)))
    again = RunLog(MemoryStore(), "golden")
    for entry in log.entries:
        again.append(entry.body)
    for file in ENTRIES:
        assert again.store.get(f"runs/golden/log/{file.name}") == file.read_bytes(), json.loads(file.read_bytes())
    segment = "runs/golden/log/segments/00000000000000000000.100.arrow"
    written, recorded = (pa.ipc.open_file(store.get(segment)[32:]).read_all() for store in (again.store, log.store))
    assert written.equals(recorded, check_metadata=True)
