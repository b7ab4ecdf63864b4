"""Open a store by its URI, and test whether its conditional writes work.

In: a URI (`file:///data/millrace`, a plain path, or `s3://bucket/prefix`). Out: an `ObjectStore`.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path
from urllib.parse import unquote, urlparse

from storage.objects.object_store import ConditionRefused, LocalStore, ObjectStore, StoreError, StoreFull


def open_store(uri: str) -> ObjectStore:
    """A store by URI or path. Raises `StoreError` for any other, one with credentials, and an unreadable folder."""
    parsed = urlparse(uri)
    if parsed.scheme == "s3":
        from storage.objects.s3_store import S3Store

        if "@" in parsed.netloc:
            raise StoreError(
                "the store's URI contains credentials, and runs store the URI: use s3://bucket/prefix, and give the "
                "credentials to the AWS chain (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile)"
            )
        return S3Store(uri)
    if parsed.scheme == "file" and parsed.netloc:
        raise StoreError(f"store {uri!r}: {parsed.netloc!r} is a host; a file URI has three slashes: file:///…")
    if parsed.scheme in ("", "file"):
        path = unquote(parsed.path) if parsed.scheme else uri  # `LocalStore.uri` quotes spaces and the like
        root = Path(path).expanduser().resolve()
        try:
            os.scandir(root).close()
        except FileNotFoundError:
            pass  # the first write makes it
        except OSError as error:
            raise StoreError(f"store {root} cannot be opened ({error.strerror}); choose another `store`") from error
        return LocalStore(root)
    raise StoreError(f"store {uri!r}: unknown scheme {parsed.scheme!r}; use a folder, file:///… or s3://bucket/prefix")


def probe(store: ObjectStore) -> bool:
    """Write one key twice with put-if-absent, then remove it: True if the second write is refused, as it must be.

    False: the store ignores the condition, so two writers would overwrite each other. Raises `ConditionRefused`,
    `StoreFull`, or `StoreError` if it cannot be written at all.
    """
    key = f"probe/{uuid.uuid4().hex}"
    try:
        first = store.put_if_absent(key, b"1")
        second = store.put_if_absent(key, b"2")
        store.put(key, b"3")  # needs more free space, and on S3 perhaps another permission
        store.delete([key])
    except Exception as error:
        with contextlib.suppress(Exception):  # the first error matters
            store.delete([key])
        if isinstance(error, StoreFull) or (isinstance(error, ConditionRefused) and _takes_any(store, key)):
            raise
        hint = "choose another `store` or make it writable"
        if store.uri.startswith("s3:"):
            hint = "check that the bucket exists, the endpoint and the AWS credentials"
        raise StoreError(f"store {store.uri} cannot be written ({error}); {hint}") from error
    if not first:
        raise ConditionRefused(f"store {store.uri} reported a new key as already there")
    return not second


def _takes_any(store: ObjectStore, key: str) -> bool:
    """True if the store accepts an unconditional write, so it was the condition that it refused."""
    with contextlib.suppress(Exception):  # the first error matters
        store.put(key, b"")
        store.delete([key])
        return True
    return False
