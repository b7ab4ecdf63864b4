"""Find the files of a run that nothing needs any more, and remove them safely.

In: runs, and rules by age, size, aliases and counts. Out: what was, or would be, removed; a `Retire` entry per run.

    walk the files ─▶ fold the log ─▶ plan ─▶ append `Retire` ─▶ readers? ─▶ delete
                          ▲                      │ Conflict: a planned item is needed now
                          └──────────────────────┘

The log records a removal before the first file is deleted. If the process is killed in between, the next call finishes
the deletion. Files without an entry are recorded too: the log then refuses the late entry of their writer.
A reader registers before it folds the log, and we look for readers after `Retire`: either we see the reader, or it sees
the entry.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from storage.log.entries import Retire
from storage.log.history import from_json, to_json
from storage.log.run_log import RunLog
from storage.log.run_state import Conflict
from storage.log.runs import RunLogs, open_run, run_config
from storage.objects.object_store import LocalStore, ObjectStore, StoredFile, StoreError
from storage.retention.rules import Facts, Rules, kept_policies, reach, with_anchors

logger = logging.getLogger("millrace.retention")

Kind = Literal["policy", "state", "shard", "orphan", "temporary"]
Chosen = set[tuple[str, Kind, str]]
"""Run, kind and name of the items to remove."""

_DATA = ("policies", "state", "shards", "failures", "rewards", "readers")
"""Folders of a run in which retention removes."""
_READER_SECONDS = 3 * 3600.0
"""Greatest age of the registration of a living reader, by the store's clock."""
_RENEW_SECONDS = 3600.0
_MOST_CONFLICTS = 100


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A process that reads a run's files."""

    what: str
    """Its purpose: `replay`, `index`."""
    host: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class Item:
    """Files that are removed together."""

    kind: Kind
    name: str
    """Policy version, or the versions that share the files; shard id; or the path inside the run."""
    reason: str
    """Why nothing needs it."""
    num_bytes: int
    modified_at: float
    """Time of the newest file, in Unix seconds by the store's clock."""
    keys: tuple[str, ...]
    retired: bool
    """True if the log has its entry already and only the deletion is missing."""

    @property
    def is_leftover(self) -> bool:
        """True if no log entry needs it, or none ever named it: it is removed whatever its age."""
        return self.retired or self.kind in ("orphan", "temporary")


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What was, or would be, removed from one run."""

    run: str
    num_bytes: int = 0
    """Size of all files of the run before."""
    kept: dict[int, str] = field(default_factory=dict)
    """Kept policy versions and why."""
    items: list[Item] = field(default_factory=list)
    readers: list[Reader] = field(default_factory=list)
    """Current readers; nothing is deleted while there are any."""
    removed: bool = False
    """False after a dry run, or if there were readers."""
    problem: str = ""
    """Why it was skipped: it is damaged, or no run."""

    @property
    def freed_bytes(self) -> int:
        """Size of `items`."""
        return sum(item.num_bytes for item in self.items)

    def by_kind(self) -> dict[Kind, tuple[int, int]]:
        """Count and bytes of `items` per kind."""
        sizes: dict[Kind, list[int]] = defaultdict(list)
        for item in self.items:
            sizes[item.kind].append(item.num_bytes)
        return {kind: (len(of_kind), sum(of_kind)) for kind, of_kind in sizes.items()}


@contextlib.contextmanager
def reading(log: RunLog, what: str, *, quiet: bool = False) -> Iterator[None]:
    """Prevent the deletion of a run's files while the block runs. Refreshes the log after it has registered.

    The registration is renewed every hour. A reader that is killed blocks retention for three hours, by the store's
    clock. A process that cannot write to the store reads without a registration, with a warning unless `quiet`.
    """
    document = json.dumps(to_json(Reader(what=what, host=socket.gethostname(), pid=os.getpid()))).encode()
    ended = threading.Event()

    def register() -> str:
        key = log.key(f"readers/{uuid.uuid4().hex}.json")
        # Unlike `put` this works on a full disk, where retention is to make room; it needs a new name each time.
        log.store.put_if_absent(key, document)
        return key

    def stay_registered(key: str) -> None:
        while not ended.wait(_RENEW_SECONDS):
            with contextlib.suppress(OSError, StoreError):  # the next one comes in time
                old, key = key, register()
                log.store.delete([old])
        with contextlib.suppress(OSError, StoreError):  # its age ends one that cannot be deleted
            log.store.delete([key])

    with contextlib.ExitStack() as at_the_end:
        try:
            thread = threading.Thread(target=stay_registered, args=[register()], name="reader", daemon=True)
            thread.start()
            at_the_end.callback(thread.join)
            at_the_end.callback(ended.set)
        except (OSError, StoreError) as error:
            text = "%s: cannot register as a reader, so retention may remove files meanwhile: %s"
            logger.log(logging.DEBUG if quiet else logging.WARNING, text, what, error)
        log.refresh()
        yield


def collect_garbage(
    store: ObjectStore, run_ids: Sequence[str], rules: Rules, *, dry_run: bool, ignore_readers: bool = False
) -> list[RunReport]:
    """Remove what nothing needs from the named runs, or from all runs of the store if none is named.

    Safe beside producers, trainers and other calls. Raises `FileNotFoundError` for an unknown run, and `LogDamaged` for
    a damaged one that is named; if none is named, damaged runs, and folders that are no run, are reported and skipped.
    """
    now, damaged = _now(store), dict[str, str]()
    if run_ids:
        surveys = {name: _Survey(open_run(store, name), rules, now=now) for name in run_ids}
    else:
        surveys, damaged = RunLogs(store).look(lambda log: _Survey(log, rules, now=now))
    chosen = _choose(surveys.values(), rules, now=now)
    reports = [survey.collect(rules, chosen, dry_run, ignore_readers) for survey in surveys.values()]
    return reports + [RunReport(run=name, problem=reason) for name, reason in damaged.items()]


class RunRetention:
    """The rules of one run, applied again and again while it trains; what an earlier call read of the log is kept."""

    def __init__(self, log: RunLog, rules: Rules) -> None:
        """`log` is this object's own: a call may come from any thread, one at a time."""
        self._log = log
        self.rules = rules
        self._facts = Facts()

    def collect(self) -> RunReport:
        """Remove what no rule keeps, unless the run has readers. Raises `StoreError`, `OSError` and `Conflict`."""
        now = _now(self._log.store)
        survey = _Survey(self._log, self.rules, now=now, facts=self._facts)
        return survey.collect(self.rules, _choose([survey], self.rules, now=now), dry_run=False, ignore_readers=False)


