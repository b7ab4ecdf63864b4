"""An S3 bucket as a store: AWS, Ceph, MinIO and any other S3 server with conditional writes.

In: `s3://bucket/prefix`; endpoint and credentials from the AWS chain (environment, profile, instance).
Out: an `ObjectStore`. All requests go through s3fs.

    403, 404, 412, 501 …                          ─▶ not sent again: an error, or the result
    503 SlowDown, 500, timeout, cut connection    ─▶ sent again, with growing pauses; a warning if no answer comes
    connection refused by a server that was there ─▶ sent again for `PATIENCE`
    no answer of a server that never gave one     ─▶ sent again for `FIRST_PATIENCE`: the address may be wrong
    a body that ends early                        ─▶ read again from the start
    412: the key exists                           ─▶ the object's metadata `writer` shows whether we wrote it

A multipart upload appears when it is completed; a failed one is aborted. `put_if_absent` is always a single request,
because some servers (Ceph 16) do not check the condition when they assemble parts.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiobotocore.session
import botocore.exceptions
import pyarrow as pa
import s3fs
from s3fs.core import S3_RETRYABLE_ERRORS

from settings.errors import InvalidInput
from settings.places.hints import command
from settings.redaction import without_secrets
from storage.objects.digests import DigestMismatch, sha256_of
from storage.objects.object_store import (
    ConditionRefused,
    StoredFile,
    StoreError,
    StoreFull,
    checked_key,
    last_after_others,
    reserved_bytes,
    room_for,
)

MOST_CONDITIONAL_BYTES = 2**30
"""Largest body of a `put_if_absent`, which is one request."""
PART_BYTES = 50 * 2**20
"""Size of a part of a multipart upload, which a body of at least two parts becomes."""
ATTEMPTS = 6
"""How often botocore sends a request, about 15 s with its pauses, unless `AWS_MAX_ATTEMPTS` is set. s3fs doubles that
for throttling, timeouts and cut connections, and aiohttp repeats a PUT on a kept connection."""
PATIENCE = 120.0
"""Seconds that a server which has answered this process may be away, and refuse connections."""
FIRST_PATIENCE = 6.0
"""Seconds in which a server that never answered this process is asked again, by all requests together."""
READ_ATTEMPTS = 2
"""How often a body that ends early is read, and s3fs's number of tries for everything else."""
CONFLICT_ATTEMPTS = 10
CHECKSUMS = "AWS_REQUEST_CHECKSUM_CALCULATION"
"""Environment variable of the AWS clients; some servers refuse what they add to every write by default."""
REFUSALS = {"NotImplemented", "InvalidArgument", "InvalidRequest"}
"""Error codes of servers without conditional writes; others ignore `If-None-Match`."""
MOST_REQUESTS = 50
"""Most requests at once."""
UNANSWERED = (botocore.exceptions.HTTPClientError, botocore.exceptions.ConnectionError)
"""Errors of a request that no server has answered."""
_ERRORS = (
    OSError,
    ValueError,  # an endpoint that is not a URL
    botocore.exceptions.BotoCoreError,
    botocore.exceptions.ClientError,
    *S3_RETRYABLE_ERRORS,
)

logger = logging.getLogger("millrace.store")

_KEPT: list[Any] = []
"""Connections of this process, kept: one that is dropped while another event loop runs closes itself in that loop and
prints a traceback."""


