"""The fold of a run's log: what is true about a run, entry by entry.

In: log entries in order, or the columns of those in segments. Out: `RunState`. Reading and writing is `run_log`.
The state holds the numbers of entries; a record is read from its entry when it is asked for.

Conservation law, true after every entry:
submitted = trained + filtered + stale + failed + cancelled + pending, counted in prompt groups.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from settings.errors import UserError
from storage.log import entries as records
from storage.log.entries import OUTCOMES, Entry, LogEntry, claimed_groups
from storage.log.history import History, Positions, RecordList, RecordMap


class Conflict(UserError):
    """Another process committed first, and this entry no longer fits; nothing was written."""


class LogDamaged(UserError):
    """An entry cannot be read, or contradicts the ones before; the message names it."""

    may_pass = False


class Columns(NamedTuple):
    """What the fold needs of one entry; a segment stores it beside the entry's JSON. None if its kind has none.

    Frequent kinds are folded from their columns alone, so opening a long run decodes none of them. For all other kinds
    the fold reads the record: a new kind needs nothing here.
    """

    kind: str
    key: str
    """What the fold looks the entry up by, in text."""
    written_at: float
    num_rows: int | None = None
    """Rows of a training shard; None for the shard of an evaluation."""
    group_ids: list[str] | None = None
    """Groups of a training shard, or of a step's claim."""
    positions: list[int] | None = None
    """Places in the prompt order, of a training shard's groups or of a lease."""
    retried: list[bool] | None = None
    """True if the prompt of each group of a training shard runs again."""
    outcomes: list[int] | None = None
    """What became of each group of a claim, as an index into `OUTCOMES`."""


def columns_of(entry: LogEntry) -> Columns:
    """The columns of an entry."""
    kind, written_at = entry.kind, entry.written_at
    match entry.body:
        case records.Shard(is_eval=False) as shard:
            return Columns(
                kind,
                shard.id,
                written_at,
                num_rows=shard.num_rows,
                group_ids=[group.id for group in shard.groups],
                positions=[group.position for group in shard.groups],
                retried=[group.retried for group in shard.groups],
            )
        case records.Step() as step:
            claimed = claimed_groups(step)
            return Columns(
                kind,
                str(step.policy.version),
                written_at,
                group_ids=[group.group_id for _, group in claimed],
                outcomes=[OUTCOMES.index(outcome) for outcome, _ in claimed],
            )
        case records.Lease(holder=holder, positions=positions):
            return Columns(kind, holder, written_at, positions=positions)
        case records.Policy(version=version) | records.Registration(version=version):
            return Columns(kind, str(version), written_at)
        case (
            records.Session(id=key)
            | records.Shard(id=key)
            | records.Alias(name=key)
            | records.Rescore(name=key)
            | records.Join(holder=key)
        ):
            return Columns(kind, key, written_at)
        case records.Release(holder=key) | records.Evaluation(shard_id=key) | records.Quarantine(shard_id=key):
            return Columns(kind, key, written_at)
        case _:
            return Columns(kind, "", written_at)


