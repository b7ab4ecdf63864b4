"""Creating, finding and resuming runs in a store: `run.json`, frozen, and the run's log.

One trainer per run: the log fences every step, and a lock says so before anything heavy starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import operator
import os
import platform
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from settings.errors import InvalidInput, NotFound, UserError, ranges
from settings.places.hints import command
from settings.places.run_paths import absolute_paths, local_paths, moved_paths, recorded_paths
from settings.places.state_folder import home
from settings.redaction import read_json, without_secrets
from storage.log.entries import Outcome, Policy
from storage.log.run_log import RunLog
from storage.log.run_state import LogDamaged
from storage.objects.digests import sha256_of, sha256_of_json
from storage.objects.object_store import LocalStore, ObjectStore, writable
from storage.objects.opening import probe

Made = TypeVar("Made")

MAY_CHANGE = frozenset({"steps", "tracking", "store"})
"""Configuration keys that a resumed run may set to other values: they do not change what a committed step means."""

MAY_DIFFER = frozenset(
    {
        "train.num_ranks",
        "train.sequence_parallel",
        "train.num_replicas",
        "train.tokens_per_microbatch",
        "train.logits_gib",
        "train.activation_checkpointing",
        "train.offload_activations",
        "train.offload_optimizer",
        "engine.share",
        "engine.vllm.gpu_memory_utilization",
        "engine.vllm.kv_cache_memory_bytes",
        "rollout.num_workers",
        "rollout.max_concurrent",
        "rollout.on_out_of_room",
        "retention",
    }
)
"""Keys that a resumed run may change: where it computes, in how much memory, what it keeps, and `on_out_of_room`, so
that a run from before that key can keep its behaviour. Replays use the recorded values."""

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_TABLES = ("evaluation", "rollout", "engine", "train")
"""Tables of every configuration."""
_LONGEST_STALL = 1800.0
"""Seconds, for a run whose configuration does not say."""
_TRIES = 5
_LOOK_SECONDS = 0.02
"""Longer than `is_training` holds the lock in order to look."""


class RunExists(InvalidInput):
    """The run id is taken by a run with another configuration."""


class RunBusy(UserError):
    """Another process is training this run."""

    def __init__(self, log: RunLog, process: str) -> None:
        super().__init__(
            f"run {log.run_id!r} is being trained by process {process or '?'}; wait for it, stop it with "
            f"`{command('stop', log.run_id, store=log.store.uri)}`, or use another `run` id"
        )
        self.pid = int(process) if process.isdecimal() else None
        """Id of the process that trains; None until it has written it."""


def create_run(
    store: ObjectStore,
    run_id: str,
    config: dict[str, Any],
    *,
    folder: Path | None = None,
    defaults: dict[str, Any] | None = None,
) -> RunLog:
    """Create the run, or open it again when its configuration is the same; without a step it begins anew with another.

    Paths are recorded relative to `folder`, by default the current one. `defaults` holds the default of every key: an
    older run was made with it if its configuration lacks the key.

    Raises `RunExists`, which names the keys that differ and a free run id, `RunBusy`, and `InvalidInput` for an
    unusable id.
    """
    check_run_id(run_id)
    folder = (folder or Path.cwd()).absolute()
    frozen = recorded_paths(_frozen(config), folder)
    document = {"run_id": run_id, "folder": str(folder), "config": frozen, "config_sha256": sha256_of_json(frozen)}
    document["birth"] = uuid.uuid4().hex
    key = f"runs/{run_id}/run.json"
    if not store.put_if_absent(key, json.dumps(document, indent=1).encode()):
        log = open_run(store, run_id)
        if continues(log, config, defaults=defaults):
            return log
        with trainer_lock(log):
            remove_run(log)
        return create_run(store, run_id, config, folder=folder, defaults=defaults)
    return open_run(store, run_id)


def check_run_id(run_id: str) -> None:
    """Raise `InvalidInput` for a name that cannot be a folder's in every store."""
    if not _RUN_NAME.fullmatch(run_id):
        raise InvalidInput(f"run = {run_id!r}: use letters, digits, dot, dash and underscore, at most 100")


def continues(log: RunLog, config: dict[str, Any], *, defaults: dict[str, Any] | None = None) -> bool:
    """True if a run has this configuration, False if it has another one and no step yet; see `create_run`.

    Raises `RunExists` if it has another one and steps.
    """
    recorded, requested = run_config(log), absolute_paths(_frozen(config), Path.cwd())
    local = moved_paths(recorded, local_config(log), requested)
    differences = _differences(_filled_in(local, _frozen(defaults or {})), requested)
    if differences and log.state.step:
        raise RunExists(
            f"run {log.run_id!r} in {log.store.uri} was started with another configuration; these keys differ: "
            f"{', '.join(differences)}. Put them back to continue it, or start a new one with "
            f"run = {_free_id(log.store, log.run_id)!r}"
        )
    return not differences


