"""Which files of a run nothing needs any more, and removing them so that nothing needed can go with them.

In: runs, and rules by age, size, aliases and counts. Out: what is, or would be, removed; a `Retire` entry per run.

    walk the files ─▶ fold the log ─▶ plan ─▶ append `Retire` ─▶ readers? ─▶ delete
                          ▲                      │ Conflict: what the plan takes has become needed
                          └──────────────────────┘

The log says what is gone before the first file goes: killed in between, the next run of this finishes the deletion.
A reader registers before it folds the log and we look for readers after `Retire`, so it either is seen, or sees.

A policy is kept while it is the base model, live, named by an alias, among the newest, one of every so many, or has the
best score. A kept policy reaches what trains it again: its shards, the saved state before its step, and the shards of
the steps in between. What resumes the run, and every shard with a pending group, is reached always.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from storage.log_entries import Retire, from_json, to_json
from storage.object_store import LocalStore, ObjectStore, StoredFile, StoreError
from storage.replay import saved_steps
from storage.retention_rules import Rules
from storage.run_log import RunLog
from storage.run_state import Conflict, RunState
from storage.runs import open_run

logger = logging.getLogger("millrace.retention")

Kind = Literal["policy", "state", "shard", "orphan", "temporary"]

_READER_SECONDS = 24 * 3600.0
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
    """Policy version, shard id, or the path inside the run."""
    reason: str
    """Why nothing needs it."""
    num_bytes: int
    modified_at: float
    """Unix seconds on the store's clock, of the newest file."""
    keys: tuple[str, ...]
    retired: bool
    """True where the log says so already and only the deletion is left to be done."""

    @property
    def in_log(self) -> bool:
        """True for what a log entry names."""
        return self.kind in ("policy", "state", "shard")


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What was, or would be, removed from one run."""

    run: str
    num_bytes: int
    """All of the run's files before."""
    kept: dict[int, str]
    """Kept policy versions and why."""
    items: list[Item]
    readers: list[Reader]
    """Who is reading; while there are any, nothing is deleted."""
    removed: bool
    """False after a dry run, and where readers held it up."""

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
def reading(log: RunLog, what: str) -> Iterator[None]:
    """Keep retention away from a run's files while the block runs. Folds the log: what is retired by then is gone.

    A reader that dies without a word holds retention up for a day, by the store's clock.
    """
    key = log.key(f"readers/{uuid.uuid4().hex}.json")
    reader = Reader(what=what, host=socket.gethostname(), pid=os.getpid())
    try:
        log.store.put_if_absent(key, json.dumps(to_json(reader)).encode())
    except (OSError, StoreError) as error:
        # Whoever may only read shall read all the same.
        logger.warning("%s: cannot register as a reader, so retention may remove files meanwhile: %s", what, error)
        log.refresh()
        yield
        return
    try:
        log.refresh()
        yield
    finally:
        log.store.delete([key])


def collect_garbage(
    store: ObjectStore, run_ids: Sequence[str], rules: Rules, *, dry_run: bool, ignore_readers: bool = False
) -> list[RunReport]:
    """Remove what nothing needs from some runs, or from all of the store's where none is named.

    Safe beside producers, trainers and a second call of itself. Raises `FileNotFoundError` for an unknown run.
    """
    names = list(dict.fromkeys(run_ids)) or [n for n in store.names("runs") if store.exists(f"runs/{n}/run.json")]
    now = _now(store)
    surveys = [_Survey(open_run(store, name), now=now) for name in names]
    plans = [survey.removable(rules) for survey in surveys]
    chosen = _choose(plans, rules, now=now, num_bytes=sum(survey.num_bytes for survey in surveys))
    reports = []
    for survey, plan, names_chosen in zip(surveys, plans, chosen, strict=True):
        items = [item for item in plan if (item.kind, item.name) in names_chosen]
        readers = survey.readers()
        if not dry_run and (ignore_readers or not readers):
            items, readers = survey.remove(rules, names_chosen, ignore_readers=ignore_readers)
        reports.append(
            RunReport(
                run=survey.log.run_id,
                num_bytes=survey.num_bytes,
                kept=kept_policies(survey.log.state, rules),
                items=items,
                readers=readers,
                removed=not dry_run and (ignore_readers or not readers),
            )
        )
    return reports


