"""What every store does, on a disk, on a mock S3 server and on a real one.

In: a fixture `store`, which the importing test module defines. Out: the same tests in each of them
(`from tests.store_behaviour import *`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from storage.log.entries import Session
from storage.log.run_log import RunLog
from storage.log.run_state import Conflict
from storage.log.runs import RunBusy, open_run, trainer_lock
from storage.objects.digests import DIGEST_FILE, sha256_of, verify_folder
from storage.objects.object_store import ObjectStore, StoreError, StoreFull
from storage.objects.opening import open_store, probe
from storage.objects.tables import ipc_bytes
from storage.shards.shards import DamagedShard, commit_shard, read_shard
from tests.builders import SAMPLING, a_group, a_log, a_policy_folder, a_shard, a_step, a_summary, provenance
from tests.processes import commit_shards, race_for_keys, run_together, write_in_turns


def test_of_many_processes_exactly_one_wins_each_key(store: ObjectStore):
    won = run_together(race_for_keys, 4, store.uri, 20)
    assert Counter(key for keys in won for key in keys) == Counter(range(20))
    for rank, keys in enumerate(won):
        assert {store.get(f"race/{key}") for key in keys} <= {str(rank).encode()}


def test_of_two_writers_of_a_key_the_first_wins(store: ObjectStore):
    rival = open_store(store.uri)
    assert store.put_if_absent("a/key", b"first")
    for loser, data in ((rival, b"second"), (rival, b"first"), (store, b"first")):
        assert not loser.put_if_absent("a/key", data)
    assert rival.get("a/key") == b"first"


def test_put_replaces_and_what_is_missing_is_told_from_what_is_empty(store: ObjectStore):
    store.put("folder/key", b"old")
    store.put("folder/key", b"new")
    store.put("empty", b"")
    assert store.get("folder/key") == b"new" and store.get("empty") == b""
    assert store.exists("folder/key") and store.exists("empty")
    assert not store.exists("folder/other") and not store.exists("folder")
    with pytest.raises(FileNotFoundError):
        store.get("folder/other")
    now = time.time()
    assert abs(store.modified_at("folder/key") - now) < 60
    with pytest.raises(FileNotFoundError):
        store.modified_at("folder/other")
    assert store.get_many([]) == []
    assert store.get_many(["empty", "folder/other", "folder/key", "empty"]) == [b"", None, b"new", b""]


def test_a_key_means_exactly_itself(store: ObjectStore):
    """File-system libraries take some of these for patterns."""
    names = ["a[0-9]", "a*", "a?", "with space", "50%20", "grün", "a+b=c", "a#b"]
    store.put("odd/a5", b"another")
    for name in names:
        store.put(f"odd/{name}", name.encode())
    assert store.get_many([f"odd/{name}" for name in names]) == [name.encode() for name in names]
    assert store.names("odd") == sorted(["a5", *names])
    assert [file.key for file in store.walk("odd")] == sorted(["odd/a5", *(f"odd/{name}" for name in names)])
    for name in names:
        store.delete([f"odd/{name}"])
        assert not store.exists(f"odd/{name}")
    assert store.names("odd") == ["a5"]


def test_a_folder_is_listed_and_only_the_named_keys_in_it_are_deleted(store: ObjectStore):
    sizes = {"a/b/c/deep": 3, "a/1": 1, "a/10": 0, "a/z": 2}
    for key, size in {**sizes, "ab/neighbour": 0}.items():
        store.put(key, bytes(size))
    files = store.walk("a")
    assert {file.key: file.num_bytes for file in files} == sizes and [file.key for file in files] == sorted(sizes)
    assert all(file.modified_at > 1.7e9 for file in files)
    assert store.names("a") == ["1", "10", "b", "z"]
    assert store.walk("nowhere") == store.names("nowhere") == []
    for _ in range(2):
        store.delete(["a/1", "a/none", "ab/neighbour"])
    store.delete([])
    assert store.names("a") == ["10", "b", "z"] and not store.exists("ab/neighbour")


def test_what_another_process_writes_is_there_at_once(store: ObjectStore):
    """Two processes write the same keys in turns; after each turn the other one sees exactly that."""
    assert run_together(write_in_turns, 2, store.uri, 6) == [[], []]


def test_arrow_reads_a_value_in_pieces(store: ObjectStore):
    rows = pa.table({"number": range(4), "text": ["x" * 1000] * 4})
    rows_file = ipc_bytes(rows, compression=None)
    store.put("data/rows.arrow", rows_file)
    with store.open_input("data/rows.arrow") as source:
        assert source.seekable() and source.size() == len(rows_file)
        numbers = pa.ipc.IpcReadOptions(included_fields=[0])
        assert pa.ipc.open_file(source, options=numbers).read_all().to_pydict() == {"number": [0, 1, 2, 3]}
        assert source.read_at(6, 0) == b"ARROW1"
    with pytest.raises(FileNotFoundError, match="gone"):
        store.open_input("data/gone.arrow")
    for broken in (rows_file[:-20], b""):
        store.put("data/broken.arrow", broken)
        with store.open_input("data/broken.arrow") as source, pytest.raises((pa.ArrowException, OSError)):
            pa.ipc.open_file(source)


def test_a_folder_goes_there_seal_last_and_comes_back_whole(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(FileNotFoundError):
        store.fetch_folder("models/m", tmp_path / "cache")
    digest = a_policy_folder(tmp_path / "model", weights=bytes(range(256)) * 1000)
    (tmp_path / "model" / "not-copied").mkdir()
    store.put("models/m/model.safetensors", b"half")
    early = store.fetch_folder("models/m", tmp_path / "cache")  # while it is half written
    assert (early / "model.safetensors").read_bytes() == b"half"
    order = []
    put_file = type(store)._put_file  # type: ignore[attr-defined]
    monkeypatch.setattr(
        type(store), "_put_file", lambda *args, **how: order.append(args[1].name) or put_file(*args, **how)
    )
    store.put_folder(tmp_path / "model", "models/m", last=DIGEST_FILE)
    assert order == ["config.json", "model.safetensors", DIGEST_FILE]
    for _ in range(2):
        folder = store.fetch_folder("models/m", tmp_path / "cache")
        assert verify_folder(folder) == digest
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", DIGEST_FILE, "model.safetensors"]


def test_a_probe_leaves_nothing_also_if_it_fails_midway(store: ObjectStore, monkeypatch: pytest.MonkeyPatch):
    def full(key: str, data: bytes) -> None:
        raise StoreFull("no room")

    probe(store)
    assert store.walk("probe") == []
    with monkeypatch.context() as patch:
        patch.setattr(store, "put", full)
        with pytest.raises(StoreFull, match="no room"):
            probe(store)
    assert store.walk("probe") == []


def test_two_writers_of_one_log_take_turns(store: ObjectStore):
    log = a_log(store)
    rival = RunLog(open_store(store.uri), "run")
    rival.refresh()
    log.append(a_shard("s0", [a_summary(0), a_summary(1)]))
    rival.append(Session(id="rival", code_version=""))  # it thought this number was free
    with pytest.raises(Conflict, match="already committed"):
        rival.append(a_shard("s1", [a_summary(1)]))
    step = a_step(log.state, trained=["0.task0"])
    log.append(step)
    log.append(step)
    with pytest.raises(Conflict, match="another trainer"):
        rival.append(a_step(rival.state, trained=["0.task1"], attempt="rival"))
    assert log.refresh().counters() == rival.refresh().counters()
    assert open_run(open_store(store.uri), "run").state.counters()["pending"] == 1
    assert store.names("runs/run/log") == [f"{number:020d}.json" for number in range(5)]


def test_processes_commit_shards_to_one_log_each_once(store: ObjectStore):
    log = a_log(store)
    run_together(commit_shards, 3, store.uri, "run", 4)
    state = log.refresh()
    assert sorted(state.shards) == sorted(f"{rank}.{number}" for rank in range(3) for number in range(4))
    assert state.positions == set(range(12)) and state.counters()["submitted"] == state.counters()["pending"] == 12
    assert store.names("runs/run/log") == [f"{number:020d}.json" for number in range(14)]
    for shard in state.shards.values():
        assert sha256_of(store.get(log.shard_key(shard.id))) == shard.sha256


def test_a_shard_is_committed_and_read_back_or_found_damaged(store: ObjectStore):
    log = a_log(store)
    shard = commit_shard(log, [a_group(0)], provenance=provenance(), sampling=SAMPLING)
    assert read_shard(log, shard).num_rows == 2
    whole = store.get(log.shard_key("s0"))
    flipped = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in (0, 1000, 2000, len(whole) - 1)]
    for damaged in (whole[:-100], whole[:100], b"", *flipped):
        store.put(log.shard_key("s0"), damaged)
        sentence = rf"shard s0: its sha256 differs from the log's \({len(damaged)} of {shard.num_bytes} bytes\)"
        with pytest.raises(DamagedShard, match=sentence):
            read_shard(log, shard)
    store.delete([log.shard_key("s0")])
    with pytest.raises(DamagedShard, match="shard s0: the file is missing") as caught:
        read_shard(log, shard)
    assert (caught.value.shard_id, caught.value.reason) == ("s0", "the file is missing")


def test_the_trainer_lock_covers_this_machine(store: ObjectStore):
    log = a_log(store)
    with trainer_lock(log), pytest.raises(RunBusy), trainer_lock(open_run(open_store(store.uri), "run")):
        pass


def test_no_key_leads_out_of_the_store(store: ObjectStore):
    asks: list[Callable[[str], Any]] = [store.get, store.exists, store.names, store.walk]
    asks += [lambda key: store.put(key, b""), lambda key: store.delete([key])]
    for key in ("../run.json", "runs/../../etc", "/etc/hosts", "runs//run.json", "runs/./a", "a\\b", "a\nb"):
        for ask in asks:
            with pytest.raises(StoreError, match="is not a key of the store"):
                ask(key)
