"""Policies in the store, whole or as a delta: write them, and fetch any of them as a local, verified folder.

In: the whole folder that a trainer wrote, or a policy of the log. Out: files in the store, or a folder in HF layout,
which `transformers` and vLLM load.

    whole folder ─▶ PolicyWriter ─▶ policies/<v>-<attempt>/  every file                  an anchor
                         └────────▶ policies/<v>-<attempt>/  delta.safetensors           against the newest anchor
    PolicyReader ◀── the store's own folder, or its copy in the cache                    an anchor
          └────────◀ anchor + delta ─▶ cache/whole/…, its digest compared with the log   a delta

The seal of a folder shows which of the two it is: a trainer may replace a damaged delta by the whole weights.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import uuid
from pathlib import Path

from storage.log.entries import Policy
from storage.log.run_log import RunLog
from storage.objects.digests import (
    DIGEST_FILE,
    WEIGHTS_FILE,
    DigestMismatch,
    Seal,
    read_seal,
    seal_folder,
    sha256_of,
    verify_folder,
)
from storage.objects.object_store import LocalStore, linked, reserved_bytes, room_for
from storage.objects.staging import lock_folder, locked_folder, staging_folder
from storage.policies.deltas import apply_delta, read_about, write_delta

logger = logging.getLogger("millrace.policies")

DELTA_FILE = "delta.safetensors"
LARGEST_DELTA = 0.5
"""Share of the whole's size. A larger delta is not worth reading two files instead of one."""
HELD = 3
"""Folders made from deltas that a reader keeps: an engine may have to go back to an earlier policy."""


class DamagedDelta(DigestMismatch):
    """A policy cannot be made from its anchor and its delta; the message has the reason and the remedy."""


class PolicyWriter:
    """Writes the policies of one run: every `anchor_every`th whole, the others as deltas against it."""

    def __init__(self, log: RunLog, cache: Path, *, anchor_every: int) -> None:
        self._log = log
        self._cache = cache
        self._anchor_every = anchor_every
        self._verified: tuple[str, Path] | None = None
        """Store path and local folder of an anchor that this writer wrote or verified."""
        self._kept = contextlib.ExitStack()

    def put(self, folder: Path, path: str, *, version: int) -> tuple[int | None, dict[str, float]]:
        """Give a sealed folder in HF layout to the store as `path`, or a delta if one is due and smaller.

        Returns the version that the delta is against, None if the policy is whole; and metrics for the step: its bytes
        in the store, and with a delta the share of the weights whose bits differ from the anchor's. Raises
        `storage.objects.object_store.StoreFull`.
        """
        anchor = self._anchor_of(version)
        if anchor is not None:
            with tempfile.TemporaryDirectory(prefix="millrace-", dir=folder.parent) as scratch:
                changed = self._write_delta(folder, anchor, Path(scratch))
                if changed is not None:
                    self._log.store.put_folder(Path(scratch), path, last=DIGEST_FILE, given=True)
                    num_bytes = float(_size(Path(scratch)))
                    return anchor.version, {"policy_bytes": num_bytes, "policy_changed_fraction": changed}
        self._log.store.put_folder(folder, path, last=DIGEST_FILE, given=True)
        if self._anchor_every > 1:
            self._verified = path, self._keep(folder, path)
        return None, {"policy_bytes": float(_size(folder))}

    def _anchor_of(self, version: int) -> Policy | None:
        """The newest whole policy; None if the next whole one is due. The base model is no anchor: its layout may
        differ."""
        state = self._log.state
        for earlier in range(version - 1, max(0, version - self._anchor_every), -1):
            policy = state.policies[earlier]
            if policy.anchor is None and policy.path != state.policies[0].path:
                return None if earlier in state.retired_policies else policy
        return None

    def _write_delta(self, folder: Path, anchor: Policy, target: Path) -> float | None:
        """Make a sealed folder with the delta; returns the changed share of the weights, None without a delta."""
        seal = read_seal(folder)
        try:
            if self._verified is None or self._verified[0] != anchor.path:
                fetched = self._log.store.fetch_folder(anchor.path, self._cache)
                verify_folder(fetched)
                self._verified = anchor.path, fetched
            anchor_folder = self._verified[1]
            anchor_seal = read_seal(anchor_folder)
            is_alike = seal.files.keys() == anchor_seal.files.keys() and _beside(seal) == _beside(anchor_seal)
            if not is_alike or _weights(seal) != [WEIGHTS_FILE]:
                return None
            changed = write_delta(
                folder / WEIGHTS_FILE,
                anchor_folder / WEIGHTS_FILE,
                target / DELTA_FILE,
                most_bytes=int((folder / WEIGHTS_FILE).stat().st_size * LARGEST_DELTA),
                about={"anchor_sha256": anchor.weights_sha256, "weights_sha256": seal.weights_sha256},
            )
        except (FileNotFoundError, DigestMismatch) as error:  # a damaged anchor, or one that is gone
            logger.warning("the next policy is written whole, because its anchor cannot be read: %s", error)
            return None
        if changed is not None:
            seal_folder(target)
        return changed

    def _keep(self, folder: Path, path: str) -> Path:
        """A local copy of the folder that was just put, so that it need not be fetched."""
        if isinstance(self._log.store, LocalStore):
            return self._log.store.fetch_folder(path, self._cache)
        self._kept.close()
        kept = self._kept.enter_context(staging_folder(self._cache))
        for file in folder.iterdir():
            if not linked(file, kept / file.name):
                shutil.copyfile(file, kept / file.name)
        return kept