def remove_run(log: RunLog) -> None:
    """Delete a run with its log, shards and policies, for good. If it is cut off, the same call goes on.

    What MLflow knows of the run stays there.
    """
    files = [file.key for file in log.store.walk(log.prefix)]
    last = log.key("run.json")  # until then it is a run, and nothing takes its name
    files.sort(key=lambda key: (key == last, not key.startswith(log.key("log/")), key))
    log.store.delete(files)
    if isinstance(log.store, LocalStore):
        shutil.rmtree(log.store.root / log.prefix)


def model_key(model: str) -> str:
    """Where the store keeps a reference model of a run whose log does not say: earlier versions named it by the string
    that a user gave."""
    return f"models/{Path(model).name}-{sha256_of_json(model)[:8]}"


def open_run(store: ObjectStore, run_id: str, *, appends: bool = False) -> RunLog:
    """The log of an existing run, folded. If the caller `appends` to it, the store is probed, without data of size.

    Raises `NotFound`, which lists the runs that exist, `LogDamaged`, and what `probe` does.
    """
    log = RunLog(store, run_id)
    try:
        if not _RUN_NAME.fullmatch(run_id):
            raise FileNotFoundError
        _run_document(log)
    except FileNotFoundError:
        names = ", ".join(store.names("runs")) or "none yet"
        raise NotFound(f"no run {run_id!r} in {store.uri}; runs there: {names}") from None
    if appends:
        probe(store, with_data=False)
    log.refresh()
    return log


class RunLogs:
    """The runs of a store, kept open: each look folds in what is new. Threads may share one."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self._opened: dict[str, tuple[list[bytes | None], RunLog]] = {}

    def look(self, describe: Callable[[RunLog], Made]) -> tuple[dict[str, Made], dict[str, str]]:
        """What `describe` says of every run, by name; and the reason for each folder of which it can say nothing."""
        runs: dict[str, Made] = {}
        damaged: dict[str, str] = {}
        for name in self.store.names("runs"):
            try:
                runs[name] = describe(self.open(name))
            except NotFound:
                damaged[name] = "it has no run.json: it is no run, or is being removed"
            except Exception as error:  # noqa: BLE001 - whatever one run has come to, the others are served
                has_own_sentence = isinstance(error, UserError | OSError)
                damaged[name] = without_secrets(str(error) if has_own_sentence else f"{type(error).__name__}: {error}")
        return runs, damaged

    def open(self, name: str) -> RunLog:
        """One run, as it is now. Raises `NotFound`, `LogDamaged`, `StoreError`, `OSError`."""
        folder = f"runs/{name}"
        document, first = self.store.get_many([f"{folder}/run.json", f"{folder}/log/{0:020d}.json"])
        if document is None:
            self._opened.pop(name, None)
            raise NotFound(f"no run {name!r} in {self.store.uri}; it may have been removed")
        _parsed(document, source=f"{self.store.uri}/{folder}/run.json")
        begun, log = self._opened.get(name) or ([], RunLog(self.store, name))
        if begun not in ([], [document, None], [document, first]):  # removed, and begun anew under its name
            log = RunLog(self.store, name)
        try:
            log.refresh()
        except UserError:
            self._opened.pop(name, None)  # once it is mended, it is read from the beginning
            raise
        self._opened[name] = ([document, first], log)
        return log


def find_policy(log: RunLog, version: int | None) -> Policy:
    """A policy that has its weights, by default the newest. Raises `InvalidInput` for a version without weights."""
    state = log.state
    if state.live is None:
        raise InvalidInput(f"run {log.run_id!r} has no policy yet; train it first")
    try:
        number = state.newest_version if version is None else operator.index(version)  # NumPy has whole numbers too
    except TypeError:
        raise InvalidInput(f"policy version {version!r} is no whole number") from None
    if number not in state.policies:
        raise InvalidInput(f"run {log.run_id!r} has no policy version {number}; it has 0 to {state.newest_version}")
    if number in state.retired_policies:
        left = ranges(sorted(state.policies.keys() - state.retired_policies))
        again = command("replay", log.run_id, "--step", str(number), "--save", "FOLDER", store=log.store.uri)
        raise InvalidInput(
            f"policy version {number} of run {log.run_id!r} was retired: its weights are gone; there are those of "
            f"{left or 'none'}" + (f", and `{again}` trains it again if its shards are there" if number else "")
        )
    return state.policies[number]


def run_config(log: RunLog) -> dict[str, Any]:
    """The run's frozen configuration; its paths are relative to the folder of the run file."""
    config: dict[str, Any] = _run_document(log)["config"]
    return config


def birth_id(log: RunLog) -> str:
    """Unique id of a run: another run of its name has another one, and it stays if the store is moved. Empty in a run
    from before it was recorded."""
    return str(_run_document(log).get("birth", ""))