class _Survey:
    """The files of a run as they were listed, and its log, which may have grown since."""

    def __init__(self, log: RunLog, rules: Rules, *, now: float, facts: Facts | None = None) -> None:
        self.log = log
        self._now = now
        # Listed before the log is refreshed: a listed file that the log has retired still needs deleting, and a file
        # that is written later is not listed, so it is never touched. Again and again, only what may be removed is.
        folders = [log.prefix] if facts is None else [log.key(name) for name in _DATA]
        self._files = [file for folder in folders for file in log.store.walk(folder)]
        self.num_bytes = sum(file.num_bytes for file in self._files)
        # A local store keeps temporary files of killed writers; S3 shows only complete objects.
        store = log.store if isinstance(log.store, LocalStore) else None
        self._unfinished = [file for each in folders for file in store.unfinished(each)] if store else []
        self._facts = Facts() if facts is None else facts
        self._asked: dict[str, Any] = run_config(log).get("evaluation", {})
        log.refresh()
        self.plan = self.removable(rules)
        self._readers()  # a run whose files cannot be read is left out before anything is removed

    def _kept(self, rules: Rules) -> dict[int, str]:
        """Policy versions that stay, and why."""
        self._facts.extend(self.log)
        return with_anchors(kept_policies(self.log.state, rules, self._asked), self._facts.anchors)

    def removable(self, rules: Rules) -> list[Item]:
        """What may be removed, whatever its age, unless it is being written."""
        state, facts = self.log.state, self._facts
        kept = self._kept(rules)
        needed_shards, needed_states = reach(state, facts, kept, replay_steps=rules.replay_steps)
        items = []
        going: dict[tuple[int, bool], list[tuple[list[int], list[StoredFile]]]] = defaultdict(list)
        owned = self._by_owner()
        latest = self._now - rules.orphan_seconds
        settled = {owner: max(file.modified_at for file in files) <= latest for owner, files in owned.items()}
        saved = {state_path for state_path, _ in facts.steps}
        unscored = {name: version for name, version in facts.eval_shards.items() if name not in facts.scored_shards}
        # An evaluation commits shard after shard, and its score last.
        running = {version for name, version in unscored.items() if not settled.get(("shards", name), True)}
        for (folder, name), files in owned.items():
            path = self.log.key(f"{folder}/{name}")
            retired = name in state.retired_shards if folder == "shards" else path in state.retired_states
            match folder:
                case "policies" if path in facts.versions_at:
                    versions = facts.versions_at[path]
                    if kept.keys().isdisjoint(versions):  # a retired policy is never kept
                        retired = state.retired_policies.issuperset(versions)
                        anchor = facts.anchors.get(versions[0])
                        # Deltas are removed together with their anchor: they are useless without it.
                        leader = anchor if anchor is not None and not retired and anchor not in kept else versions[-1]
                        going[leader, retired].append((versions, files))
                case "state" if path in saved:
                    if retired or path not in needed_states:
                        reason = "no kept policy and no resume starts from it"
                        items.append(_item("state", path, files, reason, retired))
                case "shards" if name in state.shards:
                    if retired or (name not in needed_shards and unscored.get(name) not in running):
                        reason = "its evaluation never ended" if name in unscored else "no kept policy needs it"
                        items.append(_item("shard", name, files, reason, retired))
                case "readers":
                    if self._now - files[0].modified_at >= _READER_SECONDS:
                        items.append(_item("temporary", path, files, "its reader is gone", False))
                case _ if retired or settled[folder, name]:
                    items.append(_item("orphan", path, files, "no log entry names it", retired))
        for (_, retired), policies in going.items():
            names = ", ".join(str(v) for v in sorted(version for versions, _ in policies for version in versions))
            files = [file for _, of_one in policies for file in of_one]
            items.append(_item("policy", names, files, "no rule keeps it", retired))
        cut_off = [file for file in self._unfinished if file.modified_at <= latest]
        return items + [_item("temporary", file.key, [file], "a write that was cut off", False) for file in cut_off]

    def collect(self, rules: Rules, chosen: Chosen, dry_run: bool, ignore_readers: bool) -> RunReport:
        """Retire and delete the chosen items that may still be removed, unless the run has readers."""
        items, readers = self._still_chosen(rules, chosen), self._readers()
        removed = not dry_run and (ignore_readers or not readers)
        if removed:
            items, readers = self._retire(rules, chosen), self._readers()
            removed = ignore_readers or not readers
        if removed:
            self.log.store.delete([key for item in items for key in item.keys])
            _remove_empty_folders(self.log.store, items)
        return RunReport(
            run=self.log.run_id,
            num_bytes=self.num_bytes,
            kept=self._kept(rules),
            items=items,
            readers=readers,
            removed=removed,
        )

    def _readers(self) -> list[Reader]:
        """The current readers of the run's files."""
        files = [f for f in self.log.store.walk(self.log.key("readers")) if self._now - f.modified_at < _READER_SECONDS]
        documents = self.log.store.get_many([file.key for file in files])
        return [from_json(Reader, json.loads(document)) for document in documents if document is not None]

    def _still_chosen(self, rules: Rules, chosen: Chosen) -> list[Item]:
        return [item for item in self.removable(rules) if (self.log.run_id, item.kind, item.name) in chosen]

    def _retire(self, rules: Rules, chosen: Chosen) -> list[Item]:
        """Append the entry that names the items; returns the items that may be deleted."""
        for _ in range(_MOST_CONFLICTS):
            self.log.refresh()
            items = self._still_chosen(rules, chosen)
            with contextlib.suppress(Conflict):  # an alias was set, or an orphan got its entry: plan again
                self.log.append(self._entry([item for item in items if not item.retired], rules))
                break
        else:
            raise Conflict(f"run {self.log.run_id!r} changed {_MOST_CONFLICTS} times while it was planned; try again")
        # The append refreshed the log. It does not refuse the entry of orphaned rewards, which may have come meanwhile.
        left = {key for item in self.removable(rules) for key in item.keys}
        return [item for item in items if left.issuperset(item.keys)]

    def _entry(self, items: Sequence[Item], rules: Rules) -> Retire:
        """The entry that names the items. Appending an empty one changes nothing."""
        folder = self.log.key("shards/")
        lost = [item.name for item in items if item.kind == "orphan"]
        writers = (self.log.key("policies/"), self.log.key("state/"))
        return Retire(
            shard_ids=[item.name for item in items if item.kind == "shard"]
            + [name.removeprefix(folder) for name in lost if name.startswith(folder)],
            policy_versions=[int(name) for item in items if item.kind == "policy" for name in item.name.split(", ")],
            state_paths=[item.name for item in items if item.kind == "state"]
            + [name for name in lost if name.startswith(writers)],
            reason=str(rules),
        )

    def _by_owner(self) -> dict[tuple[str, str], list[StoredFile]]:
        """The run's data files by what they belong to: failures to their shard, and rewards if the log knows them."""
        state = self.log.state
        owned: dict[tuple[str, str], list[StoredFile]] = defaultdict(list)
        for file in self._files:
            match file.key.removeprefix(f"{self.log.prefix}/").split("/"):
                case ["shards" | "failures", name]:
                    owned["shards", name.removesuffix(".arrow")].append(file)
                case [("policies" | "state" | "readers") as folder, name, *_]:
                    owned[folder, name].append(file)
                case ["rewards", rewards, name]:
                    shard_id = name.removesuffix(".arrow")
                    rescored = state.rescored.get(rewards)
                    if shard_id in state.retired_shards or (rescored is not None and shard_id in rescored.files):
                        owned["shards", shard_id].append(file)
                    else:
                        owned["rewards", f"{rewards}/{name}"].append(file)
                case _:
                    pass  # the log, the search index and other files are not for retention to judge
        return owned