class PolicyReader:
    """Fetches the policies of one run. The last `HELD` folders that it made from deltas stay while it lives.

    Several processes may share a cache. A folder in use is locked (`flock`); the others are removed when the next one
    is made.
    """

    def __init__(self, log: RunLog, cache: Path) -> None:
        self._log = log
        self._cache = cache
        self._held: dict[Path, int] = {}
        """Folder → descriptor of the lock on it, the oldest first."""

    def damage_of(self, policy: Policy) -> str:
        """Why a policy cannot be made from its delta; empty if it can, or if it is whole."""
        try:
            if policy.anchor is not None:
                self.fetch(policy)
        except DamagedDelta as error:
            return str(error)
        return ""

    def fetch(self, policy: Policy) -> Path:
        """A local, verified folder in HF layout. Damaged copies of a remote store's files are fetched again.

        Raises `DamagedDelta` if the policy is a delta and it or its anchor differs from the log, else
        `FileNotFoundError` and `storage.objects.digests.DigestMismatch`.
        """
        self._forget_retired_copies()
        try:
            return self._fetch(policy)
        except DigestMismatch:
            if not self._forget_damaged_copies(policy):
                raise
            return self._fetch(policy)

    def _fetch(self, policy: Policy) -> Path:
        try:
            folder = self._log.store.fetch_folder(policy.path, self._cache)
            weights_sha256 = verify_folder(folder)
            if _weights(read_seal(folder)) == [DELTA_FILE]:
                return self._whole(policy, folder)
            if weights_sha256 != policy.weights_sha256:
                raise DigestMismatch(f"{folder} holds other weights than the log says policy {policy.version} has")
            return folder
        except (FileNotFoundError, DigestMismatch) as error:
            if policy.anchor is None:
                raise
            raise DamagedDelta(
                f"policy {policy.version} cannot be made from its anchor, policy {policy.anchor}: {error}. Put the "
                "files back from a copy. A run that is started again also makes its newest policy anew, from the "
                "recorded shards"
            ) from error

    def _forget_retired_copies(self) -> None:
        """Remove the copies of policies whose files retention has removed from a remote store."""
        copies = self._cache / sha256_of(self._log.store.uri.encode())[:16] / self._log.key("policies")
        if isinstance(self._log.store, LocalStore) or not copies.is_dir():
            return
        for folder in copies.iterdir():
            version = folder.name.partition("-")[0]
            if version.isdecimal() and int(version) in self._log.state.retired_policies:
                with contextlib.suppress(OSError):  # another process was faster
                    _remove(folder)

    def _forget_damaged_copies(self, policy: Policy) -> bool:
        """Remove damaged copies of the files of the policy and its anchor; True if there were any."""
        if isinstance(self._log.store, LocalStore):
            return False  # there are no copies
        anchor = self._log.state.policies.get(policy.anchor) if policy.anchor else None
        forgotten = False
        for path in [policy.path, *([anchor.path] if anchor else [])]:
            with contextlib.suppress(FileNotFoundError):
                folder = self._log.store.fetch_folder(path, self._cache)
                try:
                    verify_folder(folder)
                except DigestMismatch as error:
                    logger.warning("a copy in the cache is damaged and fetched again: %s", error)
                    _remove(folder)
                    forgotten = True
        return forgotten

    def _whole(self, policy: Policy, delta_folder: Path) -> Path:
        target = self._cache / "whole" / sha256_of(self._log.store.uri.encode())[:16] / policy.path
        if not self._hold(target, policy):
            target.parent.mkdir(parents=True, exist_ok=True)
            with locked_folder(target.parent, fcntl.LOCK_EX):  # one process at a time makes folders and removes them
                if not self._hold(target, policy):
                    if target.exists():
                        _remove(target)
                    self._make(policy, delta_folder, target)
                    self._keep(target, lock_folder(target, fcntl.LOCK_SH))
                self._prune(target.parent)
        return target

    def _make(self, policy: Policy, delta_folder: Path, target: Path) -> None:
        assert policy.anchor is not None, "only what the log calls a delta is sealed as one"
        delta = delta_folder / DELTA_FILE
        anchor = self._log.state.policies[policy.anchor]
        anchor_folder = self._log.store.fetch_folder(anchor.path, self._cache)
        if (expected := read_about(delta)["anchor_sha256"]) != anchor.weights_sha256:
            raise DigestMismatch(f"{delta} is against weights {expected}, not those of policy {anchor.version}")
        seal = read_seal(anchor_folder)
        what, remedy = f"the cache folder {self._cache}", "Delete it (what is needed is made again)"
        with (
            room_for(_size(anchor_folder), target, reserve=reserved_bytes(), what=what, remedy=remedy),
            tempfile.TemporaryDirectory(prefix=".", suffix=".tmp", dir=target.parent) as scratch,
        ):
            made = Path(scratch) / target.name
            made.mkdir()
            for name in seal.files.keys() - {WEIGHTS_FILE}:
                shutil.copyfile(anchor_folder / name, made / name)
            apply_delta(anchor_folder / WEIGHTS_FILE, delta, made / WEIGHTS_FILE)
            # One check is enough: if anchor and delta are intact, so is the result.
            if seal_folder(made) != policy.weights_sha256 or _beside(read_seal(made)) != _beside(seal):
                verify_folder(anchor_folder)
                raise DigestMismatch(f"{delta} does not give the weights of policy {policy.version}")
            try:
                os.rename(made, target)
            except OSError:
                if not target.exists():  # without locks another process may have been faster
                    raise

    def _hold(self, folder: Path, policy: Policy) -> bool:
        """Lock a folder against removal; False if it does not exist or has other weights than the policy."""
        lock = self._held.pop(folder, -1)
        try:
            lock = lock_folder(folder, fcntl.LOCK_SH) if lock < 0 else lock
            # If it was removed before it was locked, another folder has its name.
            if os.path.samestat(os.fstat(lock), os.stat(folder)) and verify_folder(folder) == policy.weights_sha256:
                self._keep(folder, lock)
                return True
        except (FileNotFoundError, DigestMismatch):
            pass
        if lock >= 0:
            os.close(lock)
        return False

    def _keep(self, folder: Path, lock: int) -> None:
        self._held[folder] = lock
        while len(self._held) > HELD:
            os.close(self._held.pop(next(iter(self._held))))

    def _prune(self, folder: Path) -> None:
        """Remove the folders that no process has locked."""
        for old in (path for path in folder.iterdir() if path not in self._held):
            with contextlib.suppress(OSError), locked_folder(old, fcntl.LOCK_EX | fcntl.LOCK_NB):
                _remove(old)


def _remove(folder: Path) -> None:
    """Remove a folder at once: no process sees a part of it under its name."""
    away = folder.parent / f".{folder.name}.{uuid.uuid4().hex}.tmp"
    os.rename(folder, away)
    shutil.rmtree(away, ignore_errors=True)


def _weights(seal: Seal) -> list[str]:
    return [name for name in seal.files if name.endswith(".safetensors")]


def _beside(seal: Seal) -> dict[str, str]:
    """Digests of the files beside the weights: configuration, tokenizer."""
    return {name: digest for name, digest in seal.files.items() if not name.endswith(".safetensors")}


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())
