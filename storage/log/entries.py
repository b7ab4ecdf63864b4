"""What a run's log says: shards, claims, steps, policies and everything else that was committed.

In: nothing. Out: frozen dataclasses and their JSON.

    RolloutGroup ─▶ GroupSummary ─▶ Shard ──┐
    Claim ──one optimizer step──▶ Step ─────┼─▶ LogEntry, one numbered JSON file
    Policy, Evaluation, Alias, Rescore, … ──┘

A new kind is a class here, named in `Entry`, and a `case` in `RunState._change`, which says what it changes. One whose
retry can be told, or that can contradict the log, has a `case` in `conflicts` too.
"""

from __future__ import annotations

import json
import typing
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

Record = TypeVar("Record")


@dataclass(frozen=True, kw_only=True)
class GroupSummary:
    """What the log keeps of a group, so that a run is folded without opening a shard."""

    id: str
    """The group's id."""
    prompt_id: str
    """The task's id."""
    position: int
    """Place in the endless prompt order."""
    epoch: int
    """Pass over the data set."""
    expected: int
    """Attempts asked for."""
    usable: int
    """Attempts that may be trained on."""
    rows: int
    """Rows in the shard: one per training sequence, ≥ usable."""
    accepted: bool
    """False when a filter or too few usable attempts took it out."""
    reject_reason: str
    """Why; empty when accepted."""
    failures: dict[str, int]
    """Count of attempts by failing status."""
    head_version: int
    """Oldest policy version of any sampled token; −1 without rows."""
    tail_version: int
    """Newest policy version of any sampled token; −1 without rows."""
    mean_reward: float | None
    """Over usable attempts."""
    retried: bool = False
    """True where the group came to nothing and its prompt runs again: the position stays free."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A committed, immutable Arrow file of trajectories."""

    id: str
    """Unique in the run; the file is `shards/<id>.arrow`."""
    sha256: str
    """Of the file's bytes."""
    num_rows: int
    """Training sequences."""
    num_tokens: int
    """Sampled tokens, the ones with loss mask 1."""
    num_bytes: int
    """File size."""
    head_version: int
    """Oldest policy version in it."""
    tail_version: int
    """Newest policy version in it."""
    is_eval: bool
    """True for evaluation rows, which are never claimable."""
    groups: list[GroupSummary]
    """In row order."""
    producer: str
    """Name of the rollout worker."""
    seconds: dict[str, float]
    """Where the producer's time went: generate, reward, commit."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A set of weights the engine can serve."""

    version: int
    """0 is the base model; every step makes the next one."""
    path: str
    """Folder in the store: `runs/<run>/policies/<version>-<attempt>`, or `models/<name>` for a base model.
    A version that a step without anything to train has made shares its parent's folder."""
    weights_sha256: str
    """Digest of the safetensors content; equal weights have equal digests."""
    parent: int | None
    """Version it was trained from; null for the base model."""
    anchor: int | None = None
    """Version whose weights the folder's `delta.safetensors` is against; null where the weights are there whole."""


@dataclass(frozen=True, kw_only=True)
class ClaimedGroup:
    """One group of one shard."""

    shard_id: str
    """Where its rows are."""
    group_id: str
    """Which rows of the shard."""
    reason: str = ""
    """Why it is stale, filtered or failed; empty when trained."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What one optimizer step takes out of the queue: every group it passed over, by outcome."""

    step: int
    """The step that takes it, from 1."""
    base_version: int
    """The policy version being trained."""
    trained: list[ClaimedGroup]
    """In prompt order."""
    stale: list[ClaimedGroup]
    """Over the staleness bound under `strict`."""
    filtered: list[ClaimedGroup]
    """Rejected by a filter."""
    failed: list[ClaimedGroup]
    """Too few usable attempts."""
    cancelled: list[ClaimedGroup] = field(default_factory=list)
    """Given up while they were running."""
    fallback: str = ""
    """What the step does where nothing was accepted: `skip_step` or `masked`; empty where something is trained."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A committed optimizer step."""

    claim: Claim
    """What it consumed."""
    policy: Policy
    """What it made."""
    shard_sha256: dict[str, str]
    """Digest of every shard it read, by shard id."""
    metrics: dict[str, float]
    """Loss, reward, staleness, seconds by phase and the like; see docs/metrics.md."""
    state_path: str | None
    """Folder in the store with optimizer and random state; null on steps that saved none."""
    session_id: str
    """Which start of the driver made it."""


