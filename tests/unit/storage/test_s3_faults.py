"""A server that throttles, breaks, cuts connections, is full, or has no conditional writes.

Each case ends with the right content exactly once, or with a named error and nothing half-written.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import boto3
import pyarrow as pa
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from botocore.retries.standard import ExponentialBackoff

from storage.log.run_log import RunLog
from storage.log.run_state import Conflict
from storage.objects.digests import DIGEST_FILE, verify_folder
from storage.objects.object_store import StoreError, StoreFull
from storage.objects.opening import open_store, probe
from storage.objects.s3_store import CHECKSUMS, FIRST_PATIENCE, PATIENCE, S3Store, _reason
from storage.objects.tables import ipc_bytes
from storage.shards.shards import DamagedShard, commit_shard, read_shard
from tasks.checks.preflight import check_run
from tests.builders import SAMPLING, a_config, a_group, a_log, a_policy_folder, a_shard, a_summary, provenance
from tests.faulty_s3 import ALWAYS, Fault, FaultyS3

pytestmark = pytest.mark.server
PASSING = [Fault.SLOW_DOWN, Fault.INTERNAL_ERROR, Fault.CUT_REQUEST, Fault.LOSE_ANSWER]
BODY = bytes(range(256)) * 4096
SMALLEST_PART = 5 * 2**20
THREE_PARTS = bytes(range(256)) * (12 * 2**20 // 256)


@pytest.fixture
def proxy(server: dict[str, str], bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """The way to the server, which fails where a test says so."""
    with FaultyS3(server).running() as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.variables["AWS_ENDPOINT_URL"])
        yield proxy


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long to wait between attempts is botocore's business, and takes most of the time of these tests."""
    monkeypatch.setattr(ExponentialBackoff, "delay_amount", lambda self, context: 0.01)


@pytest.fixture
def store(proxy: FaultyS3, bucket: str) -> S3Store:
    return S3Store(f"s3://{bucket}/prefix")


