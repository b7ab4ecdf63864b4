"""Where bytes live: one small interface over a local folder and S3.

In: a URI (`file:///data/millrace`, a plain path, or `s3://bucket/prefix`). Out: an `ObjectStore`.
The one operation everything else rests on is `put_if_absent`: of many writers of one key exactly one wins.
Locally that is `os.link` of a finished temporary file (fsspec's exists-then-write lets two win);
on S3 it is `If-None-Match: *`.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlparse

import pyarrow as pa
import pyarrow.dataset


class StoreError(Exception):
    """The store cannot be used as asked; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """One key of a store, as a listing shows it."""

    key: str
    num_bytes: int
    modified_at: float
    """Unix seconds on the store's clock."""


class ObjectStore(Protocol):
    """Keys are relative paths with `/`; values are bytes."""

    uri: str

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write `data` unless `key` exists; True for the one writer that wins."""

    def put(self, key: str, data: bytes) -> None:
        """Write or replace; readers see the old or the new bytes, never a mixture."""

    def get(self, key: str) -> bytes:
        """The bytes at `key`; `FileNotFoundError` when there are none."""

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """The bytes at each key, null where there are none; on S3 many requests are under way at once."""

    def exists(self, key: str) -> bool:
        """True when `key` has a value."""

    def delete(self, keys: Sequence[str]) -> None:
        """Remove keys; one that does not exist is no error."""

    def walk(self, prefix: str) -> list[StoredFile]:
        """Every key under the folder `prefix`, at any depth, sorted; for housekeeping, never for truth."""

    def dataset(self, keys: Sequence[str], schema: pa.Schema) -> pa.dataset.Dataset:
        """The Arrow IPC files at `keys` as one dataset, read column by column when somebody asks."""

    def names(self, prefix: str) -> list[str]:
        """Names directly under the folder `prefix`, sorted; for people and housekeeping, never for truth."""

    def put_folder(self, folder: Path, prefix: str, *, last: str) -> None:
        """Copy the files of a local folder, `last` after all others, so its presence means the rest is there."""

    def fetch_folder(self, prefix: str, cache: Path) -> Path:
        """A local folder with the files under `prefix`: the folder itself, or a copy under `cache`."""


class LocalStore:
    """A folder on a local or shared POSIX file system."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = root.as_uri()

    def _path(self, key: str) -> Path:
        return self.root / key

    @contextlib.contextmanager
    def _finished_temporary(self, path: Path, data: bytes) -> Iterator[Path]:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        with self._finished_temporary(path, data) as temporary:
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
        return True

    def put(self, key: str, data: bytes) -> None:
        path = self._path(key)
        with self._finished_temporary(path, data) as temporary:
            os.replace(temporary, path)

    def get(self, key: str) -> bytes:
        return self._path(key).read_bytes()

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return [path.read_bytes() if (path := self._path(key)).exists() else None for key in keys]

    def exists(self, key: str) -> bool:
        return self._path(key).exists()

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._path(key).unlink(missing_ok=True)

    def walk(self, prefix: str) -> list[StoredFile]:
        files = [path for path in self._path(prefix).rglob("*") if path.is_file() and not path.name.startswith(".")]
        return [
            StoredFile(
                key=str(path.relative_to(self.root)), num_bytes=path.stat().st_size, modified_at=path.stat().st_mtime
            )
            for path in sorted(files)
        ]

    def dataset(self, keys: Sequence[str], schema: pa.Schema) -> pa.dataset.Dataset:
        return pa.dataset.dataset([str(self._path(key)) for key in keys], schema=schema, format="ipc")

    def names(self, prefix: str) -> list[str]:
        folder = self._path(prefix)
        return sorted(p.name for p in folder.iterdir() if not p.name.startswith(".")) if folder.is_dir() else []

    def put_folder(self, folder: Path, prefix: str, *, last: str) -> None:
        for file in _last_after_others(folder, last):
            self.put(f"{prefix}/{file.name}", file.read_bytes())

    def fetch_folder(self, prefix: str, cache: Path) -> Path:
        folder = self._path(prefix)
        if not folder.is_dir():
            raise FileNotFoundError(folder)
        return folder


