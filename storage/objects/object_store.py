"""Where bytes live: one small interface over a local folder and S3, and the local folder.

In: keys and bytes. Out: what `storage/objects/opening.py` opens by URI, an `ObjectStore`.
The one operation everything else rests on is `put_if_absent`: of many writers of one key exactly one wins.
Locally that is `os.link` of a finished temporary file (fsspec's exists-then-write lets two win);
on S3 (`storage/objects/s3_store.py`) it is `If-None-Match: *`.
"""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import pyarrow as pa

from settings.errors import UserError

MIN_FREE_VARIABLE = "MILLRACE_MIN_FREE_GB"
"""Environment variable: gigabytes (10^9 bytes) of a disk that shards and policies leave free; 1 unless set."""

STORE_REMEDY = "Make room with `millrace gc`, choose another `store`"
BLOCK_BYTES = 2**20
"""How much of a file is in memory while it is copied."""


class StoreError(UserError):
    """The store cannot be used as asked; the message says what to do."""


class StoreFull(StoreError):
    """There is no room for a write; nothing of it was written, and all that was committed is still there."""


class ConditionRefused(StoreError):
    """The store knows `If-None-Match` and will not do it, so `put_if_absent` is impossible there."""


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """One key of a store, as a listing shows it."""

    key: str
    num_bytes: int
    modified_at: float
    """Unix seconds on the store's clock."""


class ObjectStore(Protocol):
    """Keys are relative paths with `/`; values are bytes.

    Writing raises `StoreFull` where there is no room. An error of the connection leaves open whether the write
    arrived: writing the same again is safe, and so is reading what is there.
    """

    uri: str

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write `data` unless `key` exists; True for the one writer that wins, and for nobody else.

        Meant for small things, log entries above all: they may use the space that `put` leaves free.
        """

    def put(self, key: str, data: bytes) -> None:
        """Write or replace; readers see the old or the new bytes, never a mixture."""

    def get(self, key: str) -> bytes:
        """The bytes at `key`; `FileNotFoundError` when there are none."""

    def get_buffer(self, key: str) -> pa.Buffer:
        """`get` without a copy of a local file, which is mapped: shortening that file would kill its readers."""

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """The bytes at each key, null where there are none; on S3 many requests are under way at once."""

    def exists(self, key: str) -> bool:
        """True when `key` has a value."""

    def delete(self, keys: Sequence[str]) -> None:
        """Remove keys; one that does not exist is no error."""

    def walk(self, prefix: str) -> list[StoredFile]:
        """Every key under the folder `prefix`, at any depth, sorted; for housekeeping, never for truth."""

    def open_input(self, key: str) -> pa.NativeFile:
        """The bytes at `key` for Arrow to read in pieces, of which only those asked for are fetched.

        Raises `FileNotFoundError` when there are none. Damage, and errors of the connection, come up when it is read.
        """

    def names(self, prefix: str) -> list[str]:
        """Names directly under the folder `prefix`, sorted; for people and housekeeping, never for truth."""

    def put_folder(self, folder: Path, prefix: str, *, last: str) -> None:
        """Copy the files of a local folder, `last` after all others, so its presence means the rest is there."""

    def fetch_folder(self, prefix: str, cache: Path) -> Path:
        """A local folder with the files under `prefix`: the folder itself, or a copy under `cache`.

        Raises `FileNotFoundError` when there are none.
        """


class LocalStore:
    """A folder on a local or shared POSIX file system."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = root.as_uri()

    def put_if_absent(self, key: str, data: bytes) -> bool:
        try:
            self._write(key, io.BytesIO(data), len(data), reserve=0, publish=os.link)
        except FileExistsError:
            return False
        return True

    def put(self, key: str, data: bytes) -> None:
        self._write(key, io.BytesIO(data), len(data), reserve=reserved_bytes(), publish=os.replace)

    def get(self, key: str) -> bytes:
        return self._path(key).read_bytes()

    def get_buffer(self, key: str) -> pa.Buffer:
        path = self._path(key)
        if not path.stat().st_size:  # an empty file cannot be mapped
            return pa.py_buffer(b"")
        with pa.memory_map(str(path)) as file:
            return file.read_buffer()

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        found: list[bytes | None] = []
        for key in keys:
            try:
                found.append(self.get(key))
            except FileNotFoundError:
                found.append(None)
        return found

    def exists(self, key: str) -> bool:
        return self._path(key).is_file()

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._path(key).unlink(missing_ok=True)

    def walk(self, prefix: str) -> list[StoredFile]:
        return self._walk(prefix, hidden=False)

    def unfinished(self, prefix: str) -> list[StoredFile]:
        """Temporary files under the folder `prefix`: of writes that are under way, or whose writer was killed."""
        return [file for file in self._walk(prefix, hidden=True) if file.key.endswith(".tmp")]

    def open_input(self, key: str) -> pa.NativeFile:
        return pa.memory_map(str(self._path(key)))

    def names(self, prefix: str) -> list[str]:
        folder = self._path(prefix)
        return sorted(p.name for p in folder.iterdir() if not p.name.startswith(".")) if folder.is_dir() else []

    def put_folder(self, folder: Path, prefix: str, *, last: str) -> None:
        files = last_after_others(folder, last)
        num_bytes = sum(file.stat().st_size for file in files)
        with room_for(num_bytes, self.root, reserve=reserved_bytes(), what=f"store {self.uri}"):
            was_whole = self.exists(f"{prefix}/{last}")
            try:
                for file in files:
                    self._put_file(file, f"{prefix}/{file.name}")
            except StoreFull:
                if not was_whole:
                    self.delete([f"{prefix}/{file.name}" for file in files])
                raise

    def fetch_folder(self, prefix: str, cache: Path) -> Path:
        folder = self._path(prefix)
        if not folder.is_dir():
            raise FileNotFoundError(folder)
        return folder

    def _path(self, key: str) -> Path:
        return self.root / checked_key(key)

    def _walk(self, prefix: str, *, hidden: bool) -> list[StoredFile]:
        files = []
        for folder, _, names in os.walk(self._path(prefix)):
            for path in (Path(folder, name) for name in names if name.startswith(".") == hidden):
                with contextlib.suppress(FileNotFoundError):  # deleted since the folder was listed
                    status = path.stat()
                    key = path.relative_to(self.root).as_posix()
                    files.append(StoredFile(key=key, num_bytes=status.st_size, modified_at=status.st_mtime))
        return sorted(files, key=lambda file: file.key)

    def _put_file(self, file: Path, key: str) -> None:
        with open(file, "rb") as source:
            self._write(key, source, file.stat().st_size, reserve=reserved_bytes(), publish=os.replace)

    def _write(
        self, key: str, source: BinaryIO, num_bytes: int, *, reserve: float, publish: Callable[[Path, Path], None]
    ) -> None:
        """Write a temporary file, and give it its name by `publish`."""
        path = self._path(key)
        temporary = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
        with room_for(num_bytes, path.parent, reserve=reserve, what=f"store {self.uri}"):
            try:
                _make_folder(path.parent)
                with open(temporary, "xb") as file:
                    shutil.copyfileobj(source, file, BLOCK_BYTES)
                    file.flush()
                    os.fsync(file.fileno())
                publish(temporary, path)
                _sync_folder(path.parent)
            except PermissionError as error:
                raise StoreError(f"no permission to write {path}") from error
            finally:
                temporary.unlink(missing_ok=True)


