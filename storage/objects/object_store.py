"""The interface of a store of bytes, and its implementation in a local folder.

In: keys and bytes. Out: `ObjectStore`, which `opening` opens by URI; `LocalStore`.
Everything rests on `put_if_absent`: of many writers of one key exactly one wins. In a folder it is `os.link` of a
finished temporary file (fsspec checks and then writes, so two writers can win), in `s3_store` `If-None-Match: *`.
"""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import pyarrow as pa

from settings.errors import DiskFull, UserError, free_bytes, is_disk_full, nearest_existing, size
from settings.places.hints import command

MIN_FREE_VARIABLE = "MILLRACE_MIN_FREE_GB"
"""Environment variable: gigabytes (10^9 bytes) that shards and policies leave free on a disk; default 1."""

GC_BYTES = 2**16
"""What removing old files needs itself: it says in the log what goes, and then removes it."""
BLOCK_BYTES = 2**20
"""Bytes of a file in memory while it is copied."""


class StoreError(UserError):
    """The store cannot be used as asked; the message says what to do."""


class StoreFull(StoreError, DiskFull):
    """The store has no space for a write; nothing of it was written."""


class ConditionRefused(StoreError):
    """The store answers `If-None-Match` with an error, so `put_if_absent` is impossible."""


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """One key of a store in a listing."""

    key: str
    num_bytes: int
    modified_at: float
    """Unix seconds by the store's clock."""


class ObjectStore(Protocol):
    """Keys are relative paths with `/`; values are bytes.

    A write raises `StoreFull` if there is no space. After a connection error the write may or may not have happened;
    writing the same again is safe.
    """

    uri: str

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write small `data` unless `key` exists; True only for the writer that wins. It may use the reserved space."""

    def put(self, key: str, data: bytes) -> None:
        """Write or replace. Readers see the old or the new bytes, never a mixture."""

    def get(self, key: str) -> bytes:
        """Raises `FileNotFoundError` if the key does not exist."""

    def get_buffer(self, key: str) -> pa.Buffer:
        """`get` without a copy: a local file is memory-mapped, so it must never be shortened in place."""

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """The bytes at each key, None for one that does not exist; S3 serves many requests at once."""

    def exists(self, key: str) -> bool:
        """True if `key` has a value."""

    def modified_at(self, key: str) -> float:
        """When the value was written, in Unix seconds by the store's clock. Raises as `get`."""

    def delete(self, keys: Sequence[str]) -> None:
        """Remove keys. A key that does not exist is no error."""

    def walk(self, prefix: str) -> list[StoredFile]:
        """Every key under the folder `prefix`, at any depth, sorted. For housekeeping only: the log is the truth."""

    def open_input(self, key: str) -> pa.NativeFile:
        """`get` as a file from which Arrow fetches only the pieces it reads."""

    def names(self, prefix: str) -> list[str]:
        """Names directly under the folder `prefix`, sorted. For display and housekeeping only."""

    def put_folder(self, folder: Path, prefix: str, *, last: str, given: bool = False) -> None:
        """Copy the files of a local folder. `last` is copied last, so that its presence means that all are there.

        If they are `given`, they never change again, and a store on their disk links them instead of copying.
        """

    def fetch_folder(self, prefix: str, cache: Path) -> Path:
        """The store's folder `prefix`, or a copy under `cache`. Raises `FileNotFoundError` if there are no files."""


