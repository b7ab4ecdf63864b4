"""The records of a run's log, as frozen dataclasses.

    RolloutGroup ─▶ GroupSummary ─▶ Shard ──┐
    Claim ──one optimizer step──▶ Step ─────┼─▶ LogEntry, one numbered JSON file
    Policy, Evaluation, Alias, Rescore, … ──┘

A new kind is a class here, named in `Entry`, and a `case` in `RunState._change`; and one in `conflicts` if its retry
can be recognised, or it can contradict the log.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass, field
from typing import Literal

LATER = {"later": True}
"""Metadata of a field that is written only if it is not empty: entries from before it keep their bytes."""

Outcome = Literal["finished", "stopped", "failed"]
"""How a session ended: with all its steps, because a user asked, or with an error."""


@dataclass(frozen=True, kw_only=True)
class GroupSummary:
    """What the log keeps of a group, so that a run is folded without opening a shard."""

    id: str
    prompt_id: str
    position: int
    """Place in the endless prompt order."""
    epoch: int
    expected: int
    """Attempts asked for."""
    usable: int
    """Attempts that may be trained on."""
    rows: int
    """Rows in the shard: one per training sequence, ≥ usable."""
    accepted: bool
    """False if a filter rejected it, or if too few of its attempts are usable."""
    reject_reason: str
    """Why it was not accepted; empty if it was."""
    failures: dict[str, int]
    """Number of attempts by failing status."""
    head_version: int
    """Oldest policy version of any sampled token, and `tail_version` the newest; −1 without rows."""
    tail_version: int
    mean_reward: float | None
    """Over usable attempts."""
    retried: bool = False
    """True if the group failed and its prompt runs again: the position stays free."""
    out_of_room: int = 0
    """Attempts that ended because they had filled the model's context, trained or not."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A committed, immutable Arrow file of trajectories."""

    id: str
    """Unique in the run; the file is `shards/<id>.arrow`."""
    sha256: str
    """Digest of the file's bytes."""
    num_rows: int
    num_tokens: int
    """Sampled tokens, those with loss mask 1; a row is a training sequence."""
    num_bytes: int
    head_version: int
    """Oldest policy version in it, and `tail_version` the newest."""
    tail_version: int
    is_eval: bool
    """True for the attempts of an evaluation, which no step takes."""
    groups: list[GroupSummary]
    producer: str
    seconds: dict[str, float]
    """Time of the producer by phase: generate, reward, commit."""
    owes: dict[str, str] = field(default_factory=dict, metadata=LATER)
    """Group id → what in it depends on the clock, or on anything else that draws and replies do not decide."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A set of weights the engine can serve."""

    version: int
    """0 is the base model; every step makes the next one."""
    path: str
    """In the store: `runs/<run>/policies/<version>-<attempt>`, the parent's if nothing trained, or `models/<name>`."""
    weights_sha256: str
    """Digest of the safetensors content; equal weights have equal digests."""
    parent: int | None
    """Version it was trained from; None for the base model."""
    anchor: int | None = None
    """Version that the folder's `delta.safetensors` is a difference to; None if the folder has whole weights."""
    reference: str = ""
    """Folder in the store of the model that `train.reference.model` named when the run began; empty if not recorded."""


@dataclass(frozen=True, kw_only=True)
class ClaimedGroup:
    """One group of one shard."""

    shard_id: str
    group_id: str
    reason: str = ""
    """Why it was not trained; empty if it was."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What one optimizer step takes out of the queue: groups by outcome.

    A group is stale over the staleness bound, filtered if a filter rejected it, failed with too few usable attempts.
    """

    step: int
    """From 1."""
    base_version: int
    trained: list[ClaimedGroup]
    """In prompt order, with `parts` in that of each."""
    stale: list[ClaimedGroup]
    filtered: list[ClaimedGroup]
    failed: list[ClaimedGroup]
    cancelled: list[ClaimedGroup] = field(default_factory=list)
    fallback: str = ""
    """What the step does if no group was accepted: `skip_step` or `masked`; empty if it trains."""
    parts: list[int] = field(default_factory=list, metadata=LATER)
    """Number of groups in each part of `trained` whose gradients were added up before those of the next, while the
    batch was still being sampled (`train.stream`); empty: all at once."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A committed optimizer step."""

    claim: Claim
    policy: Policy
    shard_sha256: dict[str, str]
    """Digest of every shard it read, by shard id."""
    metrics: dict[str, float]
    """Loss, reward, staleness, seconds by phase and more; see docs/metrics.md."""
    state_path: str | None
    """Folder in the store with optimizer and random state; None if the step saved none."""
    session_id: str
    arithmetic: str = field(default="", metadata=LATER)
    """What added up its numbers, its version first: `2, torch 2.13.0+cpu, AVX512, 2 threads, 1 rank`; empty: version 1.
    Equal ones give equal weights, bit for bit."""
    by_attempt: bool = field(default=False, metadata=LATER)
    """A sequence of `train.aggregation` was an attempt; in steps from before this was recorded, each row of it."""
    owes: str = field(default="", metadata=LATER)
    """See `storage.log.claims.owed_by`; empty in steps from before this was recorded."""


