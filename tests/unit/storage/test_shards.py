"""A shard is committed once, and read only as it was committed."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from storage.log_entries import Shard
from storage.run_log import RunLog
from storage.run_state import Conflict
from storage.shard_codec import BadShard
from storage.shards import DamagedShard, commit_shard, read_shard
from tests.builders import SAMPLING, a_group, a_log, a_summary, a_trajectory, local_store, provenance


def _commit(log: RunLog, shard_id: str = "s0", *, positions: tuple[int, ...] = (0, 1), is_eval: bool = False) -> Shard:
    groups = [a_group(position, rewards=[1.0, 0.0, None]) for position in positions]
    return commit_shard(
        log,
        groups,
        provenance=provenance(shard_id),
        sampling=SAMPLING,
        is_eval=is_eval,
        seconds={"generate": 2.0},
    )


def test_a_committed_shard_is_in_the_log_and_reads_back():
    log = a_log()
    shard = _commit(log)
    assert log.state.shards == {"s0": shard}
    assert shard.groups == [a_summary(0, rewards=[1, 0, None]), a_summary(1, rewards=[1, 0, None])]
    assert (shard.num_rows, shard.num_tokens) == (4, 8)
    assert shard.num_bytes == len(log.store.get("runs/run/shards/s0.arrow"))
    assert (shard.head_version, shard.tail_version, shard.is_eval) == (0, 0, False)
    assert shard.seconds["generate"] == 2.0 and shard.seconds["commit"] > 0
    table = read_shard(log, shard)
    assert table["group_id"].to_pylist() == ["0.task0"] * 2 + ["0.task1"] * 2


def test_committing_twice_is_committing_once():
    log = a_log()
    shard = _commit(log)
    entries = log.state.entries
    _commit(log)
    _commit(RunLog(log.store, "run"))  # a second process that retries the first one's work
    assert log.refresh().entries == entries
    assert log.state.shards == {"s0": shard}
    assert read_shard(log, shard).num_rows == 4


def test_prompts_somebody_else_committed_are_a_conflict_and_the_log_is_untouched():
    log = a_log()
    _commit(log)
    entries = log.state.entries
    with pytest.raises(Conflict, match=r"s1: prompt positions \[1\]"):
        _commit(log, "s1", positions=(1, 2))
    assert log.refresh().entries == entries and list(log.state.shards) == ["s0"]


def test_a_bad_group_is_refused_before_anything_is_written():
    log = a_log()
    twice = a_group(0, trajectories=[a_trajectory(), a_trajectory()])
    with pytest.raises(BadShard):
        commit_shard(log, [twice], provenance=provenance(), sampling=SAMPLING)
    assert not log.store.exists("runs/run/shards/s0.arrow")


def test_a_shard_of_nothing_but_failures_is_committed_and_reads_as_no_rows():
    log = a_log()
    failures = a_group(0, rewards=[None, None], accepted=False)
    shard = commit_shard(log, [failures], provenance=provenance(), sampling=SAMPLING)
    assert (shard.num_rows, shard.head_version, shard.tail_version) == (0, -1, -1)
    assert read_shard(log, shard).num_rows == 0
    assert log.state.counters()["pending"] == 1


def test_a_missing_file_is_damage():
    log = a_log()
    shard = _commit(log)
    del log.store.files["runs/run/shards/s0.arrow"]  # type: ignore[attr-defined]
    with pytest.raises(DamagedShard, match="shard s0: the file is missing") as caught:
        read_shard(log, shard)
    assert (caught.value.shard_id, caught.value.reason) == ("s0", "the file is missing")


def test_a_file_that_was_cut_off_is_damage(tmp_path: Path):
    log = a_log(local_store(tmp_path))
    shard = _commit(log)
    file = tmp_path / "store" / "runs" / "run" / "shards" / "s0.arrow"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DamagedShard, match=rf"s0: its sha256 differs.*\(100 of {shard.num_bytes} bytes\)"):
        read_shard(log, shard)


@pytest.mark.parametrize("place", [0, 0.3, 0.6, -1])
def test_one_flipped_bit_is_damage(place: float):
    log = a_log()
    shard = _commit(log)
    data = bytearray(log.store.get("runs/run/shards/s0.arrow"))
    data[int(place * len(data)) if place >= 0 else -1] ^= 1
    log.store.put("runs/run/shards/s0.arrow", bytes(data))
    with pytest.raises(DamagedShard, match="shard s0: its sha256 differs"):
        read_shard(log, shard)


def test_a_shard_of_another_run_is_damage():
    other = a_log(run_id="other")
    shard = commit_shard(other, [a_group(0)], provenance=provenance("s0", run_id="someone-elses"), sampling=SAMPLING)
    with pytest.raises(DamagedShard, match="it belongs to run 'someone-elses'"):
        read_shard(other, shard)


def test_damage_crosses_processes_with_its_shard_id():
    """Ray sends exceptions between processes this way."""
    error = pickle.loads(pickle.dumps(DamagedShard("s0", "cut off")))
    assert (error.shard_id, error.reason, str(error)) == ("s0", "cut off", "shard s0: cut off")
