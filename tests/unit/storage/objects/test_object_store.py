"""A folder as a store: what every store does, nothing half-written, and a full disk said in a sentence."""

from __future__ import annotations

import errno
import filecmp
import os
import shutil
import stat
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from storage.log.runs import trainer_lock
from storage.objects.digests import DIGEST_FILE, verify_folder
from storage.objects.object_store import MIN_FREE_VARIABLE, ConditionRefused, LocalStore, StoreError, StoreFull
from storage.objects.opening import open_store, probe
from storage.objects.s3_store import S3Store
from storage.objects.tables import ipc_bytes
from storage.shards.shards import commit_shard
from storage.views.search_index import SearchIndex
from tests.builders import SAMPLING, a_group, a_log, a_policy_folder, local_store, provenance
from tests.store_behaviour import *  # noqa: F403

FULL = shutil.disk_usage("/")._replace(free=10**8)
"""A disk with 100 MB left."""


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return local_store(tmp_path)


def test_writes_leave_nothing_else_and_no_listing_shows_a_half_written_file(store: LocalStore):
    assert store.put_if_absent("a/key", b"first") and not store.put_if_absent("a/key", b"second")
    store.put("a/other", b"third")
    assert _all_files(store) == ["a/key", "a/other"]
    (store.root / "a" / ".d.0123.tmp").write_bytes(b"")
    assert store.names("a") == ["key", "other"]
    assert [file.key for file in store.walk("a")] == ["a/key", "a/other"]


def test_a_large_file_of_a_folder_is_copied_in_pieces(store: LocalStore, tmp_path: Path):
    (tmp_path / "model").mkdir()
    weights = tmp_path / "model" / "weights"
    weights.write_bytes(os.urandom(2**20) * 16)
    tracemalloc.start()
    store.put_folder(tmp_path / "model", "models/m", last="weights")
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < weights.stat().st_size / 4
    assert filecmp.cmp(weights, store.root / "models/m/weights", shallow=False)


@pytest.mark.parametrize("operation", ["put", "put_if_absent"])
def test_a_name_is_on_the_disk_before_a_write_returns(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, operation: str
):
    """Else a log entry could outlast a power loss that its shard does not."""
    synced: list[tuple[int, list[str]]] = []

    def watched(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, _all_files(store)))

    monkeypatch.setattr(os, "fsync", watched)
    getattr(store, operation)("new/folder/key", b"value")
    folder = store.root / "new" / "folder"
    content = (folder / "key").stat().st_ino
    above = [path.stat().st_ino for path in (store.root.parent, store.root, folder.parent)]
    assert [inode for inode, _ in synced] == [*above, content, folder.stat().st_ino]
    assert "new/folder/key" in synced[-1][1] and "new/folder/key" not in synced[-2][1]
    synced.clear()
    getattr(store, operation)("new/folder/other", b"value")
    assert [inode for inode, _ in synced] == [(folder / "other").stat().st_ino, folder.stat().st_ino]


