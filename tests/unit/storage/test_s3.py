"""A bucket as a store: what every store does, multipart uploads, credentials. The server is moto, in this process."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import uuid
from pathlib import Path

import boto3
import pytest

from storage.log.entries import Session
from storage.log.run_log import RunLog
from storage.objects.digests import DIGEST_FILE
from storage.objects.object_store import MIN_FREE_VARIABLE, ObjectStore, StoreError, StoreFull
from storage.objects.opening import open_store, probe
from storage.objects.s3_store import MOST_CONDITIONAL_BYTES, S3Store
from storage.shards.shards import commit_shard, read_shard
from tests.builders import SAMPLING, a_group, a_log, a_policy_folder, provenance
from tests.store_behaviour import *  # noqa: F403

pytestmark = pytest.mark.server
SMALLEST_PART = 5 * 2**20
"""What S3 allows as a part of a multipart upload, the last one apart."""
THREE_PARTS = bytes(range(256)) * (12 * 2**20 // 256)


@pytest.fixture
def store(bucket: str) -> ObjectStore:
    return open_store(f"s3://{bucket}/some/prefix/")


def test_a_bucket_without_a_prefix_is_a_store(bucket: str):
    store = open_store(f"s3://{bucket}")
    store.put("folder/key", b"here")
    assert store.get("folder/key") == b"here"
    assert store.names("folder") == ["key"] and [file.key for file in store.walk("folder")] == ["folder/key"]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.objects.s3_store.PART_BYTES", SMALLEST_PART)


@pytest.mark.usefixtures("small_parts")
def test_a_large_body_is_uploaded_in_parts(store: ObjectStore, bucket: str, tmp_path: Path):
    store.put("large", THREE_PARTS)
    assert store.get("large") == THREE_PARTS
    assert _num_parts(bucket, "large") == 3
    a_policy_folder(tmp_path / "model", weights=THREE_PARTS)
    store.put_folder(tmp_path / "model", "models/m", last=DIGEST_FILE)
    assert _num_parts(bucket, "models/m/model.safetensors") == 3
    fetched = store.fetch_folder("models/m", tmp_path / "cache")
    assert (fetched / "model.safetensors").read_bytes() == THREE_PARTS


@pytest.mark.usefixtures("small_parts")
def test_a_conditional_write_is_never_in_parts(store: ObjectStore, bucket: str):
    """Ceph does not look at the condition when it puts parts together: there, every writer would win."""
    assert store.put_if_absent("large", THREE_PARTS)
    assert _num_parts(bucket, "large") == 0
    assert not store.put_if_absent("large", THREE_PARTS[::-1])
    assert store.get("large") == THREE_PARTS
    with pytest.raises(ValueError, match="one request"):
        store.put_if_absent("huge", bytes(MOST_CONDITIONAL_BYTES + 1))


def test_more_keys_than_fit_in_one_request_are_deleted(store: ObjectStore):
    store.put("many/1001", b"")
    store.delete([f"many/{number}" for number in range(1002)])
    assert store.names("many") == []


def test_the_cache_is_fetched_once_by_store_and_again_where_it_was_cut_off(
    store: ObjectStore, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    other, fetched = open_store(f"s3://{bucket}/other"), []
    get_file = S3Store._get_file
    monkeypatch.setattr(S3Store, "_get_file", lambda *args: fetched.append(args[1]) or get_file(*args))
    for its, content in ((store, b"ours"), (other, b"else")):
        for name in ("a", "b"):
            its.put(f"models/m/{name}", content)
    for its, content in ((store, b"ours"), (other, b"else"), (store, b"ours")):
        folder = its.fetch_folder("models/m", tmp_path)
        assert [(folder / name).read_bytes() for name in ("a", "b")] == [content, content]
    assert len(fetched) == 4
    (folder / "a").write_bytes(b"o")
    assert store.fetch_folder("models/m", tmp_path) == folder
    assert fetched[4:] == ["models/m/a"] and (folder / "a").read_bytes() == b"ours"


def test_a_full_cache_disk_says_what_to_delete(store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Before the first byte, and where the disk fills up on the way."""
    store.put("models/m/weights", b"x")
    advice = (
        rf"cache folder {tmp_path} is full: .*Delete it \(what is needed is fetched again\), or set {MIN_FREE_VARIABLE}"
    )

    def fills_up(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    full = shutil.disk_usage("/")._replace(free=10**8)
    for place, name, stand_in in ((shutil, "disk_usage", lambda path: full), (S3Store, "_get_file", fills_up)):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, stand_in)
            with pytest.raises(StoreFull, match=advice) as raised:
                store.fetch_folder("models/m", tmp_path)
        assert "millrace gc" not in str(raised.value)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("variables", "bucket_name", "sentence"),
    [
        ({}, "nowhere", "cannot be written.*there is no bucket 'nowhere' at this endpoint"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "", "credentials"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "", "127.0.0.1:9.*endpoint"),
    ],
    ids=["bucket", "credentials", "server"],
)
def test_what_is_missing_is_said(
    bucket: str, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], bucket_name: str, sentence: str
):
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    for name, value in variables.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    store = open_store(f"s3://{bucket_name or bucket}/prefix")
    with monkeypatch.context() as patch:
        if "AWS_ENDPOINT_URL" in variables:  # each request would take all its attempts
            patch.setattr(S3Store, "delete", lambda *_: pytest.fail("asked again though no server is there"))
            patch.setattr(S3Store, "put", S3Store.delete)
        with pytest.raises(StoreError, match=sentence):
            probe(store)
    if bucket_name:
        for use in (
            lambda: store.put("key", b""),
            lambda: store.put_if_absent("key", b""),
            lambda: store.get("key"),
            lambda: store.get_many(["key"]),
            lambda: store.names("folder"),
            lambda: store.walk("folder"),
            lambda: store.delete(["key"]),
        ):
            with pytest.raises(StoreError, match="there is no bucket 'nowhere' at this endpoint; make it"):
                use()
    if "AWS_ENDPOINT_URL" in variables:
        for read in (lambda: store.get("key"), lambda: store.get_many(["key"]), lambda: store.names("folder")):
            with pytest.raises(StoreError, match="cannot (read|list).*127.0.0.1:9"):
                read()