OUTCOMES = ("trained", "filtered", "stale", "failed", "cancelled")
"""What a step decides about a group; the names of a claim's fields."""


def claimed_groups(step: Step) -> list[tuple[str, ClaimedGroup]]:
    """Every group a step took out of the queue, with its outcome."""
    return [(outcome, group) for outcome in OUTCOMES for group in getattr(step.claim, outcome)]


def piece_id(shard_id: str, number: int) -> str:
    """Id of one of an evaluation's shards, counted from 0; `shard_id` is that of the first."""
    return f"{shard_id}-{number}" if number else shard_id


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Held-out score of one policy version."""

    version: int
    """The only version that sampled its tokens."""
    split: str
    """Which split of the workflow."""
    score: float
    """avg@n: mean reward over all attempts at all problems, failed attempts counted as 0."""
    num_tasks: int
    """Problems asked."""
    num_failed: int
    """Attempts that ended in a failing status; they are in the denominator."""
    shard_id: str
    """Where the trajectories are, or the first of them: see `shard_ids`."""
    seconds: float
    """Wall-clock."""
    n_samples: int = 0
    """Attempts per problem; 0 where an older log did not say."""
    pass_at: dict[str, float] = field(default_factory=dict)
    """k → pass@k, the unbiased estimate of how often one of k attempts is correct, for k = 1, 2, 4, … n_samples."""
    failures: dict[str, int] = field(default_factory=dict)
    """Count of attempts by failing status."""
    last_error: str = ""
    """What one of the failed attempts said, shortened; empty where none failed."""
    standard_error: float | None = None
    """Of the score, over problems; null with fewer than two."""
    num_shards: int = 1
    """Files the trajectories are in."""

    @property
    def shard_ids(self) -> list[str]:
        """Every shard of it, in the order they were committed."""
        return [piece_id(self.shard_id, number) for number in range(self.num_shards)]

    @property
    def failed(self) -> bool:
        """True where every attempt failed: the score, 0, then says nothing about the policy."""
        return 0 < self.num_tasks * self.n_samples == self.num_failed


@dataclass(frozen=True, kw_only=True)
class Alias:
    """A name that points at a policy version."""

    name: str
    """For example `rollout`."""
    version: int
    """The policy version it names from now on."""
    checksum: str
    """Digest of the weights as the engine holds them after loading; empty where the driver has no engine."""
    update_mode: str = ""
    """What became of the engine's running requests: `keep`, `wait` or `abort`; empty where it was started with it."""
    cache_cleared: bool = False
    """True where the keys and values that the policy before had computed were dropped."""
    paused_seconds: float = 0.0
    """Wall-clock from asking the engine to pause until it went on."""
    transfer: str = ""
    """How the weights came to the engine: `store`, or the trainer's broadcast by `gloo` or `nccl`; empty as above."""


@dataclass(frozen=True, kw_only=True)
class Registration:
    """A policy version became visible in the model registry."""

    version: int
    """Policy version."""
    model_name: str
    """Registered model name in MLflow."""
    registry_version: str
    """MLflow's own version number for it."""


@dataclass(frozen=True, kw_only=True)
class Quarantine:
    """A shard nothing reads any more."""

    shard_id: str
    """The damaged shard."""
    reason: str
    """What was wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Rescore:
    """New rewards for committed shards, in files of their own beside them; the recorded rewards stay."""

    name: str
    """What the set of rewards is called; a later entry of the same name adds shards to it."""
    reward: str
    """Import path of the reward function."""
    reward_sha256: str
    """Digest of the file the function is in; one name holds one digest."""
    files: dict[str, str]
    """Shard id → sha256 of `rewards/<name>/<shard id>.arrow`."""


@dataclass(frozen=True, kw_only=True)
class Retire:
    """Files that retention removes; committed before the first of them is deleted."""

    shard_ids: list[str]
    """Shards whose file goes, their summaries stay in the log; and files no entry names, which none may name later."""
    policy_versions: list[int]
    """Policies whose weights go."""
    state_paths: list[str]
    """Folders of optimizer state that go, and folders of policies and states that no step committed."""
    reason: str
    """The retention rule, for people."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """One start of the run's driver: a fresh one, or a resume after a stop or a crash."""

    id: str
    """Random; every step names the session that made it."""
    code_version: str
    """Commit of the code, or the package version outside a checkout."""
    reward_sha256: str = ""
    """Digest of the workflow's source file and of those of the functions it scores with."""
    steps: int = 0
    """Up to which step it means to train; 0 where an older log did not say."""