OUTCOMES = ("trained", "filtered", "stale", "failed", "cancelled")
"""What a step decides about a group; the names of a claim's fields."""


def claimed_groups(step: Step) -> list[tuple[str, ClaimedGroup]]:
    """Every group a step took out of the queue, with its outcome."""
    return [(outcome, group) for outcome in OUTCOMES for group in getattr(step.claim, outcome)]


def piece_id(shard_id: str, number: int) -> str:
    """Id of an evaluation's shard `number`, from 0; `shard_id` is the id of the first."""
    return f"{shard_id}-{number}" if number else shard_id


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Held-out score of one policy version."""

    version: int
    """The policy version that sampled all its tokens."""
    split: str
    score: float
    """avg@n: mean reward over all attempts at all tasks; a failed attempt counts as 0."""
    num_tasks: int
    num_failed: int
    """Attempts that failed; the score counts them."""
    shard_id: str
    """The first of its shards; see `shard_ids`."""
    seconds: float
    n_samples: int = 0
    """Attempts per task; 0 in logs from before this was recorded."""
    pass_at: dict[str, float] = field(default_factory=dict)
    """k → pass@k, the unbiased estimate of how often one of k attempts is correct; k = 1, 2, 4, … n_samples."""
    failures: dict[str, int] = field(default_factory=dict)
    """Number of attempts by failing status."""
    last_error: str = ""
    """Error of a failed attempt, shortened; empty if none failed."""
    standard_error: float | None = None
    """Standard error of the score, over tasks; None with fewer than two."""
    num_shards: int = 1
    pass_all: dict[str, float] = field(default_factory=dict, metadata=LATER)
    """k → pass^k, the unbiased estimate of how often all of k attempts are correct; k as in `pass_at`."""
    maj_at: dict[str, float] = field(default_factory=dict, metadata=LATER)
    """k → maj@k: how often the answer that most of k attempts gave is correct; empty if no attempt has a vote."""
    tasks: TaskSet | None = field(default=None, metadata=LATER)
    """All tasks of the split; None in logs from before this was recorded."""
    temperature: float | None = field(default=None, metadata=LATER)
    """At which the policy was sampled; None in logs from before this was recorded."""

    @property
    def shard_ids(self) -> list[str]:
        """Its shards, in commit order."""
        return [piece_id(self.shard_id, number) for number in range(self.num_shards)]

    @property
    def failed(self) -> bool:
        """True if every attempt failed; the score 0 then says nothing about the policy."""
        return 0 < self.num_tasks * self.n_samples == self.num_failed


@dataclass(frozen=True, kw_only=True)
class Alias:
    """A name for a policy version."""

    name: str
    """For example `rollout`."""
    version: int
    checksum: str
    """Digest of the weights that the engine holds after loading; empty if the driver has no engine."""
    update_mode: str = ""
    """What the engine did with running requests: `keep`, `wait` or `abort`; empty if it started with this policy."""
    cache_cleared: bool = False
    """True if the keys and values of the policy before were dropped."""
    paused_seconds: float = 0.0
    """Wall-clock from the request to pause the engine until it went on."""
    transfer: str = ""
    """How the weights reached the engine: `store`, or a broadcast by `gloo` or `nccl`; empty as above."""


@dataclass(frozen=True, kw_only=True)
class Registration:
    """A policy version is in MLflow's model registry."""

    version: int
    model_name: str
    registry_version: str
    """MLflow's own number of the version."""


