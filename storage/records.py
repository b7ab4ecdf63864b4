"""The records every stage meets at: what a prompt, an attempt, a shard, a policy and a log entry are.

In: nothing. Out: frozen dataclasses, plain data, no behaviour beyond checks and JSON.

    RolloutTask ──run n times──▶ Trajectory (turns, messages, reward) ──┐
                                                                         ├─ RolloutGroup ─▶ Shard ─▶ LogEntry
    one attempt fails ─────────▶ no Trajectory, one count in failures ──┘
    Claim (groups of committed shards) ──one optimizer step──▶ Policy ─▶ LogEntry

A failed attempt has no reward, never reward 0: it enters no mean, no standard deviation and no loss.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal[
    "ok",  # the policy ended its reply itself
    "truncated",  # cut at max_tokens; trained like ok
    "max_turns",  # the turn limit ended the conversation; trained like ok
    "env_error",  # the workflow raised
    "tool_error",  # a tool's infrastructure failed
    "reward_error",  # the reward function raised
    "timeout",  # the attempt or its reward passed its deadline
    "engine_error",  # the inference engine failed
    "cancelled",  # stopped from outside
]
TRAINABLE_STATUSES: frozenset[str] = frozenset({"ok", "truncated", "max_turns"})

NOT_SAMPLED = -1
"""Weight version of a token that no policy sampled (prompt, tool result)."""


@dataclass(frozen=True, kw_only=True)
class RolloutTask:
    """A problem to attempt. Example: `RolloutTask(id="37+45", prompt="37+45=", answer="82")`."""

    id: str
    """Stable name of the problem inside its data set; the prompt order and the lineage use it."""
    prompt: str
    """What the policy is asked first."""
    answer: str = ""
    """What the reward compares with; empty where the workflow knows better."""
    metadata: dict[str, str] = field(default_factory=dict)
    """Anything else the workflow wants back; never shown to the policy."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """One chat message, written once per trajectory."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""
    content: str
    """Text as the chat template saw it."""
    is_completion: bool = False
    """True where the policy wrote it."""


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One execution of a tool asked for by the policy."""

    name: str
    """The tool's function name."""
    arguments: str
    """JSON object of the arguments, as the policy wrote it."""
    result: str
    """What was shown to the policy."""
    failed: bool = False
    """True when the tool raised or timed out."""
    seconds: float = 0.0
    """Wall-clock of the execution."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One call of the policy: the tokens put before it, then the tokens it sampled."""

    context_ids: list[int]
    """Tokens added since the previous turn of the same sequence; never trained."""
    sampled_ids: list[int]
    """Tokens exactly as the engine returned them, the end token included."""
    logprobs: list[float]
    """Log-probability of each sampled token under the policy and the sampling settings, ≤ 0."""
    weight_versions: list[int]
    """Policy version that sampled each token, as the engine reports it."""
    finish_reason: str
    """`stop` or `length`, from the engine."""
    sequence_idx: int = 0
    """Which training sequence of the trajectory this turn extends; an edited history starts the next one."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """Tools executed after this turn."""
    generate_seconds: float = 0.0
    """Wall-clock of the engine call."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the tokens were drawn; stored with every row, because logprobs mean nothing without it."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Nucleus mass kept."""
    top_k: int = 0
    """Number of best tokens kept; 0 keeps all."""
    min_p: float = 0.0
    """Least probability relative to the best token."""
    max_tokens: int = 256
    """Longest reply of one turn, in tokens."""
    seed: int | None = None
    """Per-request seed, null where the engine's own stream was used."""
    logprobs_mode: str = "processed_logprobs"
    """`processed_logprobs`: after temperature, top-k and top-p; `raw_logprobs`: before."""


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One finished attempt at one task."""

    attempt: int
    """0 … n_samples − 1 inside its group."""
    turns: list[Turn]
    """In the order they were sampled."""
    messages: list[Message]
    """The whole conversation, each message once."""
    status: str
    """One of `Status`; only trainable ones are written as rows."""
    reward: float | None
    """Total reward; null means not applicable and enters nothing."""
    reward_parts: dict[str, float | None] = field(default_factory=dict)
    """Named components of the reward."""
    reward_seconds: float = 0.0
    """Wall-clock spent scoring."""
    started_at: float = 0.0
    """Unix seconds."""
    finished_at: float = 0.0
    """Unix seconds."""
    error: str = ""
    """What went wrong, where the status names a fault."""

    @property
    def usable(self) -> bool:
        """True when this attempt may be trained on."""
        return self.status in TRAINABLE_STATUSES and self.reward is not None and any(t.sampled_ids for t in self.turns)


@dataclass(frozen=True, kw_only=True)
class RolloutGroup:
    """All attempts at one task in one epoch: the unit of admission, claim and advantage."""

    id: str
    """`<epoch>.<task id>`, with `.retry<k>` where a damaged shard made the prompt run again."""
    task: RolloutTask
    """The problem."""
    position: int
    """Place in the endless prompt order: epoch × len(tasks) + index."""
    epoch: int
    """Pass over the data set, from 0."""
    expected: int
    """Attempts asked for."""
    trajectories: list[Trajectory]
    """Every attempt that returned, usable or not."""
    accepted: bool = True
    """False when a filter rejected the whole group; it is stored all the same, and never trained."""
    reject_reason: str = ""
    """Why it was rejected."""
    queued_at: float = 0.0
    """Unix seconds at admission."""

    @property
    def usable(self) -> list[Trajectory]:
        """The attempts that become rows."""
        return [trajectory for trajectory in self.trajectories if trajectory.usable]


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
    """Folder in the store: `runs/<run>/policies/<version>-<attempt>`, or `models/<name>` for a base model."""
    weights_sha256: str
    """Digest of the safetensors content; equal weights have equal digests."""
    parent: int | None
    """Version it was trained from; null for the base model."""


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


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Held-out score of one policy version."""

    version: int
    """The only version that sampled its tokens."""
    split: str
    """Which split of the workflow."""
    score: float
    """Mean reward, failed attempts counted as 0."""
    num_tasks: int
    """Problems asked."""
    num_failed: int
    """Attempts that ended in a failing status; they are in the denominator."""
    shard_id: str
    """Where the trajectories are."""
    seconds: float
    """Wall-clock."""