@dataclass
class RunState:
    """The fold of a log. `apply` and `add` build it; everything else reads it."""

    history: History = field(default_factory=History)
    """The entries themselves."""
    entries: int = 0
    """Entries folded so far; the next entry's number."""
    started_at: float = 0.0
    """Unix seconds of the first entry."""
    last_at: float = 0.0
    """Unix seconds of the newest entry."""
    worked_until: float = 0.0
    """Unix seconds of the newest entry of training."""
    session_started_at: float = 0.0
    """Unix seconds of the newest session's start."""
    earlier_seconds: float = 0.0
    """Wall-clock of the sessions before the newest, each from its start to its last entry."""
    sessions: list[records.Session] = field(default_factory=list)
    ended: records.End | None = None
    """How the newest session ended; None if it has not said."""
    num_trajectories: int = 0
    """Rows of all training shards."""
    shard_of: dict[str, str] = field(default_factory=dict)
    """Group id → shard id."""
    pending: dict[str, str] = field(default_factory=dict)
    """Ids of committed groups that no step has taken, in commit order (a dict as an ordered set, of id to itself)."""
    step_of: dict[str, int] = field(default_factory=dict)
    """Group id → the step that took it out of the queue."""
    _untrained: dict[str, str] = field(default_factory=dict)
    """Group id → outcome, of groups that a step took and did not train."""
    positions: Positions = field(default_factory=Positions)
    """Positions of the prompt order that are committed, and neither lost nor to be tried again."""
    producers: dict[str, records.Join] = field(default_factory=dict)
    """Rollout workers that take part, by name."""
    leased: dict[int, str] = field(default_factory=dict)
    """Positions that are being attempted → name of the worker."""
    num_leases: int = 0
    """All leases so far."""
    retries: Counter[int] = field(default_factory=Counter)
    """Position → how often it runs again, because its group failed or its shard was damaged."""
    newest_version: int = -1
    """−1 before the base model is committed."""
    evaluation_shards: set[str] = field(default_factory=set)
    """Ids of the shards that `evaluations` name."""
    quarantined: dict[str, str] = field(default_factory=dict)
    """Shard id → reason."""
    rescored: dict[str, records.Rescore] = field(default_factory=dict)
    """Name → every shard scored again under it, merged over entries."""
    retired_shards: set[str] = field(default_factory=set)
    retired_policies: set[int] = field(default_factory=set)
    retired_states: set[str] = field(default_factory=set)
    """Folders of optimizer state that retention removed, and folders of policies that no step committed."""
    paused: str = ""
    """Why the run is paused; empty if it is not."""
    ended_at: float = 0.0
    """When the newest session ended, in Unix seconds, if it could still write so."""
    _first_free: int = field(default=0, compare=False)
    """No position before this one is free."""
    shards: RecordMap[str, records.Shard] = field(init=False)
    """By id, in commit order."""
    groups: RecordMap[str, records.GroupSummary] = field(init=False)
    """By id, in commit order."""
    outcomes: RecordMap[str, str] = field(init=False)
    """Group id → one of `OUTCOMES`, for groups that a step took out of the queue."""
    steps: RecordList[records.Step] = field(init=False)
    """In order: step `k` is `steps[k - 1]`."""
    policies: RecordMap[int, records.Policy] = field(init=False)
    evaluations: RecordList[records.Evaluation] = field(init=False)
    aliases: RecordMap[str, records.Alias] = field(init=False)
    """The newest of each name."""
    registrations: RecordMap[int, records.Registration] = field(init=False)
    """By policy version, like `policies`."""

    def __post_init__(self) -> None:
        # None of these leads back to the state: what is in a circle stays until the garbage collector comes by.
        history, untrained = self.history, self._untrained

        def body(number: int) -> Any:
            return history[number].body

        def keyed(_: Any, number: int) -> Any:
            return body(number)

        def policy(_: int, number: int) -> records.Policy:
            body = keyed(_, number)
            return body.policy if isinstance(body, records.Step) else body

        def group(group_id: str, shard_id: str) -> records.GroupSummary:
            return next(each for each in shards[shard_id].groups if each.id == group_id)

        shards = self.shards = RecordMap({}, keyed)
        self.aliases, self.registrations = RecordMap({}, keyed), RecordMap({}, keyed)
        self.policies = RecordMap({}, policy)
        self.steps, self.evaluations = RecordList([], body), RecordList([], body)
        self.groups = RecordMap(self.shard_of, group)
        self.outcomes = RecordMap(self.step_of, lambda group_id, _: untrained.get(group_id, "trained"))

    @property
    def step(self) -> int:
        """Committed optimizer steps."""
        return len(self.steps)

    @property
    def live(self) -> records.Policy | None:
        """The newest policy; None before the base model is committed."""
        return self.policies[self.newest_version] if self.policies else None

    def session_of(self, version: int) -> records.Session | None:
        """The session that made a policy; None if the log does not say."""
        if not version:
            return self.sessions[0] if self.sessions else None
        made_by = self.steps[version - 1].session_id
        return next((session for session in self.sessions if session.id == made_by), None)

    @property
    def worked_seconds(self) -> float:
        """Time from each session's start to the last entry of its training, summed over sessions.

        What other commands append to a finished run, such as evaluations and aliases, is not the run's work.
        """
        of_session = self.worked_until - self.session_started_at if self.sessions else 0.0
        return self.earlier_seconds + max(0.0, of_session)  # a clock may have been set back

    @property
    def pending_accepted(self) -> int:
        """Groups ready to be claimed."""
        return sum(1 for group_id in self.pending if self.groups[group_id].accepted)

    def task_set(self, split: str = "train") -> records.TaskSet | None:
        """The tasks of a split since the newest session that says it, or else the newest evaluation."""
        for session in reversed(self.sessions):
            if tasks := session.tasks if split == "train" else session.held_out.get(split):
                return tasks
        return next((each.tasks for each in reversed(self.evaluations) if each.split == split and each.tasks), None)

    def evaluations_of(self, split: str) -> list[records.Evaluation]:
        """Evaluations of a split on the tasks that it has now, and older ones, whose tasks were not recorded."""
        now = self.task_set(split)
        of_split = [each for each in self.evaluations if each.split == split]
        return [each for each in of_split if not (now and each.tasks) or each.tasks.sha256 == now.sha256]

    def free_positions(self, count: int) -> list[int]:
        """The first positions of the prompt order that are neither committed nor leased."""
        while self._first_free in self.positions or self._first_free in self.leased:
            self._first_free += 1
        free = (p for p in itertools.count(self._first_free) if p not in self.positions and p not in self.leased)
        return list(itertools.islice(free, count))

    def counters(self) -> dict[str, int]:
        """The terms of the conservation law, in prompt groups; `quarantined` counts shards and is not part of it."""
        outcomes = Counter(self._untrained.values())
        outcomes["trained"] = len(self.step_of) - len(self._untrained)
        terms = {name: outcomes[name] for name in OUTCOMES} | {"pending": len(self.pending)}
        return {"submitted": len(self.shard_of), **terms, "quarantined": len(self.quarantined)}

    def check(self) -> None:
        """Raise `LogDamaged` unless every submitted group is counted in exactly one state."""
        if len(self.step_of) + len(self.pending) != len(self.shard_of):
            raise LogDamaged(f"conservation law broken: {self.counters()}")

    def apply(self, entry: LogEntry) -> None:
        """Fold the next entry in; it fits, see `conflicts`."""
        assert entry.number == self.entries, f"log entry {entry.number} follows {self.entries - 1}"
        self.history.append(entry)
        self.add(columns_of(entry))

    def add(self, columns: Columns) -> None:
        """Fold in the next entry, which `history` has already, from its columns alone if its kind is frequent."""
        kind, key, written_at, num_rows, group_ids, positions, retried, outcomes = columns
        number = self.entries
        if not number:
            self.started_at = written_at
        self.entries += 1
        match kind:
            case "shard":
                self.shards.data[key] = number
                self.num_trajectories += num_rows or 0
                self.shard_of.update(dict.fromkeys(group_ids or [], key))
                self.pending.update(zip(group_ids or [], group_ids or [], strict=True))
                for position, again in zip(positions or [], retried or [], strict=True):
                    if again:  # its worker keeps the lease and tries again
                        self.retries[position] += 1
                    else:
                        self.positions.add(position)
                        self.leased.pop(position, None)
            case "step":
                self.steps.numbers.append(number)
                step = len(self.steps)
                for group_id, place in zip(group_ids or [], outcomes or [], strict=True):
                    group_id = self.pending.pop(group_id)  # the same string as in `shard_of`
                    self.step_of[group_id] = step
                    if place:  # the first outcome is trained
                        self._untrained[group_id] = OUTCOMES[place]
                self._publish(int(key), number)
            case "policy":
                self._publish(int(key), number)
            case "lease":
                self.leased.update(dict.fromkeys(positions or [], key))
                self.num_leases += 1
            case "alias":
                self.aliases.data[key] = number
            case "registration":
                self.registrations.data[int(key)] = number
            case "eval":
                self.evaluations.numbers.append(number)
                self.evaluation_shards.add(key)
            case _:
                self._change(self.history[number].body, written_at)
        self.last_at = written_at
        if kind in ("session", "policy", "step", "lease") or (kind == "shard" and num_rows is not None):
            self.worked_until = written_at

    def _change(self, body: Entry, written_at: float) -> None:
        """Change the state by an entry of any other kind."""
        match body:
            case records.Session() as session:
                self.earlier_seconds = self.worked_seconds
                self.session_started_at = written_at
                self.sessions.append(session)
                self.ended = None
                # The workers of an earlier session are gone or too late, except those that it did not start.
                self.producers = {holder: join for holder, join in self.producers.items() if join.outside}
                self._free([position for position, name in self.leased.items() if name not in self.producers])
            case records.End(session_id=session_id) as end:
                if self.sessions and self.sessions[-1].id == session_id:
                    self.ended, self.ended_at = end, written_at
            case records.Join(holder=holder) as join:
                self._free([position for position, name in self.leased.items() if name == holder])
                self.producers[holder] = join
            case records.Release(holder=holder):
                self._free([position for position, name in self.leased.items() if name == holder])
                self.producers.pop(holder, None)
            case records.Rescore() as rescore:
                earlier = self.rescored.get(rescore.name)
                files = {**earlier.files, **rescore.files} if earlier else rescore.files
                self.rescored[rescore.name] = replace(rescore, files=files)
            case records.Retire() as retire:
                self.retired_shards.update(retire.shard_ids)
                self.retired_policies.update(retire.policy_versions)
                self.retired_states.update(retire.state_paths)
            case records.Pause(reason=reason):
                self.paused = reason
            case records.Resume():
                self.paused = ""
            case records.Quarantine(shard_id=shard_id, reason=reason):
                self.quarantined[shard_id] = reason
                # Groups that no step has taken are lost with the file: their prompts run again under new group ids.
                for group in self.shards[shard_id].groups:
                    if group.id in self.pending:
                        del self.pending[group.id], self.shard_of[group.id]
                        if not group.retried:
                            self.positions.discard(group.position)
                            self._first_free = min(self._first_free, group.position)
                            self.retries[group.position] += 1
            case _:
                raise AssertionError(f"{body} is folded from its columns, or has no case here")

    def _free(self, positions: Iterable[int]) -> None:
        for position in positions:
            del self.leased[position]
            self._first_free = min(self._first_free, position)

    def _publish(self, version: int, number: int) -> None:
        self.policies.data[version] = number
        self.newest_version = max(self.newest_version, version)