class S3Store:
    """A prefix of a bucket."""

    def __init__(self, uri: str, *, checksums: str = "", patience: float = PATIENCE) -> None:
        """`checksums` is used instead of what the variable `CHECKSUMS` says, `patience` instead of `PATIENCE`."""
        self._patience = patience
        self.uri = uri.rstrip("/")
        self._prefix = self.uri.removeprefix("s3://")
        self._bucket = self._prefix.partition("/")[0]
        defaults = {"AWS_RETRY_MODE": ("mode", "standard"), "AWS_MAX_ATTEMPTS": ("total_max_attempts", ATTEMPTS)}
        self._away_since: float | None = None
        self._has_answered = False
        session = aiobotocore.session.AioSession()
        session.register("needs-retry.s3", self._heard)
        retries = dict(setting for variable, setting in defaults.items() if variable not in os.environ)
        self._fs = s3fs.S3FileSystem(
            session=session,
            use_listings_cache=False,
            skip_instance_cache=True,
            default_cache_type="none",  # reading ahead would fetch every column instead of one
            config_kwargs={
                "retries": retries,
                "max_pool_connections": MOST_REQUESTS,
                **({"request_checksum_calculation": checksums} if checksums else {}),
            },
        )
        self._fs.retries = READ_ATTEMPTS
        _KEPT.append(self._fs)
        for name in ("botocore", "aiobotocore", "s3fs"):  # at DEBUG they log session tokens and signatures
            logger = logging.getLogger(name)
            if logger.getEffectiveLevel() < logging.INFO:
                logger.setLevel(logging.INFO)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if len(data) > MOST_CONDITIONAL_BYTES:
            raise InvalidInput(f"{key}: {len(data)} bytes are too many for put-if-absent, which is one request")
        writer = uuid.uuid4().hex
        for attempt in range(CONFLICT_ATTEMPTS):
            try:
                whole = {"chunksize": MOST_CONDITIONAL_BYTES, "Metadata": {"writer": writer}}
                with self._explained("write", key):
                    self._fs.pipe_file(self._path(key), data, mode="create", **whole)
                return True
            except FileExistsError:
                pass
            except StoreError as error:
                # AWS and moto raise FileExistsError; Ceph's response arrives as an error with the status in its cause.
                code, status, _ = _response(error)
                if code in REFUSALS or status == 501:
                    raise ConditionRefused(
                        f"store {self.uri} refuses conditional writes (If-None-Match), which keep writers apart: "
                        f"{_reason(error)}. Use a folder, or an S3 server that supports them"
                    ) from error
                if status not in (409, 412):
                    raise
            # Three layers below may have sent the request again silently: the key may exist by our own first request.
            metadata = self._metadata(key)
            if metadata is not None:
                return metadata.get("writer") == writer
            # 409: another write of this key was running and has not succeeded. S3 asks to try again.
            time.sleep(random.random() * min(0.05 * 2**attempt, 2))
        raise StoreError(f"store {self.uri}: {key} was busy {CONFLICT_ATTEMPTS} times; run the same command again")

    def put(self, key: str, data: bytes) -> None:
        self._put(key, lambda: self._fs.pipe_file(self._path(key), data, chunksize=PART_BYTES))

    def get(self, key: str) -> bytes:
        with self._explained("read", key):
            return bytes(self._fs.cat_file(self._path(key), max_concurrency=1))

    def get_buffer(self, key: str) -> pa.Buffer:
        return pa.py_buffer(self.get(key))

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        if not keys:
            return []
        paths = [self._path(key) for key in keys]
        results = self._fs.cat_ranges(paths, None, None, max_concurrency=1, batch_size=MOST_REQUESTS)

        def value(key: str, result: Any) -> bytes | None:
            with contextlib.suppress(FileNotFoundError), self._explained("read", key):
                if isinstance(result, BaseException):
                    raise result
                return bytes(result)
            return None

        return [value(key, result) for key, result in zip(keys, results, strict=True)]

    def exists(self, key: str) -> bool:
        return self._metadata(key) is not None

    def modified_at(self, key: str) -> float:
        with self._explained("read", key):
            return float(self._fs.info(self._path(key))["LastModified"].timestamp())

    def delete(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), 1000):
            batch = [{"Key": self._path(key).partition("/")[2]} for key in keys[start : start + 1000]]
            request = {"Bucket": self._bucket, "Delete": {"Objects": batch, "Quiet": True}}
            with self._explained("delete", keys[start]):
                response = self._fs.call_s3("delete_objects", **request)
            for error in response.get("Errors", []):
                if error.get("Code") != "NoSuchKey":
                    raise StoreError(f"store {self.uri}: {error.get('Key')} cannot be deleted: {error.get('Code')}")

    def walk(self, prefix: str) -> list[StoredFile]:
        with self._explained("list", prefix):
            files = self._fs.find(self._path(prefix) + "/", detail=True)
        return [
            StoredFile(
                key=path.removeprefix(f"{self._prefix}/"),
                num_bytes=info["size"],
                modified_at=info["LastModified"].timestamp(),
            )
            for path, info in sorted(files.items())
            if info["type"] == "file"
        ]

    def open_input(self, key: str) -> pa.NativeFile:
        with self._explained("read", key):
            return pa.PythonFile(self._fs.open(self._path(key), "rb"), mode="r")

    def names(self, prefix: str) -> list[str]:
        with contextlib.suppress(FileNotFoundError), self._explained("list", prefix):
            return sorted(path.rsplit("/", 1)[-1] for path in self._fs.ls(self._path(prefix), detail=False))
        return []

    def put_folder(self, folder: Path, prefix: str, *, last: str, given: bool = False) -> None:
        for file in last_after_others(folder, last):
            self._put_file(file, f"{prefix}/{file.name}")

    def fetch_folder(self, prefix: str, cache: Path) -> Path:
        files = {file.key.removeprefix(f"{prefix}/"): file for file in self.walk(prefix)}
        files = {name: file for name, file in files.items() if "/" not in name}
        if not files:
            raise FileNotFoundError(self._path(prefix))
        target = cache / sha256_of(self.uri.encode())[:16] / prefix  # other stores have the same keys
        missing = {name: file for name, file in files.items() if not _has_size(target / name, file.num_bytes)}
        room = functools.partial(
            room_for,
            folder=target,
            reserve=reserved_bytes(),
            what=f"the cache folder {cache}",
            remedy="Delete it (what is needed is fetched again)",
        )
        with room(sum(file.num_bytes for file in missing.values())):
            target.mkdir(parents=True, exist_ok=True)
        for name, file in missing.items():
            partial = target / f".{name}.{uuid.uuid4().hex}.tmp"
            try:
                with self._explained("read", file.key), room(file.num_bytes):
                    self._get_file(file.key, partial)
                os.replace(partial, target / name)
            finally:
                partial.unlink(missing_ok=True)
        return target

    def _heard(self, caught_exception: Exception | None, attempts: int, **_: Any) -> float | None:
        """botocore calls this after each request that it sent, and sends it again after the seconds that are returned.

        Warn once for each time that the server is away; a connection that was kept and has ended since is none. A
        server that has answered before may be restarting. After the time for one that never has, and after a shorter
        patience, the error is raised from here: botocore would go on.
        """
        if caught_exception is None:
            if self._away_since is not None:
                logger.warning("store %s answers again", self.uri)
            self._away_since, self._has_answered = None, True
            return None
        is_cut = isinstance(caught_exception, botocore.exceptions.ConnectionClosedError)
        if self._away_since is None and (attempts > 1 or not is_cut):
            self._away_since = time.monotonic()
            reason = without_secrets(str(caught_exception))
            logger.warning("store %s does not answer, and is asked again: %s", self.uri, reason)
        is_new = not self._has_answered
        waits = isinstance(caught_exception, UNANSWERED if is_new else botocore.exceptions.ConnectionError)
        if self._away_since is None or not waits or (is_new and "AWS_MAX_ATTEMPTS" in os.environ):
            return None
        if time.monotonic() - self._away_since < (FIRST_PATIENCE if is_new else self._patience):
            return random.uniform(0.5, 1.5)
        if is_new or self._patience < PATIENCE:
            raise caught_exception
        return None

    def _path(self, key: str) -> str:
        return f"{self._prefix}/{checked_key(key)}"

    def _put_file(self, file: Path, key: str) -> None:
        self._put(key, lambda: self._fs.put_file(str(file), self._path(key), chunksize=PART_BYTES))

    def _put(self, key: str, write: Callable[[], None]) -> None:
        for is_last in (False, True):
            try:
                with self._explained("write", key):
                    return write()
            except FileNotFoundError as error:
                # The response to completing a multipart upload was lost, and now the upload is complete and unknown.
                if _response(error)[0] == "NoSuchUpload" and not is_last:
                    continue
                raise StoreError(f"store {self.uri}: cannot write {key}: {_reason(error)}") from error

    def _get_file(self, key: str, file: Path) -> None:
        for is_last in (False, True):
            try:
                return self._fs.get_file(self._path(key), str(file))
            except S3_RETRYABLE_ERRORS:
                # s3fs reads a large file in parallel ranges, and does not repeat one that ends early.
                if is_last:
                    raise

    def _metadata(self, key: str) -> dict[str, str] | None:
        """The metadata of the object at `key`; None if it does not exist."""
        with contextlib.suppress(FileNotFoundError), self._explained("look for", key):
            return dict(self._fs.metadata(self._path(key)))
        return None

    @contextlib.contextmanager
    def _explained(self, action: str, key: str) -> Iterator[None]:
        """Turn errors into `StoreError`s that name store and key; `FileExistsError` passes, and `FileNotFoundError` if
        there is the bucket.

        Raises `DigestMismatch` if the bytes contradict the server's own checksum, `StoreFull` if there is no space.
        """
        try:
            yield
        except (FileNotFoundError, FileExistsError) as error:
            if _response(error)[0] != "NoSuchBucket":
                raise
            problem = f"there is no bucket {self._bucket!r} at this endpoint"
            raise StoreError(f"store {self.uri}: {problem}; make it, or name another") from error
        except _ERRORS as error:
            reason, (code, status, _) = _reason(error), _response(error)
            if isinstance(error, botocore.exceptions.FlexibleChecksumError):
                raise DigestMismatch(f"store {self.uri}: {key} is not what was written there: {reason}") from error
            if re.search("QuotaExceeded|StorageFull", code) or status == 507:
                raise StoreFull(
                    f"store {self.uri} is full: it refuses {key}: {reason}. Make room with "
                    f"`{command('gc', store=self.uri)}`, raise its quota, or choose another `store`. "
                    "Nothing that was committed is lost: the same command continues"
                ) from error
            is_new = isinstance(error, UNANSWERED) and not self._has_answered
            fix = "; no server has answered there: check the endpoint (AWS_ENDPOINT_URL)" if is_new else ""
            raise StoreError(f"store {self.uri}: cannot {action} {key}: {reason}{fix}") from error


def _has_size(file: Path, num_bytes: int) -> bool:
    return file.is_file() and file.stat().st_size == num_bytes


def _response(error: BaseException | None) -> tuple[str, int | None, str]:
    """Code, HTTP status and message of the server's response behind an error; "", None and "" if there is none. Ceph
    has no messages."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            details = response.get("Error", {})
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return str(details.get("Code", "")), status, str(details.get("Message") or "")
        error = error.__cause__
    return "", None, ""


def _reason(error: BaseException) -> str:
    """The error as text, with the server's code."""
    code, status, message = _response(error)
    if status is not None:
        return without_secrets(f"{message} ({code}, HTTP {status})" if message else f"{code}, HTTP {status}")
    return without_secrets(str(error) or type(error).__name__)


def is_unanswered(error: BaseException) -> bool:
    """True for a `StoreError` of a request that no server has answered."""
    return isinstance(error.__cause__, UNANSWERED)