@dataclass(frozen=True, kw_only=True)
class Join:
    """A rollout worker takes part from now on; what an earlier one of its name had leased is free again."""

    holder: str
    """Name of the rollout worker."""
    id: str
    """Random: one that was given up for dead and comes back joins anew."""
    outside: bool = False
    """True for one that the driver has not started: it outlives the driver's session, and gives signs of life."""


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Prompts that a rollout worker is about to attempt, so that no other starts them."""

    holder: str
    """Name of the rollout worker."""
    positions: list[int]
    """Places of the prompt order."""
    number: int
    """How many leases the log held when this one was reckoned; if it holds more by now, it has to be reckoned anew."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """A rollout worker has left: what it had leased and not committed is free again."""

    holder: str
    """Name of the rollout worker."""
    reason: str
    """Why, for people."""


@dataclass(frozen=True, kw_only=True)
class Pause:
    """Nothing new is begun from here on: no attempt, no step. What runs is finished and committed."""

    reason: str
    """Who asked for it, for people; not empty."""


@dataclass(frozen=True, kw_only=True)
class Resume:
    """The run goes on."""

    reason: str
    """Who asked for it, for people."""


Entry = (
    Session
    | Join
    | Lease
    | Release
    | Shard
    | Step
    | Policy
    | Evaluation
    | Alias
    | Registration
    | Quarantine
    | Rescore
    | Retire
    | Pause
    | Resume
)
ENTRY_KINDS: dict[str, type] = {
    "eval" if record is Evaluation else record.__name__.lower(): record for record in typing.get_args(Entry)
}
"""What an entry's document calls its kind → the record."""


@dataclass(frozen=True, kw_only=True)
class LogEntry:
    """One numbered line of a run's log."""

    number: int
    """Dense from 0."""
    kind: str
    """Key of `ENTRY_KINDS`."""
    written_at: float
    """Unix seconds on the writer's clock; for people, never for decisions."""
    body: Entry
    """The record."""


class _Line(msgspec.Struct):
    """An entry's document, its body still JSON."""

    kind: str
    written_at: float
    body: msgspec.Raw


_KINDS = {record: kind for kind, record in ENTRY_KINDS.items()}
_LINE = msgspec.json.Decoder(_Line)
_BODIES: dict[str, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(record) for kind, record in ENTRY_KINDS.items()
}


def encode_entry(body: Entry, *, number: int, written_at: float) -> bytes:
    """An entry's document. Numbers and text are spelled as Python's own `json` spells them, in every version."""
    document = {"number": number, "kind": _KINDS[type(body)], "written_at": written_at, "body": to_json(body)}
    return json.dumps(document, separators=(",", ":")).encode()


def decode_entry(document: bytes, *, number: int) -> LogEntry:
    """An entry from its document. Raises `ValueError`, `KeyError` or `TypeError` for one that cannot be read."""
    try:
        line = _LINE.decode(document)
        kind, written_at, body = line.kind, line.written_at, _BODIES[line.kind].decode(line.body)
    except msgspec.DecodeError:  # damaged, or with a NaN, an infinity or half a surrogate pair, which `json` writes
        fields = json.loads(document)
        kind, written_at = fields["kind"], fields["written_at"]
        body = from_json(ENTRY_KINDS[kind], fields["body"])
    return LogEntry(number=number, kind=kind, written_at=written_at, body=body)


def to_json(record: Any) -> Any:
    """Plain JSON value of a record: dataclasses become objects, in field order."""
    return msgspec.to_builtins(record, enc_hook=_plain)


def from_json(kind: type[Record], value: Any) -> Record:
    """Rebuild a record of type `kind`; unknown keys are ignored (a newer writer), missing ones raise `ValueError`."""
    return msgspec.convert(value, kind, str_keys=True)


def _plain(value: Any) -> float:
    """A NumPy float as Python's."""
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"{value!r} has no place in JSON")