def local_config(log: RunLog) -> dict[str, Any]:
    """The run's configuration with absolute paths, from the folder of the run file. If that was moved, or on another
    machine, it is looked for below the current folder and beside the store. In a run from before the folder was
    recorded, paths start from these two."""
    document, bases = _run_document(log), [Path.cwd()]
    if isinstance(log.store, LocalStore):
        bases += list(log.store.root.parents)[1:2]
    written = Path(document.get("folder", "/"))
    tails = [Path(*written.parts[length:]) for length in range(1, len(written.parts) + 1)]
    moved = [base / tail for base in bases for tail in tails if (base / tail).is_dir()]
    return local_paths(document["config"], [written, *moved] if "folder" in document else bases)


def _run_document(log: RunLog) -> dict[str, Any]:
    key = log.key("run.json")
    return _parsed(log.store.get(key), source=f"{log.store.uri}/{key}")


def _parsed(document: bytes, *, source: str) -> dict[str, Any]:
    """A `run.json`. Raises `LogDamaged` for one that no version has written."""
    try:
        values: dict[str, Any] = read_json(document)
        config = values["config"]
        tables = [config.get(name, {}) for name in _TABLES] if isinstance(config, dict) else [config]
        if all(isinstance(table, dict) for table in tables) and isinstance(values.get("folder", ""), str):
            return values
        problem = "its values have the wrong types"
    except (ValueError, KeyError, TypeError) as error:
        problem = repr(error)
    raise LogDamaged(f"{source} cannot be read: {problem}; put it back from a copy of the store")


@contextlib.contextmanager
def trainer_lock(log: RunLog) -> Iterator[None]:
    """Hold the right to train this run on this machine; the kernel frees it however the process ends.

    Raises `RunBusy`. On S3 the lock covers one state folder; elsewhere, the log refuses a second trainer's first step.
    """
    with _opened(_lock_file(log)) as file:
        for tries_left in reversed(range(_TRIES)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not tries_left:
                    file.seek(0)
                    raise RunBusy(log, file.read().strip()) from None
                time.sleep(_LOOK_SECONDS)  # the holder may be `is_training`
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def is_training(log: RunLog) -> bool:
    """True if a process of this machine trains the run; on S3, one with this state folder."""
    with contextlib.suppress(FileNotFoundError), open(_lock_file(log)) as file:  # another user's may be read alone
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def outcome(log: RunLog) -> Outcome | Literal["running", "vanished"]:
    """How the run's newest session ended, as the log says; `running` if it has not, or if the run is paused.

    A driver that was killed wrote nothing: it has `vanished` if it worked on this machine (on S3, with this state
    folder too) and its lock is free, or if elsewhere it has been silent for twice the time after which it would have
    reported a stall.
    """
    state = log.state
    if state.ended is not None:
        return state.ended.outcome
    if not state.sessions or state.paused or is_training(log):
        return "running"
    if 0 < state.sessions[-1].steps <= state.step:  # sessions of older versions did not say how they ended
        return "finished"
    host = state.sessions[-1].host
    is_here = host == platform.node() or (not host and isinstance(log.store, LocalStore))
    is_here = is_here and (isinstance(log.store, LocalStore) or _lock_file(log).exists())
    if is_here:
        return "vanished"
    stall = float(run_config(log).get("rollout", {}).get("stall_timeout", _LONGEST_STALL))
    return "vanished" if time.time() - log.last_written_at > 2 * stall else "running"


@contextlib.contextmanager
def teller_lock(log: RunLog) -> Iterator[None]:
    """Hold the right to send this run to MLflow from this machine; waits for another holder."""
    with _opened(_lock_file(log, "teller")) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _lock_file(log: RunLog, holder: str = "trainer") -> Path:
    if isinstance(log.store, LocalStore):
        return log.store.root / log.key(f"{holder}.lock")
    run = sha256_of(f"{log.store.uri}/{log.run_id}".encode())[:16]
    return home() / "locks" / f"{run}.{holder}.lock"


def _opened(lock: Path) -> IO[str]:
    with writable(lock):
        lock.parent.mkdir(parents=True, exist_ok=True)
        return open(lock, "a+")


def _frozen(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a configuration that a run keeps."""
    return {key: value for key, value in config.items() if key not in MAY_CHANGE}


def _filled_in(value: Any, defaults: Any) -> Any:
    """A configuration with defaults for missing keys, table by table; a table of another `kind` has other defaults."""
    if not (isinstance(value, dict) and isinstance(defaults, dict)):
        return value
    if "kind" in defaults and value.get("kind", defaults["kind"]) != defaults["kind"]:
        return value
    return {key: _filled_in(setting, defaults.get(key)) for key, setting in (defaults | value).items()}


def _differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """Dotted keys with different values, as `key (old → new)`."""
    if prefix[:-1] in MAY_DIFFER:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        return [line for k in keys for line in _differences(old.get(k), new.get(k), f"{prefix}{k}.")]
    return [] if old == new else [f"{prefix[:-1]} ({old!r} → {new!r})"]


def _free_id(store: ObjectStore, run_id: str) -> str:
    number = 2
    while store.exists(f"runs/{run_id}-{number}/run.json"):
        number += 1
    return f"{run_id}-{number}"