def kept_policies(state: RunState, rules: Rules) -> dict[int, str]:
    """Policy versions that stay, and why. What is retired already stays retired."""
    best: dict[str, tuple[float, int]] = {}
    for evaluation in state.evaluations:
        if evaluation.version not in state.retired_policies:
            best[evaluation.split] = max(
                best.get(evaluation.split, (-1.0e300, 0)), (evaluation.score, evaluation.version)
            )
    kept: dict[int, str] = {}
    for version in state.policies:
        reasons = ["base model"] if version == 0 else []
        reasons += ["live"] if version == state.newest_version else []
        reasons += [f"alias {name}" for name, alias in state.aliases.items() if alias.version == version]
        reasons += [f"best on {split}" for split, (_, scored) in best.items() if scored == version]
        reasons += ["among the newest"] if version > state.newest_version - rules.keep_last else []
        reasons += [f"every {rules.keep_every}"] if rules.keep_every and version % rules.keep_every == 0 else []
        if reasons and version not in state.retired_policies:
            kept[version] = ", ".join(reasons)
    return dict(sorted(kept.items()))


@dataclass
class _Reach:
    """What the kept policies, a resume and the queue need."""

    shards: set[str] = field(default_factory=set)
    states: set[str] = field(default_factory=set)


def _reach(state: RunState, kept: Iterable[int]) -> _Reach:
    reach = _Reach(shards={state.shard_of[group_id] for group_id in state.pending})
    kept = set(kept)
    # Training step n again starts from the newest state before it; a resume is about to train the next step.
    targets = [step.claim.step for step in state.steps if step.policy.version in kept] + [state.step + 1]
    for target in targets:
        saved = next(saved_steps(state, at_most=target - 1), None)
        if saved is not None and saved.state_path is not None:
            reach.states.add(saved.state_path)
        for step in state.steps[saved.claim.step if saved else 0 : min(target, state.step)]:
            reach.shards.update(step.shard_sha256)
    scored = {evaluation.shard_id: evaluation.version for evaluation in state.evaluations}
    for shard_id, shard in state.shards.items():
        if shard.is_eval and scored.get(shard_id, shard.head_version) in kept:
            reach.shards.add(shard_id)
    return reach


