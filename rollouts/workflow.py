"""What a user writes: one class that lists problems and plays one attempt.

In: a `Task` and a `Chat`. Out: a `Score`. Grouping, retries, tokens, versions and storage are not its business.
`examples/arithmetic.py` is a whole one.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rollouts.chat.chat import Chat
from rollouts.reward_values import as_number
from settings.errors import UserError, counted
from storage.records import Message, RolloutGroup, Task, Trajectory


class WrongWorkflow(UserError):
    """The workflow returned neither a `Score` of numbers nor a number."""

    may_pass = False


@dataclass(frozen=True, kw_only=True)
class Score:
    """How good one attempt was."""

    reward: float | None
    """None means not applicable: the attempt is not trained and enters no mean. NaN and infinity become None."""
    parts: dict[str, float | None] = field(default_factory=dict)
    """Named components, for people and for later re-weighting."""
    vote: str | None = None
    """What the attempt answered, for the majority votes of an evaluation (maj@k): equal answers are equal texts. None:
    it has no vote."""

    def __post_init__(self) -> None:
        """Numbers of any library become floats; what is no number stays for `as_score` to name."""
        with contextlib.suppress(TypeError):
            object.__setattr__(self, "reward", as_number(self.reward))
        with contextlib.suppress(TypeError):
            object.__setattr__(self, "parts", {name: as_number(part) for name, part in self.parts.items()})


def as_score(returned: object, run: Callable[..., object]) -> Score:
    """What an attempt returned, as a score; a number is its reward.

    NaN and infinity are no reward. Raises `WrongWorkflow`, which names the line of `run`, for anything else.
    """
    if isinstance(returned, Score):
        rewards = {"reward": returned.reward, **returned.parts}
        if unnamed := [name for name in rewards if not isinstance(name, str)]:
            problem = f"{run.__qualname__} returned a Score with a part named {unnamed[0]!r}, and not by a text"
            raise WrongWorkflow(f"{problem}. It is at {place_of(run)}")
        if wrong := [name for name, value in rewards.items() if not isinstance(value, float | None)]:
            problem = f"{run.__qualname__} returned a Score whose {wrong[0]} is {rewards[wrong[0]]!r}, and not a number"
            raise WrongWorkflow(f"{problem}. It is at {place_of(run)}")
        if not isinstance(returned.vote, str | None):
            problem = f"{run.__qualname__} returned a Score whose vote is {returned.vote!r}, and not a text"
            raise WrongWorkflow(f"{problem}. It is at {place_of(run)}")
        return returned
    with contextlib.suppress(TypeError):
        if returned is not None:
            return Score(reward=as_number(returned))
    if inspect.iscoroutine(returned):
        returned.close()  # or Python warns of it
        problem = f"{run.__qualname__} returned what was not awaited: write `await` before {returned.__qualname__}(…)"
        raise WrongWorkflow(f"{problem}. It is at {place_of(run)}")
    raise WrongWorkflow(
        f"{run.__qualname__} returned {type(returned).__name__}; one call plays one attempt and returns one Score "
        f"or a number, its reward. Grouping is `n_samples` in the run file. It is at {place_of(run)}"
    )


def as_scores(returned: object, score_group: Callable[..., object], *, num_attempts: int) -> list[Score] | None:
    """What `score_group` returned, as one score for each attempt; None if it has nothing to say.

    Raises `WrongWorkflow`, which names the line of `score_group`, for anything else.
    """
    if returned is None:
        return None
    scores = [] if isinstance(returned, Mapping | str) or not isinstance(returned, Iterable) else list(returned)
    if len(scores) != num_attempts:
        what = counted(len(scores), "score") if scores else type(returned).__name__
        of = counted(num_attempts, "attempt")
        problem = f"{score_group.__qualname__} returned {what} for {of}; return one Score each"
        raise WrongWorkflow(f"{problem}, in a list. It is at {place_of(score_group)}")
    return [as_score(each, score_group) for each in scores]


def as_accepted(returned: object, accept: Callable[..., object]) -> bool:
    """What `accept` returned, as True or False. Raises `WrongWorkflow`, which names its line, for a text: "no" would be
    true."""
    if isinstance(returned, str | bytes):
        problem = f"{accept.__qualname__} returned {returned!r}; return True or False"
        raise WrongWorkflow(f"{problem}. It is at {place_of(accept)}")
    return bool(returned)


def place_of(function: Callable[..., object]) -> str:
    """File and line of a function or a class that a user wrote."""
    if isinstance(function, type):
        return f"{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}"
    code = getattr(inspect.unwrap(function), "__code__", None)
    return repr(function) if code is None else f"{code.co_filename}:{code.co_firstlineno}"


@dataclass(frozen=True, kw_only=True)
class WorkflowContext:
    """Where the running attempt stands."""

    is_eval: bool
    task_id: str
    attempt: int


CONTEXT: contextvars.ContextVar[WorkflowContext] = contextvars.ContextVar("workflow_context")
"""Set by the executor at the start of an attempt's own asyncio task."""


OWED: contextvars.ContextVar[list[str]] = contextvars.ContextVar("owed")
"""Set for each group: what in it depends on the clock or on a service elsewhere, see `RolloutGroup.owes`."""


def owe(problem: str) -> None:
    """Record that this code's group depends on something that draws and replies do not decide."""
    OWED.get([]).append(problem)


def workflow_context() -> WorkflowContext:
    """The context of the attempt that runs this code; `LookupError` outside of one."""
    return CONTEXT.get()


class Workflow:
    """Subclass this. `dataset` is the run file's `dataset` value, None when it has none."""

    def __init__(self, dataset: str | None = None) -> None:
        self._dataset = dataset
        self.dataset_was_read = False
        """True if `dataset` has been read."""

    @property
    def dataset(self) -> str | None:
        """The run file's `dataset`."""
        if not hasattr(self, "_dataset"):
            raise WrongWorkflow(
                f"{type(self).__name__}.__init__ does not call super().__init__(dataset); it must, first"
            )
        self.dataset_was_read = True
        return self._dataset

    @dataset.setter
    def dataset(self, dataset: str | None) -> None:
        self._dataset = dataset

    def tasks(self, split: str) -> Sequence[Task]:
        """The problems of a split (`train`, `test`, …), in a fixed order, ids unique."""
        raise NotImplementedError

    async def run(self, task: Task, chat: Chat) -> Score | float:
        """Play one attempt; a number is its reward. Raise for faults of the environment, score low for the policy's."""
        raise NotImplementedError

    async def score_group(self, task: Task, attempts: Sequence[Trajectory]) -> Sequence[Score] | None:
        """Rewards that compare the usable attempts at one task, in their order; they replace those of `run`.

        None, the default, leaves the rewards of `run`.
        """
        return None

    def accept(self, group: RolloutGroup) -> bool:
        """False keeps a group with enough usable attempts from being trained; it is stored with the reason."""
        return True

    def reference_reply(self, task: Task, messages: Sequence[Message]) -> str | None:
        """What a perfect policy says next: the check that a task can be won, and that winning it scores 1.

        `messages` is the conversation so far; its last message is the one to answer. None, the default, means that
        it is not known.
        """
        return None

    async def close(self) -> None:
        """Release what all attempts shared; called once, when the worker stops."""

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:
        """Example conversations for warming up a model made from scratch; only needed for that."""
        raise NotImplementedError(f"{type(self).__name__} has no demonstrations to warm up a base model with")