def test_a_uri_with_credentials_in_it_is_refused_without_repeating_them():
    with pytest.raises(StoreError, match="AWS_ACCESS_KEY_ID") as raised:
        open_store("s3://AKIDENTIFIER:verysecret@bucket/prefix")
    assert "AKIDENTIFIER" not in str(raised.value) and "verysecret" not in str(raised.value)


def test_no_secret_reaches_a_run_its_errors_or_the_log(
    server: dict[str, str],
    bucket: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
):
    """Everything a run stores and everything its process says, at the most talkative level, errors included."""
    key_id, secret = server["AWS_ACCESS_KEY_ID"], server["AWS_SECRET_ACCESS_KEY"]
    caplog.set_level(logging.DEBUG)
    for name in ("botocore", "aiobotocore", "s3fs"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
    store = open_store(f"s3://{bucket}/prefix")
    said = [repr(store), str(vars(store))]
    log = a_log(store)
    shard = commit_shard(log, [a_group(0)], provenance=provenance(), sampling=SAMPLING)
    read_shard(log, shard)
    a_policy_folder(tmp_path / "model")
    store.put_folder(tmp_path / "model", "runs/run/policies/0", last=DIGEST_FILE)
    store.fetch_folder("runs/run/policies/0", tmp_path / "cache")
    log.append(Session(id="second", code_version=""))

    token, password = f"token-{uuid.uuid4().hex}", f"password-{uuid.uuid4().hex}"
    failing = [
        {"AWS_SESSION_TOKEN": token},
        {"AWS_SECRET_ACCESS_KEY": secret[::-1]},
        {"AWS_ENDPOINT_URL": f"http://user:{password}@127.0.0.1:9"},
        {"AWS_ENDPOINT_URL": f"user:{password}@127.0.0.1:9"},
    ]
    for variables in failing:
        with monkeypatch.context() as patch:
            for name, value in {"AWS_MAX_ATTEMPTS": "1", **variables}.items():
                patch.setenv(name, value)
            said += _errors(open_store(f"s3://{bucket}/prefix"), nowhere=open_store("s3://nowhere/prefix"))
    assert len(said) > 2 + 6, "the errors are part of this test"
    printed = capfd.readouterr()
    said += [printed.out, printed.err, caplog.text]
    stored = [store.get(file.key) for file in store.walk("")]
    local = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(stored) >= 7 and len(local) >= 6
    for word in (secret, secret[::-1], token, password):
        assert not [text for text in said if word in text], f"{word} was said"
        assert not [data for data in stored + local if word.encode() in data], f"{word} was stored"
    assert not [data for data in stored + local if key_id.encode() in data]


def _errors(store: ObjectStore, *, nowhere: ObjectStore) -> list[str]:
    attempts = [
        lambda: store.put("key", b"x"),
        lambda: store.put_if_absent("key", b"x"),
        lambda: store.get("missing"),
        lambda: store.get_many(["missing"]),
        lambda: RunLog(nowhere, "run").append(Session(id="", code_version="")),
        lambda: probe(nowhere),
    ]
    errors = []
    for attempt in attempts:
        try:
            attempt()
        except (StoreError, FileNotFoundError) as error:
            errors.append(f"{error} {error!r}")
    return errors


def _num_parts(bucket: str, key: str) -> int:
    """Parts of an object, from its tag: `<md5 of md5s>-<parts>`; 0 for one written in one piece."""
    tag = boto3.client("s3").head_object(Bucket=bucket, Key=f"some/prefix/{key}")["ETag"].strip('"')
    return int(tag.partition("-")[2] or 0)
