"""What a replay is: which recorded steps are trained again, from which saved state, and what came out of it.

In: the fold of a run's log, and a span of steps. Out: a `ReplayPlan`, a pure function of the log; later a `Replay`.

    base policy, or the nearest saved state ─▶ steps before the span, as recorded ─▶ the span, perhaps with a change
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from settings.errors import InvalidInput
from storage.log.entries import Step
from storage.log.run_state import RunState


class CannotReplay(InvalidInput):
    """Recorded steps cannot be trained again; the message says why and what can be done."""


@dataclass(frozen=True, kw_only=True)
class ReplayPlan:
    """The steps from a saved state to the end of a span."""

    resumed_from: int
    """Step whose saved state is loaded first; 0 is the base policy."""
    first: int
    """First step of the span; those before it only lead up to it, as they were recorded."""
    last: int
    """Last step of the span."""

    @property
    def steps(self) -> range:
        """Every step that is trained, in order."""
        return range(self.resumed_from + 1, self.last + 1)


@dataclass(frozen=True, kw_only=True)
class ReplayedStep:
    """A step of the span, as it was and as it came out."""

    step: int
    """From 1."""
    identical: bool
    """True when the weights are the recorded ones, bit for bit."""
    recorded_sha256: str
    """Digest of the recorded policy's weights."""
    replayed_sha256: str
    """Digest of the replayed policy's weights."""
    recorded: dict[str, float]
    """The recorded step's metrics, those the trainer computes."""
    replayed: dict[str, float]
    """The same metrics now."""
    distance: float | None
    """‖replayed − recorded‖ / ‖recorded − start‖ over all weights, where start is the policy before the span; null
    where the recorded weights are gone or never moved."""
    cosine: float | None
    """Cosine between the updates since the start: 1 is the same direction; null as above."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What a replay found."""

    run: str
    """The run."""
    plan: ReplayPlan
    """What was trained again."""
    changes: dict[str, str]
    """Settings that differ in the span, as `old → new`."""
    rewards: str
    """Name of the rewards trained on in the span; empty for the recorded ones."""
    start_identical: bool
    """False when the steps before the span gave other weights than recorded; the span then starts from the recorded
    ones."""
    steps: list[ReplayedStep]
    """The span."""
    recorded_code: str
    """Code version that made the span's last step."""
    code: str
    """Code version that replayed it."""

    @property
    def unchanged(self) -> bool:
        """True when nothing was changed, so that every step must come out as recorded."""
        return not self.changes and not self.rewards

    @property
    def identical(self) -> bool:
        """True when every step of the span came out as recorded."""
        return all(step.identical for step in self.steps)


def saved_steps(state: RunState, *, at_most: int) -> Iterator[Step]:
    """Steps up to `at_most` whose optimizer state is still there, newest first."""
    return (step for number in range(at_most, 0, -1) if is_saved(state, step := state.steps[number - 1]))


def plan_replay(state: RunState, *, run: str, first: int, last: int, rewards: str = "") -> ReplayPlan:
    """Where a replay of the steps `first` to `last` starts, and what it trains.

    Raises `CannotReplay` for steps the run does not have, for shards that retention took away, and for rewards that
    do not cover the span.
    """
    if not state.step:
        raise CannotReplay(f"run {run!r} has no steps yet, so there is nothing to replay")
    if not 1 <= first <= last <= state.step:
        asked = f"step {first}" if first == last else f"steps {first} to {last}"
        raise CannotReplay(f"run {run!r} has no {asked}; it has steps 1 to {state.step}")
    if rewards and rewards not in state.rescored:
        known = ", ".join(state.rescored) or "none"
        raise CannotReplay(f"run {run!r} has no rewards {rewards!r}; it has: {known}. `millrace rescore` makes them")
    saved = next(saved_steps(state, at_most=first - 1), None)
    plan = ReplayPlan(resumed_from=saved.claim.step if saved else 0, first=first, last=last)
    for number in plan.steps:
        shard_ids = state.steps[number - 1].shard_sha256
        if gone := state.retired_shards.intersection(shard_ids):
            raise CannotReplay(
                f"step {number} was trained on shard {min(gone)}, which retention removed; "
                + later_start(state, number)
            )
        if rewards and number >= first and (missing := shard_ids.keys() - state.rescored[rewards].files.keys()):
            reward = state.rescored[rewards].reward
            raise CannotReplay(
                f"rewards {rewards!r} do not cover shard {min(missing)} of step {number}; "
                f"continue them with `millrace rescore {run} --reward {reward} --name {rewards}`"
            )
    return plan


def later_start(state: RunState, step: int) -> str:
    """What is left to do when a step cannot be trained again: replay from the next saved state on."""
    for number in range(step, state.step):
        if is_saved(state, state.steps[number - 1]):
            return f"steps from {number + 1} on can be replayed, from the state saved there: --from {number + 1}"
    return "no later optimizer state is saved, so nothing after it can be replayed either"


def is_saved(state: RunState, step: Step) -> bool:
    """Whether the optimizer state of a step was saved and is still there."""
    return step.state_path is not None and step.state_path not in state.retired_states