def _item(kind: Kind, name: str, files: Sequence[StoredFile], reason: str, retired: bool) -> Item:
    return Item(
        kind=kind,
        name=name,
        reason="retired before, and not deleted yet" if retired else reason,
        num_bytes=sum(file.num_bytes for file in files),
        modified_at=max(file.modified_at for file in files),
        keys=tuple(file.key for file in files),
        retired=retired,
    )


def _choose(surveys: Collection[_Survey], rules: Rules, *, now: float) -> Chosen:
    """Choose items: leftovers always, the others by age, oldest first, until the size is reached."""
    num_bytes = sum(survey.num_bytes for survey in surveys)
    items = [(survey.log.run_id, item) for survey in surveys for item in survey.plan]
    chosen: Chosen = set()
    for run_id, item in sorted(items, key=lambda pair: (not pair[1].is_leftover, pair[1].modified_at)):
        if not item.is_leftover:
            if now - item.modified_at < rules.older_than_seconds:
                continue
            if rules.max_bytes is not None and num_bytes <= rules.max_bytes:
                break
        num_bytes -= item.num_bytes
        chosen.add((run_id, item.kind, item.name))
    return chosen


def _remove_empty_folders(store: ObjectStore, items: Sequence[Item]) -> None:
    """Remove the empty folders of policies and states. Other folders have several writers, which need them."""
    if isinstance(store, LocalStore):
        folders = {key.rpartition("/")[0] for item in items for key in item.keys}
        for folder in (f for f in folders if f.split("/")[2:3] in (["policies"], ["state"])):
            with contextlib.suppress(OSError):  # not empty, or gone
                (store.root / folder).rmdir()


def _now(store: ObjectStore) -> float:
    """Unix seconds by the store's clock, which measures every age."""
    key = f"clock/{uuid.uuid4().hex}"
    store.put_if_absent(key, b"")  # unlike `put` this works on a full disk
    now = next(file.modified_at for file in store.walk("clock") if file.key == key)
    store.delete([key])
    return now
