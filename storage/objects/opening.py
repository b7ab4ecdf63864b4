"""Open a store by its URI, and test whether its conditional writes work.

In: a URI (`file:///data/millrace`, a plain path, or `s3://bucket/prefix`). Out: an `ObjectStore`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

from settings.places.state_folder import expanded, is_address, store_folder
from storage.objects.object_store import ConditionRefused, LocalStore, ObjectStore, StoreError, StoreFull

WRITERS, RACES = 4, 3
"""At once, and one after another, in a `probe`."""


def open_store(uri: str, *, patience: float | None = None) -> ObjectStore:
    """A store by URI or path. `patience` is for how many seconds a request waits for a server that is away, for a while
    by default. Raises `StoreError` for any other, one with credentials, and an unreadable folder."""
    scheme, is_uri, rest = uri.partition("://")
    if is_uri and scheme == "s3":
        from storage.objects.s3_store import S3Store

        bucket, _, prefix = rest.partition("/")
        if "@" in bucket:
            raise StoreError(
                "the store's URI contains credentials, and runs store the URI: use s3://bucket/prefix, and give the "
                "credentials to the AWS chain (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile)"
            )
        if not bucket or prefix.startswith("/"):
            right = f"s3://{bucket or 'bucket'}/{prefix.strip('/') or 'prefix'}"
            raise StoreError(f"store {uri!r} has an empty name between two slashes; use {right}")
        return S3Store(uri) if patience is None else S3Store(uri, patience=patience)
    if is_uri and scheme == "file" and not rest.startswith("/"):
        host = rest.partition("/")[0]
        raise StoreError(f"store {uri!r}: {host!r} is a host; a file URI has three slashes: file:///…")
    if not is_uri and is_address(uri):
        scheme, _, rest = uri.partition(":/")
        raise StoreError(f"store {uri!r} has one slash where a URI has two; use {scheme}://{rest}, or ./{uri}")
    if not is_uri or scheme == "file":
        root = expanded(store_folder(uri) or uri).resolve()
        try:
            os.scandir(root).close()
        except FileNotFoundError:
            pass  # the first write makes it
        except OSError as error:
            raise StoreError(f"store {root} cannot be opened ({error.strerror}); choose another `store`") from error
        return LocalStore(root)
    raise StoreError(f"store {uri!r}: unknown scheme {scheme!r}; use a folder, file:///… or s3://bucket/prefix")


def probe(store: ObjectStore, *, with_data: bool = True) -> None:
    """Let a few writers race for one key, some times, and remove it: exactly one must win, and its bytes must stay.

    A server that looks for the key and then writes passes whenever one writer comes after the other. `with_data` also
    writes a file as shards and policies are, which needs free space. Raises `ConditionRefused` for a store that does
    not keep writers apart, `StoreFull`, or `StoreError` if it cannot be written at all.
    """
    for _ in range(RACES):
        key = f"probe/{uuid.uuid4().hex}"
        try:
            _race(store, key, with_data=with_data)
        except Exception as error:
            if is_away(store, error):
                raise
            with contextlib.suppress(Exception):  # the first error matters
                store.delete([key])
            if isinstance(error, StoreFull) or (isinstance(error, ConditionRefused) and _takes_any(store, key)):
                raise
            raise _unwritable(store, key, error) from error


def _race(store: ObjectStore, key: str, *, with_data: bool) -> None:
    together = threading.Barrier(WRITERS)

    def write(data: bytes) -> bool:
        together.wait()
        return store.put_if_absent(key, data)

    written = [bytes([number]) * 100 for number in range(WRITERS)]
    with ThreadPoolExecutor(WRITERS) as pool:
        won = list(pool.map(write, written))
    if not any(won):
        raise ConditionRefused(f"store {store.uri} reported a new key as already there")
    if won.count(True) > 1 or store.put_if_absent(key, b"late") or store.get(key) != written[won.index(True)]:
        raise ConditionRefused(
            f"store {store.uri} lets a second writer replace what the first one wrote; trainer, rollout workers and "
            "commands all write the run's log, so use a folder, or S3 with conditional writes (If-None-Match)"
        )
    if with_data:
        store.put(key, b"")  # on S3 it may need another permission too
    store.delete([key])


def is_away(store: ObjectStore, error: Exception) -> bool:
    """True if no server has answered: each further request would take all its attempts too."""
    if not store.uri.startswith("s3:"):
        return False
    from storage.objects.s3_store import is_unanswered

    return is_unanswered(error)


def _unwritable(store: ObjectStore, key: str, error: Exception) -> StoreError:
    """The error of a store that cannot be written, with what may help."""
    hint = "choose another `store` or make it writable"
    if store.uri.startswith("s3:"):
        from storage.objects.s3_store import CHECKSUMS, S3Store

        if _takes_any(S3Store(store.uri, checksums="when_required"), key):
            return StoreError(
                f"store {store.uri} refuses the checksums that AWS clients add to what they write (aws-chunked bodies, "
                f"x-amz-checksum headers), and takes it without them: set {CHECKSUMS}=when_required"
            )
        hint = "check that the bucket exists, the endpoint and the AWS credentials"
    return StoreError(f"store {store.uri} cannot be written ({error}); {hint}")


def _takes_any(store: ObjectStore, key: str) -> bool:
    """True if the store accepts an unconditional write, so it was the condition that it refused."""
    with contextlib.suppress(Exception):  # the first error matters
        store.put(key, b"")
        store.delete([key])
        return True
    return False
