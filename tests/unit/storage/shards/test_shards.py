"""A shard is committed once, and read only as it was committed."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from storage.log.entries import Quarantine, Retire, Shard
from storage.log.run_log import RunLog
from storage.log.run_state import Conflict
from storage.objects.digests import sha256_of
from storage.shards.codec import shard_table
from storage.shards.schema import BadShard, NewerSchema
from storage.shards.shards import DamagedShard, commit_shard, read_shard
from tests.builders import SAMPLING, a_group, a_log, a_summary, a_trajectory, provenance
from tests.shard_files import file_with


def _commit(log: RunLog, shard_id: str = "s0", *, positions: tuple[int, ...] = (0, 1), is_eval: bool = False) -> Shard:
    groups = [a_group(position, rewards=[1.0, 0.0, None]) for position in positions]
    facts: dict[str, Any] = {"sampling": SAMPLING, "is_eval": is_eval, "seconds": {"generate": 2.0}}
    return commit_shard(log, groups, provenance=provenance(shard_id), **facts)


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
    nothing = a_group(2, rewards=[None], accepted=False)
    shard = commit_shard(log, [nothing], provenance=provenance("s1"), sampling=SAMPLING)
    assert (shard.num_rows, shard.head_version, shard.tail_version) == (0, -1, -1)
    assert read_shard(log, shard).num_rows == 0 and log.state.counters()["pending"] == 3


def test_committing_twice_is_committing_once_whatever_the_groups_are():
    """The file too: overwritten, it would no longer have the digest in the log."""
    log = a_log()
    shard = _commit(log)
    entries, data = log.state.entries, log.store.get(log.shard_key("s0"))
    _commit(log)
    _commit(RunLog(log.store, "run"))  # a second process that retries the first one's work
    assert _commit(RunLog(log.store, "run"), positions=(2, 3)) == shard
    assert log.refresh().entries == entries and log.state.shards == {"s0": shard}
    assert log.store.get(log.shard_key("s0")) == data and read_shard(log, shard).num_rows == 4


def test_what_cannot_be_committed_leaves_the_log_untouched():
    log = a_log()
    _commit(log)
    entries = log.state.entries
    with pytest.raises(Conflict, match=r"s1: prompt positions \[1\]"):
        _commit(log, "s1", positions=(1, 2))
    twice = a_group(5, trajectories=[a_trajectory(), a_trajectory()])
    with pytest.raises(BadShard):
        commit_shard(log, [twice], provenance=provenance("s2"), sampling=SAMPLING)
    assert log.refresh().entries == entries and not log.store.exists(log.shard_key("s2"))


def _commit_file(table: pa.Table, **metadata: str) -> tuple[RunLog, Shard]:
    """A shard of some other writer: a file of its making, and a log entry that names it with its true digest."""
    log = a_log()
    data = file_with(table, **metadata)
    log.store.put("runs/run/shards/s0.arrow", data)
    shard = replace(_commit(a_log()), sha256=sha256_of(data), num_bytes=len(data), groups=[a_summary(0)])
    log.append(shard)
    return log, shard


_TABLE = shard_table([a_group(0)], provenance=provenance("s0"), sampling=SAMPLING)
_BROKEN = _TABLE.drop_columns(["head_version"]).append_column("head_version", pa.array([9, 9], pa.int32()))


@pytest.mark.parametrize(
    ("table", "metadata", "error", "sentence"),
    [
        (_TABLE, {"run_id": "other"}, DamagedShard, "it belongs to run 'other'"),
        (_TABLE.drop_columns(["logprobs"]), {}, DamagedShard, r"\['logprobs'\] are missing \(memory:/.*/s0.arrow\)"),
        (_BROKEN, {}, DamagedShard, "shard s0: head_version is above tail_version"),
        (_TABLE, {"schema_version": "2"}, NewerSchema, r"upgrade this one to read it \(memory:/.*/s0.arrow\)"),
    ],
    ids=["another run's", "no schema", "a broken rule", "of a newer Millrace: not damaged"],
)
def test_a_file_that_is_no_shard_of_the_run_is_refused_although_the_log_vouches_for_its_bytes(
    table: pa.Table, metadata: dict[str, str], error: type[Exception], sentence: str
):
    log, shard = _commit_file(table, **metadata)
    with pytest.raises(error, match=sentence):
        read_shard(log, shard)


def test_a_retired_shard_says_that_retention_removed_it():
    log = a_log()
    shard = _commit(log, is_eval=True)
    log.append(Retire(shard_ids=["s0"], policy_versions=[], state_paths=[], reason="older than a day"))
    with pytest.raises(DamagedShard, match="shard s0: retention removed it"):
        read_shard(log, shard)


def _commit_with(log: RunLog, shard_id: str, position: int, tokenizer_sha256: str) -> Shard:
    made = replace(provenance(shard_id), tokenizer_sha256=tokenizer_sha256)
    return commit_shard(log, [a_group(position)], provenance=made, sampling=SAMPLING)


def test_a_shard_made_with_another_tokenizer_is_damage():
    """It is compared with the first shard that is still there; a shard that does not say fits."""
    log = a_log()
    lost = _commit_with(log, "lost", 9, "d" * 64)
    log.append(Quarantine(shard_id="lost", reason="not ours"))
    assert read_shard(log, lost).num_rows == 2, "nothing to compare it with"
    shards = [_commit_with(log, f"s{i}", i, digest * 64) for i, digest in enumerate(["c", "a", "b", "", "a"])]
    assert read_shard(log, shards[0]).num_rows == 2
    with pytest.raises(DamagedShard, match="shard s1: its tokenizer a{12} is not c{12}, .*first shard s0; .*rollout-0"):
        read_shard(log, shards[1])
    log.append(Quarantine(shard_id="s0", reason="not ours"))
    log.store.delete([log.shard_key("s0")])
    assert [read_shard(log, shards[i]).num_rows for i in (1, 3, 4)] == [2, 2, 2]
    with pytest.raises(DamagedShard, match="first shard s1"):
        read_shard(log, shards[2])


def test_damage_crosses_processes_with_its_shard_id():
    """Ray sends exceptions between processes this way."""
    error = pickle.loads(pickle.dumps(DamagedShard("s0", "cut off", "file:///s0.arrow")))
    assert (error.shard_id, error.reason, error.file) == ("s0", "cut off", "file:///s0.arrow")
    assert str(error) == "shard s0: cut off (file:///s0.arrow)"
