"""Which files of a run nothing needs any more, and removing them so that nothing needed can go with them.

In: runs, and rules by age, size, aliases and counts. Out: what is, or would be, removed; a `Retire` entry per run.

    walk the files ─▶ fold the log ─▶ plan ─▶ append `Retire` ─▶ readers? ─▶ delete
                          ▲                      │ Conflict: what the plan takes has become needed
                          └──────────────────────┘

The log says what is gone before the first file goes: killed in between, the next run of this finishes the deletion.
That goes for files without an entry too: the log then refuses the entry of a writer that slept and comes after all.
A reader registers before it folds the log and we look for readers after `Retire`, so it either is seen, or sees.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from storage.log.entries import Retire, from_json, to_json
from storage.log.run_log import RunLog
from storage.log.run_state import Conflict, LogDamaged
from storage.log.runs import open_run
from storage.objects.object_store import LocalStore, ObjectStore, StoredFile, StoreError
from storage.retention.rules import Facts, Rules, kept_policies, reach, with_anchors

logger = logging.getLogger("millrace.retention")

Kind = Literal["policy", "state", "shard", "orphan", "temporary"]
Chosen = set[tuple[str, Kind, str]]
"""Run, kind and name of the items that go."""

_READER_SECONDS = 3 * 3600.0
"""How old a registration of a reader is at most while it lives, on the store's clock."""
_RENEW_SECONDS = 3600.0
_MOST_CONFLICTS = 100


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Somebody who reads a run's files."""

    what: str
    """What it does: `replay`, `index`."""
    host: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class Item:
    """Files that go together."""

    kind: Kind
    name: str
    """Policy version, or those that share the files; shard id, or the path inside the run."""
    reason: str
    """Why nothing needs it."""
    num_bytes: int
    modified_at: float
    """Unix seconds on the store's clock, of the newest file."""
    keys: tuple[str, ...]
    retired: bool
    """True where the log says so already and only the deletion is left to be done."""

    @property
    def is_leftover(self) -> bool:
        """True for what no log entry names any more, or ever did: it goes whatever its age."""
        return self.retired or self.kind in ("orphan", "temporary")


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What was, or would be, removed from one run."""

    run: str
    num_bytes: int = 0
    """All of the run's files before."""
    kept: dict[int, str] = field(default_factory=dict)
    """Kept policy versions and why."""
    items: list[Item] = field(default_factory=list)
    readers: list[Reader] = field(default_factory=list)
    """Who is reading; while there are any, nothing is deleted."""
    removed: bool = False
    """False after a dry run, and where readers held it up."""
    problem: str = ""
    """Why the run was left alone: its log is damaged."""

    @property
    def freed_bytes(self) -> int:
        """Size of `items`."""
        return sum(item.num_bytes for item in self.items)

    def by_kind(self) -> dict[Kind, tuple[int, int]]:
        """Count and bytes of `items` per kind."""
        totals: dict[Kind, tuple[int, int]] = {}
        for item in self.items:
            count, num_bytes = totals.get(item.kind, (0, 0))
            totals[item.kind] = count + 1, num_bytes + item.num_bytes
        return totals


@contextlib.contextmanager
def reading(log: RunLog, what: str, *, quiet: bool = False) -> Iterator[None]:
    """Keep retention away from a run's files while the block runs. Folds the log: what is retired by then is gone.

    The registration is written anew every hour. A reader that dies without a word holds retention up for three hours,
    by the store's clock. Whoever may only read the store reads all the same, with a warning unless `quiet`.
    """
    document = json.dumps(to_json(Reader(what=what, host=socket.gethostname(), pid=os.getpid()))).encode()
    ended = threading.Event()

    def register() -> str:
        key = log.key(f"readers/{uuid.uuid4().hex}.json")
        # Unlike `put`, also where the disk is full and retention is called to make room: so a new name every time.
        log.store.put_if_absent(key, document)
        return key

    def stay_registered(key: str) -> None:
        while not ended.wait(_RENEW_SECONDS):
            with contextlib.suppress(OSError, StoreError):  # the next one is early enough
                old, key = key, register()
                log.store.delete([old])
        with contextlib.suppress(OSError, StoreError):  # one that cannot be deleted is forgotten by its age
            log.store.delete([key])

    try:
        thread = threading.Thread(target=stay_registered, args=[register()], name="reader", daemon=True)
    except (OSError, StoreError) as error:
        level = logging.DEBUG if quiet else logging.WARNING
        logger.log(level, "%s: cannot register as a reader, so retention may remove files meanwhile: %s", what, error)
        log.refresh()
        yield
        return
    thread.start()
    try:
        log.refresh()
        yield
    finally:
        ended.set()
        thread.join()