class S3Store:
    """A prefix of a bucket, through s3fs; credentials and endpoint come from the usual AWS chain."""

    def __init__(self, uri: str, **options: Any) -> None:
        import s3fs

        self.uri = uri.rstrip("/")
        self._prefix = self.uri.removeprefix("s3://")
        self._fs = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True, **options)

    def _path(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def put_if_absent(self, key: str, data: bytes) -> bool:
        try:
            self._fs.pipe_file(self._path(key), data, mode="create")
        except FileExistsError:
            return False
        except OSError as error:
            # AWS and moto raise FileExistsError; Ceph's answer reaches us as EINVAL with the HTTP status in the cause.
            if _http_status(error) in (409, 412):
                return False
            raise
        return True

    def put(self, key: str, data: bytes) -> None:
        self._fs.pipe_file(self._path(key), data)

    def get(self, key: str) -> bytes:
        return bytes(self._fs.cat_file(self._path(key)))

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        if not keys:
            return []
        found = self._fs.cat([self._path(key) for key in keys], on_error="return")
        values = [found[self._path(key)] for key in keys]
        for value in values:
            if isinstance(value, BaseException) and not isinstance(value, FileNotFoundError):
                raise value
        return [value if isinstance(value, bytes) else None for value in values]

    def exists(self, key: str) -> bool:
        return bool(self._fs.exists(self._path(key)))

    def delete(self, keys: Sequence[str]) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm([self._path(key) for key in keys])

    def walk(self, prefix: str) -> list[StoredFile]:
        found = self._fs.find(self._path(prefix), detail=True)
        return [
            StoredFile(
                key=path.removeprefix(f"{self._prefix}/"),
                num_bytes=info["size"],
                modified_at=info["LastModified"].timestamp(),
            )
            for path, info in sorted(found.items())
        ]

    def dataset(self, keys: Sequence[str], schema: pa.Schema) -> pa.dataset.Dataset:
        return pa.dataset.dataset([self._path(key) for key in keys], schema=schema, format="ipc", filesystem=self._fs)

    def names(self, prefix: str) -> list[str]:
        try:
            return sorted(path.rsplit("/", 1)[-1] for path in self._fs.ls(self._path(prefix), detail=False))
        except FileNotFoundError:
            return []

    def put_folder(self, folder: Path, prefix: str, *, last: str) -> None:
        for file in _last_after_others(folder, last):
            self._fs.put_file(str(file), self._path(f"{prefix}/{file.name}"))

    def fetch_folder(self, prefix: str, cache: Path) -> Path:
        target = cache / prefix
        names = self.names(prefix)
        if not names:
            raise FileNotFoundError(self._path(prefix))
        target.mkdir(parents=True, exist_ok=True)
        for name in names:
            if not (target / name).exists():
                partial = target / f".{name}.{uuid.uuid4().hex}.tmp"
                self._fs.get_file(self._path(f"{prefix}/{name}"), str(partial))
                os.replace(partial, target / name)
        return target


def open_store(uri: str) -> ObjectStore:
    """Open a store by URI.

    Raises `StoreError` for a scheme other than `file`, `s3` or a plain path, and for a `file` URI that names a host.
    """
    parsed = urlparse(uri)
    if parsed.scheme == "s3":
        return S3Store(uri)
    if parsed.scheme == "file" and parsed.netloc:
        raise StoreError(f"store {uri!r}: {parsed.netloc!r} would be a host; a file URI has three slashes: file:///…")
    if parsed.scheme in ("", "file"):
        path = unquote(parsed.path) if parsed.scheme else uri  # `LocalStore.uri` quotes spaces and the like
        return LocalStore(Path(path).expanduser().resolve())
    raise StoreError(f"store {uri!r}: unknown scheme {parsed.scheme!r}; use a folder, file:///… or s3://bucket/prefix")


def probe(store: ObjectStore) -> bool:
    """Write one key twice with put-if-absent: True where the second write is refused, as it must be.

    Raises `StoreError` when nothing can be written at all. False means that two writers would overwrite
    each other, so only one may use the store.
    """
    key = f"probe/{uuid.uuid4().hex}"
    try:
        first = store.put_if_absent(key, b"1")
        second = store.put_if_absent(key, b"2")
    except Exception as error:  # botocore's own errors (no endpoint, no credentials) are no OSError
        hint = "choose another `store` or make it writable"
        if isinstance(store, S3Store):
            hint = "check that the bucket exists, the endpoint and the AWS credentials"
        raise StoreError(f"store {store.uri} cannot be written ({error}); {hint}") from error
    return first and not second


def _last_after_others(folder: Path, last: str) -> list[Path]:
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    return [p for p in files if p.name != last] + [p for p in files if p.name == last]


def _http_status(error: BaseException) -> int | None:
    """Status code of the botocore answer behind an s3fs error."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return int(status) if status is not None else None
        error = error.__cause__  # type: ignore[assignment]
    return None
