"""Everything the unit tests ask of S3, asked of a real server: Ceph's gateway. Skipped where it cannot be had."""

from __future__ import annotations

import subprocess
import sys

import boto3
import pytest

from storage.log.runs import open_run
from storage.objects.object_store import ObjectStore, StoreError, StoreFull
from storage.objects.opening import open_store, probe
from storage.objects.s3_store import S3Store
from storage.shards.shards import commit_shard
from tests.builders import SAMPLING, a_group, a_log, provenance
from tests.ceph import USER, Ceph
from tests.chaos.test_storm import check, weather
from tests.unit.storage.test_s3 import *  # noqa: F403


def test_it_really_is_ceph(ceph: Ceph, bucket: str):
    answer = boto3.client("s3").head_bucket(Bucket=bucket)["ResponseMetadata"]["HTTPHeaders"]
    assert answer["x-amz-request-id"].startswith("tx0")


def test_a_wrong_secret_is_told_from_a_missing_permission(
    bucket: str, server: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    """moto takes any signature."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server["AWS_SECRET_ACCESS_KEY"][::-1])
    with pytest.raises(StoreError, match="SignatureDoesNotMatch.*credentials"):
        probe(open_store(f"s3://{bucket}/prefix"))
    with pytest.raises(StoreError, match="cannot read key.*403"):
        open_store(f"s3://{bucket}/prefix").get("key")


def test_a_full_bucket_stops_writing_and_loses_nothing(ceph: Ceph, bucket: str):
    """A real quota, which counts objects, lets eight in; then it is raised and the same commit goes through."""
    store = open_store(f"s3://{bucket}/prefix")
    log = a_log(store)
    quota = ("--quota-scope=bucket", f"--uid={USER}", f"--bucket={bucket}")
    ceph.admin("quota", "set", *quota, "--max-objects=8")
    ceph.admin("quota", "enable", *quota)
    committed = 0
    with pytest.raises(StoreFull, match=f"store {store.uri} is full.*QuotaExceeded"):
        for committed in range(8):
            commit_shard(log, [a_group(committed)], provenance=provenance(f"s{committed}"), sampling=SAMPLING)
    assert 0 < committed < 7
    assert len(open_run(open_store(store.uri), "run").state.shards) == committed
    ceph.admin("quota", "set", *quota, "--max-objects=100")
    commit_shard(log, [a_group(committed)], provenance=provenance(f"s{committed}"), sampling=SAMPLING)
    assert list(log.refresh().shards) == [f"s{number}" for number in range(committed + 1)]


def test_the_condition_is_not_checked_when_parts_are_put_together(store: ObjectStore):
    """Why `put_if_absent` is one request. When this fails, Ceph has learnt it, and the reason is gone."""
    in_parts = S3Store(store.uri)
    body = bytes(11 * 2**20)
    for _ in range(2):
        in_parts._fs.pipe_file(in_parts._path("large"), body, chunksize=5 * 2**20, mode="create")


def test_a_store_is_read_by_a_process_that_has_only_the_environment(store: ObjectStore):
    store.put("key", b"written here")
    code = f"from storage.objects.opening import open_store; print(open_store({store.uri!r}).get('key'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "b'written here'", done.stderr


@pytest.mark.slow
def test_200_kills_over_a_real_bucket_lose_nothing(bucket: str, server: dict[str, str]):
    """Many writers on one log."""
    uri = f"s3://{bucket}/prefix"
    check(uri, weather(uri, kills=200, longest_pause=0.5, environment=server))