@dataclass(frozen=True, kw_only=True)
class Quarantine:
    """A damaged shard, which nothing reads any more."""

    shard_id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Rescore:
    """New rewards for committed shards, in files of their own beside them; the recorded rewards stay."""

    name: str
    """Name of the set of rewards; a later entry of the same name adds shards to it."""
    reward: str
    """Import path of the reward function."""
    reward_sha256: str
    """Digest of the function's file; one name has one digest."""
    files: dict[str, str]
    """Shard id → sha256 of `rewards/<name>/<shard id>.arrow`."""


@dataclass(frozen=True, kw_only=True)
class Retire:
    """Files that retention removes; committed before the first of them is deleted."""

    shard_ids: list[str]
    """Shards whose file is removed; their summaries stay in the log. Also files that no entry names, nor ever may."""
    policy_versions: list[int]
    """Policies whose weights are removed."""
    state_paths: list[str]
    """Folders of optimizer state that are removed, and folders of policies and states that no step committed."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class TaskSet:
    """The tasks of a split; of those to train on, also where in the prompt order they begin."""

    count: int
    sha256: str
    """Digest of all that they hold, in their order."""
    ids_sha256: str
    """Digest of their ids, in their order."""
    first_position: int = 0
    """The place in the prompt order at which `first_epoch` begins; earlier sessions may have had other tasks."""
    first_epoch: int = 0


@dataclass(frozen=True, kw_only=True)
class Session:
    """One start of the run's driver, also after a stop or a crash."""

    id: str
    """Random; steps name it."""
    code_version: str
    """Commit of the code, or the package version outside a checkout."""
    reward_sha256: str = ""
    """Digest of the workflow's source file and of those of the functions it scores with."""
    steps: int = 0
    """The step that it trains to; 0 in logs from before this was recorded."""
    register: str = "all"
    """Which policies MLflow registers, see `tracking.register`; logs from before this was recorded have all."""
    host: str = ""
    """The machine of its driver; empty in logs from before this was recorded."""
    also: tuple[str, ...] = ()
    """Where metrics go beside MLflow, see `tracking.also`."""
    tasks: TaskSet | None = field(default=None, metadata=LATER)
    """What its prompts are of; None in logs from before this was recorded."""
    held_out: dict[str, TaskSet] = field(default_factory=dict, metadata=LATER)
    """Split → the tasks of its evaluations."""


@dataclass(frozen=True, kw_only=True)
class Join:
    """A rollout worker takes part from now on; positions leased to an earlier one of its name are free again."""

    holder: str
    id: str
    """Random; a worker that was given up for dead and returns joins again."""
    outside: bool = False
    """True if the driver did not start it: it outlives the driver's session, and gives signs of life."""


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Prompts that a rollout worker attempts from now on, so that no other starts them."""

    holder: str
    positions: list[int]
    """Places of the prompt order."""
    number: int
    """Leases in the log when this one was chosen; if there are more by now, it must be chosen again."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """A rollout worker has left: positions leased to it and not committed are free again."""

    holder: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Pause:
    """No attempt and no step begins from here on. What runs is finished and committed."""

    reason: str
    """What paused the run, in words; not empty."""


@dataclass(frozen=True, kw_only=True)
class Resume:
    """The run goes on."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class End:
    """A session is over, by its own account; one without it runs, or its process was killed."""

    session_id: str
    outcome: Outcome
    reason: str = ""
    """What failed, in a sentence or more; empty if nothing did."""


_OfRollouts = Session | End | Join | Lease | Release | Shard | Pause | Resume
_OfPolicies = Step | Policy | Evaluation | Alias | Registration
_OfFiles = Quarantine | Rescore | Retire
Entry = _OfRollouts | _OfPolicies | _OfFiles
ENTRY_KINDS: dict[str, type] = {
    "eval" if record is Evaluation else record.__name__.lower(): record for record in typing.get_args(Entry)
}
"""Kind, as an entry's document has it → record."""


@dataclass(frozen=True, kw_only=True)
class LogEntry:
    """One numbered line of a run's log."""

    number: int
    """Dense from 0."""
    kind: str
    """Key of `ENTRY_KINDS`."""
    written_at: float
    """Unix seconds on the writer's clock; decides nothing."""
    body: Entry