@pytest.fixture
def impatient(proxy: FaultyS3, bucket: str, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    """The same store, giving up after two attempts."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    monkeypatch.setattr("storage.objects.s3_store.PART_BYTES", SMALLEST_PART)
    return S3Store(f"s3://{bucket}/prefix")


def _content(store: S3Store) -> dict[str, bytes]:
    """Every value on the server by its key."""
    return {file.key: store.get(file.key) for file in store.walk("")}


@pytest.mark.parametrize("fault", PASSING)
def test_a_write_that_fails_arrives_and_a_conditional_one_is_won_once(store: S3Store, proxy: FaultyS3, fault: Fault):
    """Also where the failed attempt did arrive, and the server says of the next one that the key exists."""
    proxy.fail(fault, times=2)
    store.put("key", BODY)
    assert [request.method for request in proxy.requests] == ["PUT"] * 3
    proxy.fail(fault)
    assert store.put_if_absent("won", BODY)
    rival = open_store(store.uri)
    assert not store.put_if_absent("won", BODY) and not rival.put_if_absent("won", b"another")
    assert rival.put_if_absent("lost", BODY)
    proxy.fail(fault)
    assert not store.put_if_absent("lost", BODY), "the same bytes, but another writer's"
    assert proxy.all_faults_happened and _content(store) == dict.fromkeys(("key", "won", "lost"), BODY)


def test_an_upload_of_the_same_key_under_way_is_waited_for(store: S3Store, proxy: FaultyS3):
    """409 says that another client is writing, not that it has written; it may have failed."""
    proxy.fail(Fault.CONFLICT, times=2)
    assert store.put_if_absent("key", b"mine")
    proxy.fail(Fault.CONFLICT)
    assert not store.put_if_absent("key", b"late")
    assert _content(store) == {"key": b"mine"}


@pytest.mark.parametrize("fault", [Fault.SLOW_DOWN, Fault.INTERNAL_ERROR, Fault.CUT_ANSWER, Fault.LOSE_ANSWER])
def test_a_read_that_fails_is_repeated(store: S3Store, proxy: FaultyS3, tmp_path: Path, fault: Fault):
    store.put("key", BODY)
    proxy.fail(fault, method="GET")
    assert store.get("key") == BODY
    proxy.fail(fault, method="GET", times=2)
    assert store.get_many(["key", "key", "none"]) == [BODY, BODY, None]
    digest = a_policy_folder(tmp_path / "model", weights=BODY)
    store.put_folder(tmp_path / "model", "models/m", last=DIGEST_FILE)
    proxy.fail(fault, method="GET", part="model.safetensors")
    fetched = store.fetch_folder("models/m", tmp_path / "cache")
    assert verify_folder(fetched) == digest and len(list(fetched.iterdir())) == 3
    assert proxy.all_faults_happened


@pytest.mark.parametrize("fault", [Fault.SLOW_DOWN, Fault.LOSE_ANSWER])
def test_looking_listing_and_deleting_survive_a_fault(store: S3Store, proxy: FaultyS3, fault: Fault):
    store.put("folder/key", b"")
    proxy.fail(fault, method="HEAD")
    assert store.exists("folder/key")
    proxy.fail(fault, method="GET")
    assert store.names("folder") == ["key"]
    proxy.fail(fault, method="GET")
    assert [file.key for file in store.walk("folder")] == ["folder/key"]
    proxy.fail(fault, method="POST")
    store.delete(["folder/key"])
    assert store.walk("folder") == [] and proxy.all_faults_happened


def test_a_server_that_does_not_answer_is_asked_again(proxy: FaultyS3, bucket: str):
    store = S3Store(f"s3://{bucket}/prefix")
    store._fs.config_kwargs["read_timeout"] = 0.5
    proxy.fail(Fault.STALL)
    assert store.put_if_absent("key", BODY)
    proxy.fail(Fault.STALL, method="GET")
    assert store.get("key") == BODY and proxy.all_faults_happened


def test_a_server_that_is_away_is_warned_of_once_and_one_cut_connection_is_not(
    store: S3Store, proxy: FaultyS3, caplog: pytest.LogCaptureFixture
):
    proxy.fail(Fault.LOSE_ANSWER)
    store.put("key", b"")
    assert not [record for record in caplog.records if record.name == "millrace.store"]
    proxy.fail(Fault.LOSE_ANSWER, times=6)
    store.put("key", b"")
    away, back = (record.getMessage() for record in caplog.records if record.name == "millrace.store")
    assert away.startswith(f"store {store.uri} does not answer, and is asked again: ")
    assert back == f"store {store.uri} answers again"


def test_a_server_that_was_there_is_waited_for_and_one_that_never_answered_is_not(monkeypatch: pytest.MonkeyPatch):
    store, refused = S3Store("s3://bucket/prefix"), EndpointConnectionError(endpoint_url="http://host", error="refused")
    began = time.monotonic()
    assert 0.5 <= (store._heard(refused, attempts=1) or 0.0) <= 1.5
    with monkeypatch.context() as later:
        later.setattr(time, "monotonic", lambda: began + 1.1 * FIRST_PATIENCE)
        with pytest.raises(EndpointConnectionError):  # of all requests at once, of however many
            store._heard(refused, attempts=1)
    store._heard(None, attempts=2)
    pauses = [store._heard(refused, attempts=attempt) for attempt in range(1, 200)]
    assert all(pause and 0.5 <= pause <= 1.5 for pause in pauses)
    impatient = S3Store("s3://bucket/prefix", patience=3.0)
    impatient._heard(None, attempts=1)
    assert impatient._heard(refused, attempts=1)
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + 3.0)
    assert store._heard(refused, attempts=200)
    with pytest.raises(EndpointConnectionError):
        impatient._heard(refused, attempts=2)
    monkeypatch.setattr(time, "monotonic", lambda: began + PATIENCE)
    assert store._heard(refused, attempts=200) is None


def test_an_error_without_a_message_is_its_code():
    """As Ceph answers."""
    metadata = {"HTTPStatusCode": 403}
    error = ClientError({"Error": {"Code": "AccessDenied", "Message": None}, "ResponseMetadata": metadata}, "PutObject")  # type: ignore[typeddict-item]
    assert _reason(error) == "AccessDenied, HTTP 403"


def test_an_address_without_a_server_is_waited_for_once_for_all_writers(bucket: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("storage.objects.s3_store.FIRST_PATIENCE", 2.0)
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(StoreError, match=r"no server has answered there: check the endpoint \(AWS_ENDPOINT_URL\)$"):
            probe(store := S3Store(f"s3://{bucket}/prefix"))
        with pytest.raises(StoreError, match="cannot read key: .*check the endpoint"):  # at once
            store.get("key")
    assert time.monotonic() - began < 2 * (2.0 + 1.5) + 2.0


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault.SLOW_DOWN, r".*reduce your request rate.*SlowDown, HTTP 503"),
        (Fault.INTERNAL_ERROR, ".*InternalError, HTTP 500"),
        (Fault.CUT_REQUEST, "Connection was closed"),
    ],
)
def test_a_request_that_never_arrives_is_a_named_error_and_leaves_the_old_value(
    impatient: S3Store, proxy: FaultyS3, fault: Fault, reason: str
):
    impatient.put("old", b"old")
    proxy.fail(fault, times=ALWAYS)
    for key, write in (("new", impatient.put), ("new", impatient.put_if_absent), ("old", impatient.put)):
        with pytest.raises(StoreError, match=rf"store {impatient.uri}: cannot write {key}: {reason}"):
            write(key, BODY)
    proxy.fail(Fault.LOSE_ANSWER, times=ALWAYS, method="GET")
    with pytest.raises(StoreError, match="cannot read old: Connection was closed"):
        impatient.get("old")
    proxy.heal()
    assert _content(impatient) == {"old": b"old"}


@pytest.mark.parametrize(
    ("fault", "part"),
    [
        *((Fault.SLOW_DOWN, part) for part in ("uploads", "partNumber=2", "uploadId")),
        *((Fault.LOSE_ANSWER, part) for part in ("uploads", "partNumber=2", "uploadId")),
        (Fault.CUT_REQUEST, "partNumber=3"),
    ],
)
def test_an_upload_in_parts_survives_a_fault_in_each_of_its_steps(
    impatient: S3Store, proxy: FaultyS3, fault: Fault, part: str
):
    """Begin, a part, completion. A lost answer to `begin` leaves an upload without a known id, but no object."""
    proxy.fail(fault, method="PUT" if "partNumber" in part else "POST", part=part)
    impatient.put("large", THREE_PARTS)
    assert proxy.all_faults_happened and _content(impatient) == {"large": THREE_PARTS}


@pytest.mark.parametrize("fault", [Fault.SLOW_DOWN, Fault.CUT_REQUEST])
def test_an_upload_in_parts_that_fails_leaves_nothing(impatient: S3Store, proxy: FaultyS3, bucket: str, fault: Fault):
    proxy.fail(fault, times=ALWAYS, part="partNumber=2")
    with pytest.raises(StoreError, match="cannot write large"):
        impatient.put("large", THREE_PARTS)
    uploads = boto3.client("s3").list_multipart_uploads(Bucket=bucket)
    assert _content(impatient) == {} and not uploads.get("Uploads")


@pytest.mark.parametrize("fault", [Fault.QUOTA_EXCEEDED, Fault.DISK_FULL])
def test_a_full_store_says_so_at_once(store: S3Store, proxy: FaultyS3, fault: Fault):
    for write in (store.put, store.put_if_absent):
        proxy.fail(fault)
        with pytest.raises(StoreFull, match=f"store {store.uri} is full.*key.*millrace gc"):
            write("key", BODY)
    assert len(proxy.requests) == 2, "asking again makes no room"
    assert _content(store) == {}


def test_a_shard_of_which_a_bit_has_changed_is_damaged_also_where_the_server_notices(store: S3Store, proxy: FaultyS3):
    log = a_log(store)
    shard = commit_shard(log, [a_group(0)], provenance=provenance(), sampling=SAMPLING)
    proxy.fail(Fault.DAMAGE, method="GET", part="/shards/")
    with pytest.raises(DamagedShard, match="is not what was written there|its sha256 differs"):
        read_shard(log, shard)
    assert proxy.all_faults_happened and read_shard(log, shard).num_rows == 2


def test_a_commit_that_failed_can_be_repeated_whether_or_not_its_entry_is_there(impatient: S3Store, proxy: FaultyS3):
    """If all answers were lost, the error says nothing about that. Appending the entry again does."""
    log, rival = a_log(impatient), RunLog(open_store(impatient.uri), "run")
    for fault, part in ((Fault.CUT_REQUEST, "/shards/"), (Fault.CUT_REQUEST, "/log/"), (Fault.LOSE_ANSWER, "/log/")):
        proxy.fail(fault, times=ALWAYS, part=part)
        with pytest.raises(StoreError, match=f"cannot write runs/run{part}"):
            commit_shard(log, [a_group(0)], provenance=provenance(), sampling=SAMPLING)
        proxy.heal()
        assert list(rival.refresh().shards) == (["s0"] if fault is Fault.LOSE_ANSWER else [])
    with pytest.raises(Conflict, match="already committed"):
        rival.append(a_shard("s1", [a_summary(0)]))
    shard = commit_shard(log, [a_group(0)], provenance=provenance(), sampling=SAMPLING)
    assert read_shard(log, shard).num_rows == 2 and log.state.entries == 3 == rival.refresh().entries


def test_only_the_columns_asked_for_are_fetched(store: S3Store, proxy: FaultyS3):
    parts = [pa.table({"reward": [float(part)] * 10, "tokens": [bytes(50_000)] * 10}) for part in range(3)]
    data = ipc_bytes(pa.concat_tables(parts), compression=None)
    store.put("data.arrow", data)
    proxy.requests.clear()
    proxy.fail(Fault.CUT_ANSWER, method="GET")
    with store.open_input("data.arrow") as source:
        only = pa.ipc.IpcReadOptions(included_fields=[0])
        rewards = pa.ipc.open_file(source, options=only).read_all()
    assert rewards.column("reward").to_pylist() == [0.0] * 10 + [1.0] * 10 + [2.0] * 10
    assert proxy.all_faults_happened
    assert sum(request.num_bytes for request in proxy.requests) < len(data) / 20


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (Fault.IGNORE_CONDITION, "lets a second writer replace.*If-None-Match"),
        (Fault.CHECK_THEN_WRITE, "lets a second writer replace.*If-None-Match"),  # one after another it is right
        (Fault.REFUSE_CONDITION, "refuses conditional writes.*If-None-Match.*501"),
        (
            Fault.REFUSE_CHECKSUM,
            "prefix refuses the checksums.*: set AWS_REQUEST_CHECKSUM_CALCULATION=when_required$",
        ),
    ],
)
def test_what_a_server_lacks_is_said_before_anything_is_written(
    store: S3Store, proxy: FaultyS3, fault: Fault, sentence: str, monkeypatch: pytest.MonkeyPatch
):
    proxy.fail(fault, times=ALWAYS)
    for check in (probe, lambda its: probe(its, with_data=False), _check_run):
        with pytest.raises(StoreError, match=sentence):
            check(store)
    if fault is Fault.REFUSE_CHECKSUM:  # the advice helps
        monkeypatch.setenv(CHECKSUMS, "when_required")
        probe(S3Store(store.uri))
    proxy.heal()
    _check_run(store)  # a good one passes
    assert _content(store) == {}


def _check_run(store: S3Store) -> None:
    check_run(a_config(workflow="examples.arithmetic:Arithmetic", store=store.uri))