@dataclass(frozen=True, kw_only=True)
class Alias:
    """A name that points at a policy version."""

    name: str
    """For example `rollout`."""
    version: int
    """The policy version it names from now on."""
    checksum: str
    """Digest of the weights as the engine holds them after loading."""


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
class Session:
    """One start of the run's driver: a fresh one, or a resume after a stop or a crash."""

    id: str
    """Random; every step names the session that made it."""
    code_version: str
    """Commit of the code, or the package version outside a checkout."""


Entry = Session | Shard | Step | Policy | Evaluation | Alias | Registration | Quarantine
ENTRY_KINDS: dict[str, type] = {
    "session": Session,
    "shard": Shard,
    "step": Step,
    "policy": Policy,
    "eval": Evaluation,
    "alias": Alias,
    "registration": Registration,
    "quarantine": Quarantine,
}


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


def to_json(record: Any) -> Any:
    """Plain JSON value of a record: dataclasses become objects, in field order."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {f.name: to_json(getattr(record, f.name)) for f in dataclasses.fields(record)}
    if isinstance(record, dict):
        return {key: to_json(value) for key, value in record.items()}
    if isinstance(record, list | tuple):
        return [to_json(value) for value in record]
    return record


def from_json(kind: Any, value: Any) -> Any:
    """Rebuild a record of type `kind`; unknown keys are ignored (a newer writer), missing ones raise `TypeError`."""
    if dataclasses.is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: from_json(hints[name], value[name]) for name in hints if name in value})  # type: ignore[operator]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return [from_json(arguments[0], item) for item in value]
    if origin is dict:
        return {key: from_json(arguments[1], item) for key, item in value.items()}
    if origin in (types.UnionType, typing.Union):
        inner = [argument for argument in arguments if argument is not type(None)]
        return None if value is None else from_json(inner[0], value)
    return value


_HINTS: dict[Any, dict[str, Any]] = {}


def _hints(kind: Any) -> dict[str, Any]:
    """Resolved annotations, cached: resolving them dominates reading a long log."""
    if kind not in _HINTS:
        _HINTS[kind] = typing.get_type_hints(kind)
    return _HINTS[kind]