class _Survey:
    """A run's files as they were listed, and its log, which may have grown since."""

    def __init__(self, log: RunLog, *, now: float) -> None:
        self.log = log
        self._now = now
        # Listed before the fold: what the log has retired by then and is listed still needs deleting; what is written
        # later is not listed and so never touched.
        self._files = log.store.walk(log.prefix)
        self.num_bytes = sum(file.num_bytes for file in self._files)
        self._unfinished = _unfinished_writes(log)
        log.refresh()

    def readers(self) -> list[Reader]:
        """Who reads the run's files now."""
        files = [f for f in self.log.store.walk(self.log.key("readers")) if self._now - f.modified_at < _READER_SECONDS]
        found = self.log.store.get_many([file.key for file in files])
        readers: list[Reader] = [from_json(Reader, json.loads(data)) for data in found if data is not None]
        return readers

    def removable(self, rules: Rules) -> list[Item]:
        """What may go by the log as it is now, whatever its age, as long as it is not just being written."""
        state = self.log.state
        kept = kept_policies(state, rules)
        reach = _reach(state, kept)
        version_at = {policy.path: version for version, policy in state.policies.items()}
        states = {step.state_path for step in state.steps if step.state_path is not None}
        items = []
        for (folder, name), files in self._by_owner().items():
            path = self.log.key(f"{folder}/{name}")
            settled = self._now - max(file.modified_at for file in files) >= rules.orphan_seconds
            match folder:
                case "policies" if path in version_at:
                    version = version_at[path]
                    if version not in kept:  # what is retired is not among the kept, whatever the rules are now
                        items.append(
                            _item("policy", str(version), files, "no rule keeps it", version in state.retired_policies)
                        )
                case "state" if path in states:
                    if path not in reach.states or path in state.retired_states:
                        reason = "no kept policy and no resume starts from it"
                        items.append(_item("state", path, files, reason, path in state.retired_states))
                case "shards" if name in state.shards:
                    shard = state.shards[name]
                    awaited = shard.is_eval and name not in state.evaluation_shards and not settled
                    if name in state.retired_shards or (name not in reach.shards and not awaited):
                        reason = "no kept policy was scored with it" if shard.is_eval else "no kept policy needs it"
                        items.append(_item("shard", name, files, reason, name in state.retired_shards))
                case "readers":
                    if self._now - files[0].modified_at >= _READER_SECONDS:
                        items.append(_item("temporary", path, files, "its reader is gone", False))
                case _:
                    if settled:
                        items.append(_item("orphan", path, files, "no log entry names it", False))
        items += [
            _item("temporary", file.key, [file], "a write that was cut off", False)
            for file in self._unfinished
            if self._now - file.modified_at >= rules.orphan_seconds
        ]
        return items

    def remove(
        self, rules: Rules, chosen: set[tuple[Kind, str]], *, ignore_readers: bool
    ) -> tuple[list[Item], list[Reader]]:
        """Retire and delete the chosen items that may still go; returns them, and the readers that prevent deleting."""
        for _ in range(_MOST_CONFLICTS):
            self.log.refresh()
            items = [item for item in self.removable(rules) if (item.kind, item.name) in chosen]
            new = [item for item in items if item.in_log and not item.retired]
            if not new:
                break
            try:
                self.log.append(
                    Retire(
                        shard_ids=[item.name for item in new if item.kind == "shard"],
                        policy_versions=[int(item.name) for item in new if item.kind == "policy"],
                        state_paths=[item.name for item in new if item.kind == "state"],
                        reason=str(rules),
                    )
                )
                break
            except Conflict:
                continue  # an alias was set meanwhile: plan again
        else:
            raise Conflict(f"run {self.log.run_id!r} changed {_MOST_CONFLICTS} times while it was planned; try again")
        # The append folded the log once more: an orphan may have got its entry after all.
        left = {(item.kind, item.name) for item in self.removable(rules)}
        items = [item for item in items if (item.kind, item.name) in left]
        readers = self.readers()
        if ignore_readers or not readers:
            self.log.store.delete([key for item in items for key in item.keys])
            _remove_empty_folders(self.log.store, items)
        return items, readers

    def _by_owner(self) -> dict[tuple[str, str], list[StoredFile]]:
        """The run's data files by what they belong to; rewards belong to their shard where the log knows them."""
        state = self.log.state
        owned: dict[tuple[str, str], list[StoredFile]] = defaultdict(list)
        for file in self._files:
            match file.key.removeprefix(f"{self.log.prefix}/").split("/"):
                case ["shards" as folder, name]:
                    owned[folder, name.removesuffix(".arrow")].append(file)
                case [("policies" | "state" | "readers") as folder, name, *_]:
                    owned[folder, name].append(file)
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


def _choose(
    plans: Sequence[Sequence[Item]], rules: Rules, *, now: float, num_bytes: int
) -> list[set[tuple[Kind, str]]]:
    """Which items go, per plan: leftovers always; the rest by age, and oldest first until the size is reached."""
    chosen: list[set[tuple[Kind, str]]] = [set() for _ in plans]
    numbered = [(number, item) for number, items in enumerate(plans) for item in items]
    for number, item in sorted(
        numbered, key=lambda pair: (pair[1].in_log and not pair[1].retired, pair[1].modified_at)
    ):
        if item.in_log and not item.retired:
            if now - item.modified_at < rules.older_than_seconds:
                continue
            if rules.max_bytes is not None and num_bytes <= rules.max_bytes:
                break
        num_bytes -= item.num_bytes
        chosen[number].add((item.kind, item.name))
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


def _unfinished_writes(log: RunLog) -> list[StoredFile]:
    """Temporary files of a local store whose writer died; S3 shows nothing before it is whole."""
    if not isinstance(log.store, LocalStore):
        return []
    root, found = log.store.root, []
    for path in (root / log.prefix).rglob(".*.tmp"):
        with contextlib.suppress(FileNotFoundError):  # its writer just finished
            status = path.stat()
            key = str(path.relative_to(root))
            found.append(StoredFile(key=key, num_bytes=status.st_size, modified_at=status.st_mtime))
    return found
