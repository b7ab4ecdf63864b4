"""What rollouts produce: a task, an attempt at it, a group of attempts. What a log keeps of them: `log/entries.py`.

In: nothing. Out: frozen dataclasses, plain data, no behaviour beyond checks. Their texts are well-formed: half of a
surrogate pair, as in a file name that is no UTF-8 or in "\\ud83d" of a JSON file, becomes U+FFFD.

    Task ──run n times──▶ Trajectory (turns, messages, reward) ──▶ RolloutGroup ──▶ rows of a shard

A failed attempt has no reward, never reward 0: it enters no mean, no standard deviation and no loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from settings.redaction import well_formed_data

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


def _make_well_formed(record: Any) -> None:
    for name, value in vars(record).items():
        if isinstance(value, dict) or (isinstance(value, str) and not value.isascii()):
            object.__setattr__(record, name, well_formed_data(value))


@dataclass(frozen=True, kw_only=True)
class Task:
    """A problem to attempt. Example: `Task(id="37+45", prompt="37+45=", answer="82")`."""

    id: str
    """Stable name of the problem inside its data set; the prompt order and the lineage use it."""
    prompt: str
    """What the policy is asked first."""
    answer: str = ""
    """What the reward compares with; empty if the workflow does not need it."""
    metadata: dict[str, str] = field(default_factory=dict)
    """Anything else that the workflow needs; never shown to the policy."""

    def __post_init__(self) -> None:
        _make_well_formed(self)


@dataclass(frozen=True, kw_only=True)
class Message:
    """One chat message, written once per trajectory."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""
    content: str
    """Text as the chat template saw it."""
    is_completion: bool = False
    """True if the policy wrote it."""
    answer: str | None = None
    """What rewards and agents get of it, without thoughts and stop string; None if that is all of `content`."""

    def __post_init__(self) -> None:
        _make_well_formed(self)


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
    """True if the tool raised or timed out."""
    seconds: float = 0.0
    """Wall-clock of the execution."""
    timed_out: bool = False
    """True if it was given up; shards do not keep it."""

    def __post_init__(self) -> None:
        _make_well_formed(self)


@dataclass(frozen=True, kw_only=True)
class Routes:
    """The experts that consecutive tokens were given by each layer of a model."""

    ids: bytes
    """Numbers of experts, one byte each, or two (little-endian) in a model with more than 256; by token, layer and
    choice. A layer without experts has zeros."""
    layers: int
    """Layers of the model."""
    choices: int
    """Experts of a token in a layer."""
    id_bytes: int
    """1 or 2."""

    @property
    def num_tokens(self) -> int:
        """How many tokens they are of."""
        return len(self.ids) // (self.layers * self.choices * self.id_bytes)


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
    stop: list[str] = field(default_factory=list)
    """Strings that the agent asked to end the reply at; the tokens up to the end of one are sampled like any other."""
    stopped_by: str = ""
    """The one that did, which agent and reward do not see; or the mark that ends a call, if only one was asked for."""
    constraint: str = ""
    """vLLM's structured-output parameters, as JSON, if a grammar restricted the tokens; `logprobs` are then those of
    the restricted distribution."""
    adapters: dict[int, str] = field(default_factory=dict)
    """Policy version → digest of the adapter the engine held under it, for the versions above that are adapters."""
    seed: int | None = None
    """Seed of its sequence, from which each token was drawn by turn and position; None for the engine's own stream."""
    routes: Routes | None = None
    """Experts of the tokens that follow the previous turn of the sequence, without the last sampled one, which has
    passed no layer yet. None if the engine does not capture them."""


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
    """Seed of the tokens, see `rollouts/engines/draws.py`; None for the engine's own stream. In a row of a shard it is
    the seed of the sequence, from which turn and position in the reply give each token its own."""
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
    """The whole conversation."""
    status: str
    """One of `Status`; only trainable ones are written as rows."""
    reward: float | None
    """Total reward; None if there is none, which enters no mean and no loss."""
    reward_parts: dict[str, float | None] = field(default_factory=dict)
    """Named components of the reward."""
    reward_seconds: float = 0.0
    """Wall-clock spent scoring."""
    started_at: float = 0.0
    """Unix seconds."""
    finished_at: float = 0.0
    """Unix seconds."""
    error: str = ""
    """The error, if the status names a failure."""
    out_of_room: bool = False
    """True if it ended because the conversation had filled the model's context."""
    excluded: bool = False
    """True if `rollout.exclude_statuses` names this status: the attempt is counted, and not trained."""
    vote: str | None = None
    """What it answered, for the majority votes of an evaluation; shards do not keep it."""

    def __post_init__(self) -> None:
        _make_well_formed(self)

    @property
    def usable(self) -> bool:
        """True if this attempt may be trained on."""
        fit = self.status in TRAINABLE_STATUSES and self.reward is not None and not self.excluded
        return fit and any(t.sampled_ids for t in self.turns)


@dataclass(frozen=True, kw_only=True)
class RolloutGroup:
    """All attempts at one task in one epoch: the unit of admission, claim and advantage."""

    id: str
    """`<epoch>.<task id>`; with `.retry<k>` if the prompt runs again, as its group failed or its shard was lost."""
    task: Task
    position: int
    """Place in the endless prompt order: epoch × len(tasks) + index."""
    epoch: int
    """Pass over the data set, from 0."""
    expected: int
    """Attempts asked for."""
    trajectories: list[Trajectory]
    """Every attempt that returned, usable or not."""
    accepted: bool = True
    """False if a filter rejected the group; it is stored all the same, and never trained."""
    reject_reason: str = ""
    queued_at: float = 0.0
    """Unix seconds at admission."""
    will_retry: bool = False
    """True if the group failed and its prompt runs again, under another group id."""
    owes: str = ""
    """What in it depends on the clock, or on anything else that draws and replies do not decide; for the log."""

    def __post_init__(self) -> None:
        _make_well_formed(self)

    @property
    def usable(self) -> list[Trajectory]:
        """The attempts that become rows."""
        return [trajectory for trajectory in self.trajectories if trajectory.usable]