def collect_garbage(
    store: ObjectStore, run_ids: Sequence[str], rules: Rules, *, dry_run: bool, ignore_readers: bool = False
) -> list[RunReport]:
    """Remove what nothing needs from some runs, or from all of the store's where none is named.

    Safe beside producers, trainers and a second call of itself. Raises `FileNotFoundError` for an unknown run, and
    `LogDamaged` for a named one; where none is named, damaged ones are reported and left alone.
    """
    named = list(dict.fromkeys(run_ids))
    now = _now(store)
    surveys, reports = [], []
    damaged: list[RunReport] = []

    @contextlib.contextmanager
    def noting_damage(run_id: str) -> Iterator[None]:
        try:
            yield
        except LogDamaged as error:
            if named:
                raise
            damaged.append(RunReport(run=run_id, problem=str(error)))

    for name in named or [n for n in store.names("runs") if store.exists(f"runs/{n}/run.json")]:
        with noting_damage(name):
            surveys.append(_Survey(open_run(store, name), now=now))
    chosen = _choose(surveys, rules, now=now)
    for survey in surveys:
        with noting_damage(survey.log.run_id):
            reports.append(survey.collect(rules, chosen, dry_run=dry_run, ignore_readers=ignore_readers))
    return reports + damaged


class _Survey:
    """A run's files as they were listed, and its log, which may have grown since."""

    def __init__(self, log: RunLog, *, now: float) -> None:
        self.log = log
        self._now = now
        # Listed before the fold: what the log has retired by then and is listed still needs deleting; what is written
        # later is not listed and so never touched.
        self._files = log.store.walk(log.prefix)
        self.num_bytes = sum(file.num_bytes for file in self._files)
        # A local store has temporary files of writers that died; S3 shows nothing before it is whole.
        self._unfinished = log.store.unfinished(log.prefix) if isinstance(log.store, LocalStore) else []
        self._facts = Facts()
        log.refresh()

    def _kept(self, rules: Rules) -> dict[int, str]:
        """Policy versions that stay by the log as it is now, and why."""
        self._facts.extend(self.log)
        return with_anchors(kept_policies(self.log.state, rules, self._facts.evaluations), self._facts.anchors)

    def removable(self, rules: Rules) -> list[Item]:
        """What may go by the log as it is now, whatever its age, as long as it is not just being written."""
        state, facts = self.log.state, self._facts
        kept = self._kept(rules)
        needed_shards, needed_states = reach(state, facts, kept)
        items = []
        going: dict[tuple[int, bool], list[tuple[list[int], list[StoredFile]]]] = {}
        owned = self._by_owner()
        settled = {
            owner: self._now - max(file.modified_at for file in files) >= rules.orphan_seconds
            for owner, files in owned.items()
        }
        unscored = {name: version for name, version in facts.eval_shards.items() if name not in facts.scored_shards}
        # An evaluation commits shard after shard, and its score last.
        running = {version for name, version in unscored.items() if not settled.get(("shards", name), True)}
        for (folder, name), files in owned.items():
            path = self.log.key(f"{folder}/{name}")
            retired = name in state.retired_shards if folder == "shards" else path in state.retired_states
            match folder:
                case "policies" if path in facts.versions_at:
                    versions = facts.versions_at[path]
                    if kept.keys().isdisjoint(versions):  # what is retired is not kept, whatever the rules are now
                        retired = state.retired_policies.issuperset(versions)
                        anchor = facts.anchors.get(versions[0])
                        # An anchor that may go takes the deltas against it along: without it they are nothing.
                        leader = anchor if anchor is not None and not retired and anchor not in kept else versions[-1]
                        going.setdefault((leader, retired), []).append((versions, files))
                case "state" if path in facts.states:
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
        items += [
            _item("temporary", file.key, [file], "a write that was cut off", False)
            for file in self._unfinished
            if self._now - file.modified_at >= rules.orphan_seconds
        ]
        return items

    def collect(self, rules: Rules, chosen: Chosen, *, dry_run: bool, ignore_readers: bool) -> RunReport:
        """Retire and delete the chosen items that may still go, unless the run is being read."""
        items, readers = self._still_chosen(rules, chosen), self._readers()
        removed = not dry_run and (ignore_readers or not readers)
        if removed:
            items = self._retire(rules, chosen)
            readers = self._readers()
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
        """Who reads the run's files now."""
        files = [f for f in self.log.store.walk(self.log.key("readers")) if self._now - f.modified_at < _READER_SECONDS]
        documents = self.log.store.get_many([file.key for file in files])
        return [from_json(Reader, json.loads(document)) for document in documents if document is not None]

    def _still_chosen(self, rules: Rules, chosen: Chosen) -> list[Item]:
        return [item for item in self.removable(rules) if (self.log.run_id, item.kind, item.name) in chosen]

    def _retire(self, rules: Rules, chosen: Chosen) -> list[Item]:
        """Append the entry that says what goes; returns what then may be deleted."""
        for _ in range(_MOST_CONFLICTS):
            self.log.refresh()
            items = self._still_chosen(rules, chosen)
            try:
                self.log.append(self._entry([item for item in items if not item.retired], rules))
                break
            except Conflict:
                continue  # an alias was set, or an orphan got its entry meanwhile: plan again
        else:
            raise Conflict(f"run {self.log.run_id!r} changed {_MOST_CONFLICTS} times while it was planned; try again")
        # The append folded the log once more: orphaned rewards may have got their entry, which it does not refuse.
        left = {key for item in self.removable(rules) for key in item.keys}
        return [item for item in items if left.issuperset(item.keys)]

    def _entry(self, items: Sequence[Item], rules: Rules) -> Retire:
        """What is retired; an entry without anything in it is one that every log holds already."""
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
                case ["shards" as folder, name]:
                    owned[folder, name.removesuffix(".arrow")].append(file)
                case [("policies" | "state" | "readers") as folder, name, *_]:
                    owned[folder, name].append(file)
                case ["failures", name]:
                    owned["shards", name.removesuffix(".arrow")].append(file)
                case ["rewards", rewards, name]:
                    shard_id = name.removesuffix(".arrow")
                    rescored = state.rescored.get(rewards)
                    known = (rescored is not None and shard_id in rescored.files) or shard_id in state.retired_shards
                    owned["shards" if known else "rewards", shard_id if known else f"{rewards}/{name}"].append(file)
                case _:
                    pass  # the log, the search index, and whatever else lives here is not ours to judge
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


def _choose(surveys: Sequence[_Survey], rules: Rules, *, now: float) -> Chosen:
    """Which items go: leftovers always; the rest by age, and oldest first until the size is reached."""
    num_bytes = sum(survey.num_bytes for survey in surveys)
    items = [(survey.log.run_id, item) for survey in surveys for item in survey.removable(rules)]
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
    """A disk keeps the folders of deleted files. Only folders of one writer go: into the others somebody may write."""
    if isinstance(store, LocalStore):
        folders = {key.rpartition("/")[0] for item in items for key in item.keys}
        for folder in (f for f in folders if f.split("/")[2:3] in (["policies"], ["state"])):
            with contextlib.suppress(OSError):  # not empty, or gone
                (store.root / folder).rmdir()


def _now(store: ObjectStore) -> float:
    """Unix seconds on the store's clock, with which every age is measured."""
    key = f"clock/{uuid.uuid4().hex}"
    store.put_if_absent(key, b"")  # unlike `put`, also where the disk is full and we are called to make room
    now = next(file.modified_at for file in store.walk("clock") if file.key == key)
    store.delete([key])
    return now