class LocalStore:
    """A folder on a local or shared POSIX file system."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = root.as_uri()

    def put_if_absent(self, key: str, data: bytes) -> bool:
        try:
            self._write(key, io.BytesIO(data), len(data), is_new=True)
        except FileExistsError:
            return False
        return True

    def put(self, key: str, data: bytes) -> None:
        self._write(key, io.BytesIO(data), len(data))

    def get(self, key: str) -> bytes:
        try:
            return self._path(key).read_bytes()
        except NotADirectoryError as error:  # a file has the name of one of its folders
            raise FileNotFoundError(*error.args) from error

    def get_buffer(self, key: str) -> pa.Buffer:
        path = self._path(key)
        if not path.stat().st_size:  # an empty file cannot be mapped
            return pa.py_buffer(b"")
        with pa.memory_map(str(path)) as file:
            return file.read_buffer()

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        def value(key: str) -> bytes | None:
            with contextlib.suppress(FileNotFoundError):
                return self.get(key)
            return None

        return [value(key) for key in keys]

    def exists(self, key: str) -> bool:
        return self._path(key).is_file()

    def modified_at(self, key: str) -> float:
        return self._path(key).stat().st_mtime

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._path(key).unlink(missing_ok=True)

    def walk(self, prefix: str) -> list[StoredFile]:
        return self._walk(prefix, hidden=False)

    def unfinished(self, prefix: str) -> list[StoredFile]:
        """Temporary files under the folder `prefix`, of running writes and of writers that were killed."""
        return [file for file in self._walk(prefix, hidden=True) if file.key.endswith(".tmp")]

    def open_input(self, key: str) -> pa.NativeFile:
        return pa.memory_map(str(self._path(key)))

    def names(self, prefix: str) -> list[str]:
        folder = self._path(prefix)
        return sorted(p.name for p in folder.iterdir() if not p.name.startswith(".")) if folder.is_dir() else []

    def put_folder(self, folder: Path, prefix: str, *, last: str, given: bool = False) -> None:
        files = last_after_others(folder, last)
        num_bytes = sum(file.stat().st_size for file in files)
        with room_for(num_bytes, self.root, reserve=reserved_bytes(), what=f"store {self.uri}"):
            was_whole = self.exists(f"{prefix}/{last}")
            try:
                for file in files:
                    self._put_file(file, f"{prefix}/{file.name}", given=given)
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
                with contextlib.suppress(FileNotFoundError):  # deleted after the folder was listed
                    status = path.stat()
                    key = path.relative_to(self.root).as_posix()
                    files.append(StoredFile(key=key, num_bytes=status.st_size, modified_at=status.st_mtime))
        return sorted(files, key=lambda file: file.key)

    def _put_file(self, file: Path, key: str, *, given: bool = False) -> None:
        with open(file, "rb") as source:
            self._write(key, source, file.stat().st_size, given=file if given else None)

    def _write(
        self, key: str, source: BinaryIO, num_bytes: int, *, is_new: bool = False, given: Path | None = None
    ) -> None:
        """Write a temporary file, then give it its name. If it `is_new`, raises `FileExistsError` for a taken name. If
        the source is a file that is `given` away, that is linked, and not copied, where a link can be."""
        path = self._path(key)
        temporary = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
        reserve = 0 if is_new else reserved_bytes()
        with room_for(num_bytes, path.parent, reserve=reserve, what=f"store {self.uri}"), writable(path):
            try:
                _make_folder(path.parent)
                if given is not None and linked(given, temporary):
                    os.fsync(source.fileno())
                else:
                    with open(temporary, "xb") as file:
                        shutil.copyfileobj(source, file, BLOCK_BYTES)
                        file.flush()
                        os.fsync(file.fileno())
                (os.link if is_new else os.replace)(temporary, path)
                _sync_folder(path.parent)
            finally:
                temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def writable(path: Path) -> Iterator[None]:
    """Raise `StoreError` if `path` may not be written, by its permissions or those of its disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise StoreError(f"no permission to write {path}: {os.strerror(error.errno)}") from error


def linked(file: Path, name: Path) -> bool:
    """Give a file another name; False on another disk, or on one without links."""
    try:
        os.link(file, name)
    except OSError:
        return False
    return True


def reserved_bytes() -> float:
    """Bytes that `put` leaves free on a disk. Raises `StoreError` if the variable is not a number."""
    setting = os.environ.get(MIN_FREE_VARIABLE) or "1"
    try:
        gigabytes = float(setting)
    except ValueError:
        gigabytes = math.nan
    if not gigabytes >= 0:
        raise StoreError(f"{MIN_FREE_VARIABLE}={setting!r} is not a number of gigabytes")
    return gigabytes * 1e9


def checked_key(key: str) -> str:
    """The key, unchanged. Raises `StoreError` if it could lead out of the store: keys come from log entries."""
    if key and (not key.isprintable() or "\\" in key or any(part in ("", ".", "..") for part in key.split("/"))):
        raise StoreError(f"{key!r} is not a key of the store: keys are names joined by single slashes")
    return key


@contextlib.contextmanager
def room_for(num_bytes: int, folder: Path, *, reserve: float, what: str, remedy: str = "") -> Iterator[None]:
    """Raise `StoreFull` unless `num_bytes` and `reserve` fit on the disk of `folder`, or a write inside exceeds it."""

    def full(free: int) -> StoreFull:
        if num_bytes + reserve <= free and has_no_inodes(folder):
            return StoreFull(
                f"{what} is full: {size(free)} free, and no more files fit there, as `df -i` shows. "
                f"{remedy or 'Remove files of the disk'}. Nothing that was committed is lost: the same command "
                "continues"
            )
        room = remedy or f"Make room with `{command('gc')}`, or choose another `store`"
        if not remedy and free < GC_BYTES:
            room = f"Remove other files from that disk: `{command('gc')}` writes too. Or choose another `store`"
        needed = f"{size(num_bytes)} to write" if num_bytes else "more to write"
        reserved = f" and {size(reserve)} to be left free ({MIN_FREE_VARIABLE})" if reserve else ""
        lower = f", or set {MIN_FREE_VARIABLE} (gigabytes) lower" if reserve else ""
        return StoreFull(
            f"{what} is full: {size(free)} free, {needed}{reserved}. "
            f"{room}{lower}. "
            "Nothing that was committed is lost: the same command continues"
        )

    free = free_bytes(folder)
    if num_bytes + reserve > free:
        raise full(free)
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # libraries have their own
        if is_disk_full(error):
            raise full(free_bytes(folder)) from error
        raise


def has_no_inodes(folder: Path) -> bool:
    """True if the disk that a folder is on, or will be, has a number of files and no more of it."""
    disk = os.statvfs(nearest_existing(folder))
    return disk.f_files > 0 and not disk.f_favail


def last_after_others(folder: Path, last: str) -> list[Path]:
    """The files of a folder, sorted, `last` after all others."""
    files = [path for path in folder.iterdir() if path.is_file()]
    return sorted(files, key=lambda file: (file.name == last, file.name))


def _make_folder(folder: Path) -> None:
    """Make a folder and its parents so that they survive a power loss."""
    if not folder.exists():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    """Sync a folder's names: without its name, a synced file is lost after a power loss."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems sync names themselves and refuse this call
            raise
    finally:
        os.close(descriptor)
