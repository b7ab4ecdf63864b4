"""The fold of a run's log: what is true about a run, entry by entry.

In: `LogEntry`s in order. Out: `RunState`. Reading and writing the entries is `run_log`.

Conservation law, true after every entry:
submitted = trained + filtered + stale + failed + cancelled + pending, counted in prompt groups.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Container, Iterable, MutableMapping, MutableSequence
from dataclasses import dataclass, field, replace
from typing import Any

from settings.errors import UserError
from storage.log.entries import (
    Alias,
    ClaimedGroup,
    Entry,
    Evaluation,
    GroupSummary,
    Join,
    Lease,
    LogEntry,
    Pause,
    Policy,
    Quarantine,
    Registration,
    Release,
    Rescore,
    Resume,
    Retire,
    Session,
    Shard,
    Step,
)

OUTCOMES = ("trained", "filtered", "stale", "failed", "cancelled")


class Conflict(UserError):
    """Somebody else committed first and this entry no longer fits; nothing was written."""


class LogDamaged(UserError):
    """The log contradicts itself; the message names the entry."""


@dataclass
class RunState:
    """The fold of a log. Built by `apply` alone; read by everybody."""

    entries: int = 0
    """Entries folded so far; the next entry's number."""
    started_at: float = 0.0
    """Unix seconds of the first entry."""
    last_at: float = 0.0
    """Unix seconds of the newest entry."""
    session_started_at: float = 0.0
    """Unix seconds of the newest session's entry."""
    earlier_seconds: float = 0.0
    """Wall-clock of the sessions before the newest, each from its start to its last entry."""
    sessions: list[Session] = field(default_factory=list)
    shards: MutableMapping[str, Shard] = field(default_factory=dict)
    num_trajectories: int = 0
    """Rows of all training shards."""
    groups: MutableMapping[str, GroupSummary] = field(default_factory=dict)
    shard_of: dict[str, str] = field(default_factory=dict)
    """Group id → shard id."""
    pending: dict[str, None] = field(default_factory=dict)
    """Ids of committed groups no step has taken, in commit order (a dict as an ordered set)."""
    outcomes: dict[str, str] = field(default_factory=dict)
    """Group id → one of `OUTCOMES`, once a step has passed over it."""
    step_of: dict[str, int] = field(default_factory=dict)
    """Group id → the step that passed over it."""
    positions: set[int] = field(default_factory=set)
    """Places of the prompt order that are committed and neither lost nor to be tried again."""
    producers: dict[str, Join] = field(default_factory=dict)
    """Rollout workers that have joined and not left, by name."""
    leased: dict[int, str] = field(default_factory=dict)
    """Places that are being attempted → the worker's name."""
    num_leases: int = 0
    """Leases so far, over or not."""
    retries: Counter[int] = field(default_factory=Counter)
    """How often a position has to run again: its group came to nothing, or its shard was damaged."""
    steps: MutableSequence[Step] = field(default_factory=list)
    """In order: step `k` is `steps[k - 1]`."""
    policies: MutableMapping[int, Policy] = field(default_factory=dict)
    newest_version: int = -1
    """Of the policies; −1 before the base model is committed."""
    evaluations: MutableSequence[Evaluation] = field(default_factory=list)
    evaluation_shards: set[str] = field(default_factory=set)
    """Ids of the shards that `evaluations` name."""
    aliases: dict[str, Alias] = field(default_factory=dict)
    registrations: MutableMapping[int, Registration] = field(default_factory=dict)
    """Policy version → its place in the model registry."""
    quarantined: dict[str, str] = field(default_factory=dict)
    """Shard id → reason."""
    rescored: dict[str, Rescore] = field(default_factory=dict)
    """Name → every shard scored again under it, merged over entries."""
    retired_shards: set[str] = field(default_factory=set)
    retired_policies: set[int] = field(default_factory=set)
    retired_states: set[str] = field(default_factory=set)
    """Folders of optimizer state that retention took away, and folders of policies no step had committed."""
    paused: str = ""
    """Why nothing new is begun; empty where the run is not paused."""
    _first_free: int = field(default=0, compare=False)
    """No place before this one is free."""

    @property
    def step(self) -> int:
        """Committed optimizer steps."""
        return len(self.steps)

    @property
    def live(self) -> Policy | None:
        """The newest policy; null before the base model is committed."""
        return self.policies[self.newest_version] if self.policies else None

    @property
    def worked_seconds(self) -> float:
        """Time the run was being worked on: from each session's start to its last entry, summed over sessions."""
        return self.earlier_seconds + (self.last_at - self.session_started_at if self.sessions else 0.0)

    @property
    def pending_accepted(self) -> int:
        """Groups ready to be claimed."""
        return sum(1 for group_id in self.pending if self.groups[group_id].accepted)

    def free_positions(self, count: int) -> list[int]:
        """The first places of the prompt order that are neither committed nor leased."""
        while self._first_free in self.positions or self._first_free in self.leased:
            self._first_free += 1
        free = (p for p in itertools.count(self._first_free) if p not in self.positions and p not in self.leased)
        return list(itertools.islice(free, count))

    def counters(self) -> dict[str, int]:
        """The conservation law's terms, in prompt groups; `quarantined` counts shards and stands outside it."""
        outcomes = Counter(self.outcomes.values())
        terms = {name: outcomes[name] for name in OUTCOMES}
        return {
            "submitted": len(self.groups),
            **terms,
            "pending": len(self.pending),
            "quarantined": len(self.quarantined),
        }

    def check(self) -> None:
        """Raise `LogDamaged` unless every submitted group is counted in exactly one state."""
        if len(self.outcomes) + len(self.pending) != len(self.groups):
            raise LogDamaged(f"conservation law broken: {self.counters()}")

    def holds(self, body: Entry) -> bool:
        """True when the log already says this, so that appending it again is a no-op."""
        match body:
            case Session():
                return any(session.id == body.id for session in self.sessions)
            case Lease():
                return all(self.leased.get(position) == body.holder for position in body.positions)
            case Join():
                return self.producers.get(body.holder) == body
            case Release():
                return body.holder not in self.producers and body.holder not in self.leased.values()
            case Shard():
                return body.id in self.shards
            case Step(claim=claim, policy=policy):
                return claim.step <= self.step and self.steps[claim.step - 1].policy.path == policy.path
            case Policy():
                return self.policies.get(body.version) == body
            case Evaluation():
                return body.shard_id in self.evaluation_shards
            case Alias():
                return self.aliases.get(body.name) == body
            case Registration():
                return self.registrations.get(body.version) == body
            case Quarantine():
                return body.shard_id in self.quarantined
            case Rescore():
                known = self.rescored.get(body.name)
                return known is not None and known.files.items() >= body.files.items()
            case Retire():
                return (
                    self.retired_shards.issuperset(body.shard_ids)
                    and self.retired_policies.issuperset(body.policy_versions)
                    and self.retired_states.issuperset(body.state_paths)
                )
            case Pause():
                return bool(self.paused)
            case Resume():
                return not self.paused

    def fits(self, body: Entry) -> None:
        """Raise `Conflict` when `body` contradicts what is already committed."""
        match body:
            case Lease() if body.number != self.num_leases:
                raise Conflict(f"{body.holder} reckoned its lease before another worker's was committed")
            case Lease(positions=positions):
                if taken := _taken(positions, self.positions) or _taken(positions, self.leased):
                    raise Conflict(f"prompt positions {taken[:5]} are not free for {body.holder}")
            case Shard() if body.id in self.retired_shards:
                raise Conflict(f"shard {body.id} came so late that its file was removed; write it again under a new id")
            case Shard(is_eval=False, groups=groups):
                wanted = [group.position for group in groups if not group.retried]
                again = [group.position for group in groups if group.retried]
                if taken := _taken(wanted, self.positions) or _taken(set(again), self.positions):
                    raise Conflict(f"shard {body.id}: prompt positions {taken} are already committed")
                if taken := _taken([group.id for group in groups], self.groups):
                    raise Conflict(
                        f"shard {body.id}: groups {taken[:5]} are already committed at other positions; "
                        "the data set has changed under this run"
                    )
            case Step(claim=claim, policy=policy):
                if claim.step != self.step + 1:
                    raise Conflict(
                        f"step {claim.step} does not follow step {self.step}: another trainer is working on this run; "
                        "stop one of them, or use another `run` id"
                    )
                if (
                    not self.retired_states.isdisjoint((policy.path, body.state_path))
                    or policy.anchor in self.retired_policies
                ):
                    raise Conflict(f"step {claim.step} came so late that its files were removed; start this run again")
                if policy.version in self.policies:
                    raise Conflict(f"policy version {policy.version} is already published")
                if not claim.base_version == policy.parent == self.newest_version:
                    raise Conflict(f"step {claim.step} does not train the newest policy, version {self.newest_version}")
                counts = Counter(group.group_id for _, group in claimed_groups(body))
                lost = [group_id for group_id, count in counts.items() if count > 1 or group_id not in self.pending]
                if lost:
                    raise Conflict(f"step {claim.step} claims groups twice, or that are not pending: {lost[:5]}")
            case Policy() if body.version in self.policies:
                raise Conflict(f"policy version {body.version} is already published")
            case Quarantine() if body.shard_id not in self.shards:
                raise Conflict(f"shard {body.shard_id} is not in this log")
            case Alias(version=version) if version in self.retired_policies:
                raise Conflict(f"policy version {version} was retired: its weights are gone")
            case Rescore(name=name, reward_sha256=digest):
                if unknown := body.files.keys() - self.shards.keys():
                    raise Conflict(f"rewards {name!r} name shards that are not in this log: {sorted(unknown)[:5]}")
                known = self.rescored.get(name)
                if known is not None and known.reward_sha256 != digest:
                    raise Conflict(
                        f"rewards {name!r} were made by another version of {known.reward}; choose a new name"
                    )
            case Retire():
                needed = {self.shard_of[group_id] for group_id in self.pending}.intersection(body.shard_ids)
                if needed:
                    raise Conflict(f"shards {sorted(needed)[:5]} hold groups no step has taken")
                named = {alias.version for alias in self.aliases.values()} | {self.newest_version}
                if kept := named.intersection(body.policy_versions):
                    raise Conflict(f"policy versions {sorted(kept)} are live or have an alias")
                anchors = {self.policies[version].anchor for version in named if version in self.policies}
                if kept_anchors := [version for version in body.policy_versions if version in anchors]:
                    raise Conflict(f"policy versions {kept_anchors} are anchors of what is live or has an alias")
                # A plan may take these for files no step has committed; what a resume needs is never retired otherwise.
                newest = {self.live.path, self.steps[-1].state_path} if self.live and self.steps else set()
                if kept_paths := newest.intersection(body.state_paths):
                    raise Conflict(f"{', '.join(sorted(map(str, kept_paths)))} is the newest step's")
            case _:
                pass

    def apply(self, entry: LogEntry) -> None:
        """Fold one entry in. Raises `LogDamaged` where it contradicts the ones before."""
        if entry.number != self.entries:
            raise LogDamaged(f"log entry {entry.number} follows {self.entries - 1}")
        try:
            self.fits(entry.body)
        except Conflict as error:
            raise LogDamaged(f"log entry {entry.number}: {error}") from error
        if not self.entries:
            self.started_at = entry.written_at
        self.entries += 1
        match entry.body:
            case Session() as session:
                self.earlier_seconds = self.worked_seconds
                self.session_started_at = entry.written_at
                self.sessions.append(session)
                # The workers of an earlier session are gone, or too late; those it had not started go on.
                self.producers = {holder: join for holder, join in self.producers.items() if join.outside}
                self._free([position for position, name in self.leased.items() if name not in self.producers])
            case Lease(holder=holder, positions=positions):
                self.leased.update(dict.fromkeys(positions, holder))
                self.num_leases += 1
            case Join(holder=holder) as join:
                self._free([position for position, name in self.leased.items() if name == holder])
                self.producers[holder] = join
            case Release(holder=holder):
                self._free([position for position, name in self.leased.items() if name == holder])
                self.producers.pop(holder, None)
            case Shard() as shard:
                self.shards[shard.id] = shard
                if not shard.is_eval:
                    self.num_trajectories += shard.num_rows
                    for group in shard.groups:
                        self.groups[group.id] = group
                        self.shard_of[group.id] = shard.id
                        self.pending[group.id] = None
                        if group.retried:  # its worker keeps the lease and tries again
                            self.retries[group.position] += 1
                        else:
                            self.positions.add(group.position)
                            self.leased.pop(group.position, None)
            case Step() as step:
                for outcome, claimed in claimed_groups(step):
                    del self.pending[claimed.group_id]
                    self.outcomes[claimed.group_id] = outcome
                    self.step_of[claimed.group_id] = step.claim.step
                self.steps.append(step)
                self._publish(step.policy)
            case Policy() as policy:
                self._publish(policy)
            case Evaluation() as evaluation:
                self.evaluations.append(evaluation)
                self.evaluation_shards.add(evaluation.shard_id)
            case Alias() as alias:
                self.aliases[alias.name] = alias
            case Registration() as registration:
                self.registrations[registration.version] = registration
            case Rescore() as rescore:
                self.rescored[rescore.name] = merged(self.rescored.get(rescore.name), rescore)
            case Retire() as retire:
                self.retire(retire)
            case Pause(reason=reason):
                self.paused = reason
            case Resume():
                self.paused = ""
            case Quarantine(shard_id=shard_id, reason=reason):
                self.quarantined[shard_id] = reason
                # What no step has used is lost with the file, so its prompts run again under new group ids.
                for group in self.shards[shard_id].groups:
                    if group.id in self.pending:
                        del self.pending[group.id], self.groups[group.id], self.shard_of[group.id]
                        if not group.retried:
                            self.positions.discard(group.position)
                            self._first_free = min(self._first_free, group.position)
                            self.retries[group.position] += 1
        self.last_at = entry.written_at

    def retire(self, body: Retire) -> None:
        """Note what retention takes away."""
        self.retired_shards.update(body.shard_ids)
        self.retired_policies.update(body.policy_versions)
        self.retired_states.update(body.state_paths)

    def _free(self, positions: Iterable[int]) -> None:
        for position in positions:
            del self.leased[position]
            self._first_free = min(self._first_free, position)

    def _publish(self, policy: Policy) -> None:
        self.policies[policy.version] = policy
        self.newest_version = max(self.newest_version, policy.version)


def merged(known: Rescore | None, added: Rescore) -> Rescore:
    """One name's rewards so far, with those of another entry."""
    return replace(added, files={**known.files, **added.files}) if known else added


def claimed_groups(step: Step) -> list[tuple[str, ClaimedGroup]]:
    """Every group a step took out of the queue, with its outcome."""
    return [(outcome, group) for outcome in OUTCOMES for group in getattr(step.claim, outcome)]


def _taken(wanted: Iterable[Any], known: Container[Any]) -> list[Any]:
    """What of `wanted` is known already, or in there twice."""
    return sorted(value for value, count in Counter(wanted).items() if count > 1 or value in known)
