"""The store and the log behave on S3 as they do on a disk. The server is moto, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from storage.digests import DIGEST_FILE, verify_folder
from storage.log_entries import Session
from storage.object_store import ObjectStore, S3Store, StoreError, open_store, probe
from storage.run_log import RunLog
from storage.run_state import Conflict
from storage.runs import RunBusy, open_run, trainer_lock
from storage.shards import DamagedShard, commit_shard, read_shard
from tests.builders import (
    SAMPLING,
    a_group,
    a_log,
    a_policy_folder,
    a_shard,
    a_step,
    a_summary,
    provenance,
)

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def store(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """A prefix of a fresh bucket; the endpoint comes from the environment alone, as on a cluster."""
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": endpoint, "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(name, value)
    s3 = boto3.resource("s3")
    for bucket in s3.buckets.all():
        bucket.objects.all().delete()
        bucket.delete()
    s3.create_bucket(Bucket="bucket")
    return open_store("s3://bucket/some/prefix/")


def test_of_two_writers_of_a_key_the_first_wins(store: ObjectStore):
    rival = open_store(store.uri)
    assert isinstance(store, S3Store) and store.uri == "s3://bucket/some/prefix"
    assert store.put_if_absent("a/key", b"first")
    assert not rival.put_if_absent("a/key", b"second")
    assert not store.put_if_absent("a/key", b"first")
    assert rival.get("a/key") == b"first"


def test_put_get_exists_and_names(store: ObjectStore):
    store.put("folder/b", b"old")
    store.put("folder/b", b"new")
    store.put("folder/a", b"")
    store.put("folder/deeper/c", b"")
    assert store.get("folder/b") == b"new" and store.get("folder/a") == b""
    assert store.exists("folder/a") and not store.exists("folder/c")
    assert store.names("folder") == ["a", "b", "deeper"]
    assert store.names("nowhere") == []
    with pytest.raises(FileNotFoundError):
        store.get("folder/c")


def test_what_another_writer_adds_is_seen_at_once(store: ObjectStore):
    rival = open_store(store.uri)
    assert not store.exists("key") and store.names("folder") == []
    rival.put("key", b"")
    rival.put("folder/a", b"")
    assert store.exists("key") and store.names("folder") == ["a"]


def test_the_store_keeps_writers_apart(store: ObjectStore):
    assert probe(store) is True


def test_a_missing_bucket_says_what_to_check(store: ObjectStore):
    with pytest.raises(StoreError, match="cannot be written.*bucket exists"):
        probe(open_store("s3://nowhere/prefix"))


def test_missing_credentials_say_what_to_check(store: ObjectStore, monkeypatch: pytest.MonkeyPatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    with pytest.raises(StoreError, match="credentials"):
        probe(open_store("s3://bucket/prefix"))


def test_a_folder_goes_up_with_its_seal_last_and_comes_down_whole(store: ObjectStore, tmp_path: Path):
    digest = a_policy_folder(tmp_path / "model", weights=bytes(range(256)) * 1000)
    written = []

    class Watched(S3Store):
        def __init__(self, uri: str) -> None:
            super().__init__(uri)
            put_file = self._fs.put_file
            self._fs.put_file = lambda source, target: (written.append(target), put_file(source, target))

    Watched(store.uri).put_folder(tmp_path / "model", "models/m", last=DIGEST_FILE)
    assert [path.rsplit("/", 1)[-1] for path in written] == ["config.json", "model.safetensors", DIGEST_FILE]
    folder = store.fetch_folder("models/m", tmp_path / "cache")
    assert folder == tmp_path / "cache" / "models" / "m"
    assert verify_folder(folder) == digest
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", DIGEST_FILE, "model.safetensors"]
    assert verify_folder(store.fetch_folder("models/m", tmp_path / "cache")) == digest


def test_a_missing_folder_is_an_error(store: ObjectStore, tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        store.fetch_folder("models/m", tmp_path)


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
    assert log.refresh() == rival.refresh() == open_run(open_store(store.uri), "run").state
    assert store.names("runs/run/log") == [f"{number:020d}.json" for number in range(5)]
    assert log.state.counters()["pending"] == 1


def test_a_shard_is_committed_and_read_back_or_found_damaged(store: ObjectStore):
    log = a_log(store)
    shard = commit_shard(log, [a_group(0)], provenance=provenance(), sampling=SAMPLING)
    assert read_shard(log, shard).num_rows == 2
    store.put(log.shard_key("s0"), b"cut off")
    with pytest.raises(DamagedShard, match="sha256"):
        read_shard(log, shard)
    boto3.client("s3").delete_object(Bucket="bucket", Key="some/prefix/runs/run/shards/s0.arrow")
    with pytest.raises(DamagedShard, match="missing"):
        read_shard(log, shard)


def test_the_trainer_lock_covers_this_machine(store: ObjectStore):
    log = a_log(store)
    with trainer_lock(log), pytest.raises(RunBusy), trainer_lock(open_run(open_store(store.uri), "run")):
        pass