def test_a_file_system_that_syncs_no_folders_is_written_all_the_same(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
):
    def refusing(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", refusing)
    assert store.put_if_absent("a/key", b"value") and store.get("a/key") == b"value"


def test_a_file_for_arrow_is_mapped_into_memory_and_not_copied(store: LocalStore):
    rows = pa.table({"number": range(10**6)})
    store.put("data.arrow", ipc_bytes(rows, compression=None))
    before = pa.total_allocated_bytes()
    for source in (store.open_input("data.arrow"), store.get_buffer("data.arrow")):
        table = pa.ipc.open_file(source).read_all()
        assert pa.total_allocated_bytes() - before < table.nbytes / 100
        assert table.equals(rows)


def test_a_store_that_cannot_keep_writers_apart_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    forgetful = LocalStore(tmp_path / "forgetful")  # like an S3 server that ignores `If-None-Match`
    monkeypatch.setattr(forgetful, "put_if_absent", lambda key, data: forgetful.put(key, data) or True)
    with pytest.raises(ConditionRefused, match="lets a second writer replace"):
        probe(forgetful)
    assert forgetful.walk("probe") == []
    refusing = LocalStore(tmp_path / "refusing")
    monkeypatch.setattr(refusing, "put_if_absent", lambda key, data: False)
    with pytest.raises(ConditionRefused, match="already there"):
        probe(refusing)
    # A path below a file is refused to root as well.
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written.*make it writable"):
        probe(LocalStore(tmp_path / "file" / "store"))


def test_data_leave_space_free_and_the_log_may_use_it(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What is written can be committed, and `millrace gc`, the way out, can record what it removes."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: FULL)
    log = a_log(store)
    entries = _all_files(store)
    with pytest.raises(StoreFull):
        commit_shard(log, [a_group(0)], provenance=provenance(), sampling=SAMPLING)
    with pytest.raises(StoreFull) as raised:
        store.put("shards/s0.arrow", bytes(2_000_000))
    sentence = str(raised.value)
    for part in (store.uri, "100.0 MB free", "2.0 MB to write", "1.0 GB", MIN_FREE_VARIABLE, "millrace gc", "`store`"):
        assert part in sentence
    with pytest.raises(StoreFull, match="200.0 MB to write"):
        store.put_if_absent("log", bytes(200_000_000))
    with pytest.raises(StoreFull, match="is full"):
        probe(store)
    monkeypatch.setenv(MIN_FREE_VARIABLE, "0.05")
    with pytest.raises(StoreFull, match="60.0 MB to write and 50.0 MB to be left free"):
        store.put("shards/s1.arrow", bytes(60_000_000))
    a_policy_folder(tmp_path / "model", weights=bytes(30_000_000))
    (tmp_path / "model" / "optimizer").write_bytes(bytes(30_000_000))
    with pytest.raises(StoreFull, match="60.0 MB to write"):  # a policy that does not fit is not begun
        store.put_folder(tmp_path / "model", "policies/1", last=DIGEST_FILE)
    assert log.state.entries == 2 and _all_files(store) == entries
    commit_shard(log, [a_group(0)], provenance=provenance(), sampling=SAMPLING)
    assert list(log.refresh().shards) == ["s0"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("operation", ["put", "put_if_absent"])
def test_a_disk_or_quota_that_fills_up_while_writing_leaves_nothing(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, number: int, operation: str
):
    """Some file systems find out only when the bytes go to the disk."""
    store.put("key", b"old")

    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StoreFull, match="is full.*millrace gc"):
        getattr(store, operation)("key", b"new")
    assert store.get("key") == b"old" and _all_files(store) == ["key"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_what_may_not_be_written_is_named(store: LocalStore, monkeypatch: pytest.MonkeyPatch, number: int):
    log = a_log(store)

    def refused(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", refused)
    for path, write in (
        ("folder/key", lambda: store.put("folder/key", b"new")),
        ("runs/run/trainer.lock", lambda: trainer_lock(log).__enter__()),
        ("index/lock", lambda: SearchIndex(log, store.root / "index", load_embedding=pytest.fail).update()),
    ):
        with pytest.raises(StoreError, match=f"no permission to write {store.root / path}: {os.strerror(number)}"):
            write()


def test_a_disk_without_room_for_another_file_says_so(store: LocalStore, monkeypatch: pytest.MonkeyPatch):
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    room = dict.fromkeys(("f_blocks", "f_bavail", "f_bfree"), 10**10)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_files=120, f_favail=0, f_frsize=1, **room))
    with pytest.raises(StoreFull, match=r"is full: .* free, and no more files fit there, as `df -i` shows"):
        store.put("key", b"")


def test_a_disk_without_room_for_gc_does_not_advise_it_alone(store: LocalStore, monkeypatch: pytest.MonkeyPatch):
    full = shutil.disk_usage("/")._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(StoreFull, match="Remove other files from that disk: `millrace gc` writes too"):
        store.put_if_absent("key", bytes(1000))


def test_a_budget_that_is_no_number_is_refused(store: LocalStore, monkeypatch: pytest.MonkeyPatch):
    for setting in ("much", "1 GB", "-1", "nan"):
        monkeypatch.setenv(MIN_FREE_VARIABLE, setting)
        with pytest.raises(StoreError, match=f"{MIN_FREE_VARIABLE}=.*gigabytes"):
            store.put("key", b"")


@pytest.mark.parametrize(
    ("uri", "sentence"),
    [
        ("gs://bucket/prefix", "gs.*s3://bucket/prefix"),
        ("file://data/store", "three slashes; file:///|file:///"),
        ("s3://bucket//prefix", "empty name between two slashes; use s3://bucket/prefix$"),
        ("S3://bucket/prefix", "unknown scheme 'S3'; use a folder, file:///… or s3://bucket/prefix$"),
        ("http://[::1", "unknown scheme 'http'"),
        ("s3:/bucket/prefix", "has one slash where a URI has two; use s3://bucket/prefix, or ./s3:/bucket/prefix$"),
        ("s3:///prefix", "empty name between two slashes; use s3://bucket/prefix$"),
    ],
)
def test_a_uri_that_names_no_store_is_refused_with_one_that_does(uri: str, sentence: str):
    with pytest.raises(StoreError, match=sentence):
        open_store(uri)


def test_a_store_is_a_path_or_a_uri_and_opens_again_by_its_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("plain", "with space", "a:b", "[1", "100%", "50%20", "grün", "a#b?c"):
        store = open_store(str(tmp_path / name))
        store.put("key", name.encode())
        again = open_store(store.uri)
        assert again.uri == store.uri and again.get("key") == name.encode()
        by_hand = open_store(f"file://{tmp_path}/{name.replace('%', '%25')}")
        assert by_hand.uri == store.uri, "nothing else needs to be quoted"
    monkeypatch.chdir(tmp_path)
    relative = open_store("here")
    assert isinstance(relative, LocalStore) and relative.root == tmp_path / "here"
    assert isinstance(open_store("~/store"), LocalStore)
    s3 = open_store("s3://bucket/prefix/")
    assert isinstance(s3, S3Store) and s3.uri == "s3://bucket/prefix"


def _all_files(store: LocalStore) -> list[str]:
    """What really lies there, half-written files included."""
    return sorted(path.relative_to(store.root).as_posix() for path in store.root.rglob("*") if path.is_file())


@pytest.mark.parametrize("has_links", [True, False])
def test_files_that_are_given_away_are_taken_as_they_are_where_that_can_be(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
):
    digest = a_policy_folder(tmp_path / "made", weights=bytes(1000))
    made = (tmp_path / "made" / "model.safetensors").stat().st_ino
    if not has_links:

        def on_another_disk(*_: object) -> None:
            raise OSError(errno.EXDEV, "Invalid cross-device link")

        monkeypatch.setattr(os, "link", on_another_disk)
    store.put_folder(tmp_path / "made", "policies/1", last=DIGEST_FILE, given=True)
    shutil.rmtree(tmp_path / "made")
    folder = store.fetch_folder("policies/1", tmp_path)
    assert verify_folder(folder) == digest
    assert ((folder / "model.safetensors").stat().st_ino == made) == has_links