def reserved_bytes() -> float:
    """How much `put` leaves free on a disk. Raises `StoreError` where the variable is no number."""
    setting = os.environ.get(MIN_FREE_VARIABLE) or "1"
    try:
        gigabytes = float(setting)
    except ValueError:
        gigabytes = math.nan
    if not gigabytes >= 0:
        raise StoreError(f"{MIN_FREE_VARIABLE}={setting!r} is not a number of gigabytes")
    return gigabytes * 1e9


def checked_key(key: str) -> str:
    """The key, or the empty prefix, as it is: logs name files of the store, and no entry may lead out of it.

    Raises `StoreError` for a key that is absolute, or has a part that is empty, `.`, `..` or unprintable.
    """
    if key and (not key.isprintable() or "\\" in key or any(part in ("", ".", "..") for part in key.split("/"))):
        raise StoreError(f"{key!r} is no key of a file in the store: keys are names joined by single slashes")
    return key


@contextlib.contextmanager
def room_for(num_bytes: int, folder: Path, *, reserve: float, what: str, remedy: str = STORE_REMEDY) -> Iterator[None]:
    """Raise `StoreFull` unless `num_bytes` fit on the disk of `folder`, which need not exist yet, beside `reserve`.

    The same error comes where a write inside the block finds the disk full, or the quota of this user.
    """

    def full(free: int) -> StoreFull:
        kept = f" and {_size(reserve)} to be left free ({MIN_FREE_VARIABLE})" if reserve else ""
        return StoreFull(
            f"{what} is full: {_size(free)} free, {_size(num_bytes)} to write{kept}. "
            f"{remedy}, or set {MIN_FREE_VARIABLE} (gigabytes) lower. "
            "Nothing that was committed is lost: the same command goes on from there"
        )

    free = _free_bytes(folder)
    if num_bytes + reserve > free:
        raise full(free)
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise full(_free_bytes(folder)) from error
        raise


def last_after_others(folder: Path, last: str) -> list[Path]:
    """The files of a folder in the order in which they are copied."""
    files = [path for path in folder.iterdir() if path.is_file()]
    return sorted(files, key=lambda file: (file.name == last, file.name))


def _free_bytes(folder: Path) -> int:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it, to outlast a power loss."""
    made = []
    while not folder.exists():
        made.append(folder)
        folder = folder.parent
    for new in reversed(made):
        new.mkdir(exist_ok=True)
        _sync_folder(new.parent)


def _sync_folder(folder: Path) -> None:
    """Bring a folder's names to the disk: a file that is synced while its name is not is gone after a power loss."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems sync names by themselves, and refuse to be asked
            raise
    finally:
        os.close(descriptor)


def _size(num_bytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"
