"""What a user writes: one class that lists problems and plays one attempt.

In: a `Task` and a `Chat`. Out: a `Score`. Grouping, retries, tokens, versions and storage are not its business.
`examples/arithmetic.py` is a whole one.
"""

from __future__ import annotations

import contextvars
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollouts.chat.chat import Chat
from settings.errors import UserError
from storage.records import Message, RolloutGroup, Task, Trajectory


class WrongWorkflow(UserError):
    """The workflow returned something other than one `Score`."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """How good one attempt was."""

    reward: float | None
    """Null means not applicable: the attempt is not trained and enters no mean."""
    parts: dict[str, float | None] = field(default_factory=dict)
    """Named components, for people and for later re-weighting."""


@dataclass(frozen=True, kw_only=True)
class WorkflowContext:
    """Where the running attempt stands."""

    is_eval: bool
    task_id: str
    attempt: int


CONTEXT: contextvars.ContextVar[WorkflowContext] = contextvars.ContextVar("workflow_context")
"""Set by the executor at the start of an attempt's own asyncio task."""


def workflow_context() -> WorkflowContext:
    """The context of the attempt that runs this code; `LookupError` outside of one."""
    return CONTEXT.get()


class Workflow:
    """Subclass this. `dataset` is the run file's `dataset` value, null when it has none."""

    def __init__(self, dataset: str | None = None) -> None:
        self.dataset = dataset

    def tasks(self, split: str) -> Sequence[Task]:
        """The problems of a split (`train`, `test`, …), in a fixed order, ids unique."""
        raise NotImplementedError

    async def run(self, task: Task, chat: Chat) -> Score:
        """Play one attempt. Raise for a fault of the environment; score low for a fault of the policy."""
        raise NotImplementedError

    async def score_group(self, task: Task, attempts: Sequence[Trajectory]) -> Sequence[Score] | None:
        """Rewards that compare the usable attempts at one task, in their order; they replace those of `run`.

        Null, the default, leaves the rewards of `run`.
        """
        return None

    def accept(self, group: RolloutGroup) -> bool:
        """False keeps a group with enough usable attempts from being trained; it is stored with the reason."""
        return True

    def reference_reply(self, task: Task, messages: Sequence[Message]) -> str | None:
        """What a perfect policy says next: the check that a task can be won, and that winning it scores 1.

        `messages` is the conversation so far; its last message is the one to answer. Null, the default, where nobody
        knows.
        """
        return None

    async def close(self) -> None:
        """Release what all attempts shared; called once, when the worker stops."""

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:
        """Example conversations for warming up a model made from scratch; only needed for that."""
        raise NotImplementedError(f"{type(self).__name__} has no demonstrations to warm up a base model with")
