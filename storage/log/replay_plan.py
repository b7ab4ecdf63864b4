"""What a replay is: the recorded steps that are trained again, the saved state they start from, and the result.

In: the fold of a run's log, and a span of steps. Out: a `ReplayPlan`, a pure function of the log; later a `Replay`.

    base policy, or the nearest saved state ─▶ steps before the span, as recorded ─▶ the span, possibly with a change
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from settings.errors import InvalidInput
from settings.places.hints import command
from storage.log.entries import Step
from storage.log.run_state import RunState


class CannotReplay(InvalidInput):
    """Recorded steps cannot be trained again; the message says why, and what to do."""


@dataclass(frozen=True, kw_only=True)
class ReplayPlan:
    """The steps from a saved state to the end of a span."""

    resumed_from: int
    """Step whose saved state is loaded; 0 is the base policy."""
    first: int
    """First step of the span; steps before it are trained as recorded."""
    last: int

    @property
    def steps(self) -> range:
        """Every step that is trained, in order."""
        return range(self.resumed_from + 1, self.last + 1)


TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}
"""Distance up to which a step counts as the same if another torch, processor or number of threads has replayed it, by
`train.dtype`. Sums in another order changed three updates together by 1e-5 and by 0.03 to 0.05 of them."""


def version_of(arithmetic: str) -> int:
    """The version in `storage.log.entries.Step.arithmetic`; 1 in steps from before it was recorded.

    >>> version_of("2, torch 2.13.0+cpu, AVX512, 2 threads, 1 rank"), version_of("")
    (2, 1)
    """
    return int(arithmetic.split(",")[0]) if arithmetic else 1


@dataclass(frozen=True, kw_only=True)
class ReplayedStep:
    """A step of the span, as recorded and as replayed."""

    step: int
    identical: bool
    """True if the weights are the recorded ones, bit for bit."""
    recorded_sha256: str
    """Digest of the policy's weights."""
    replayed_sha256: str
    recorded: dict[str, float]
    """The metrics that the trainer computes."""
    replayed: dict[str, float]
    distance: float | None
    """‖replayed − recorded‖ / ‖recorded − start‖ over all weights; start is the policy before the span. None if the
    recorded weights are gone or never changed."""
    cosine: float | None
    """Cosine between the updates since the start: 1 is the same direction. None as above."""
    recorded_arithmetic: str
    """What added up the numbers (`storage.log.entries.Step.arithmetic`)."""
    replayed_arithmetic: str
    tolerance: float
    """One of `TOLERANCES`."""

    @property
    def agrees(self) -> bool:
        """True if the weights are the recorded ones, or another arithmetic has made nearly the same."""
        is_other = self.recorded_arithmetic != self.replayed_arithmetic
        return self.identical or (is_other and self.distance is not None and self.distance <= self.tolerance)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The result of a replay."""

    run: str
    plan: ReplayPlan
    changes: dict[str, str]
    """Settings that differ in the span, as `old → new`."""
    rewards: str
    """Name of the rewards that the span is trained on; empty for the recorded ones."""
    start_identical: bool
    """False if the steps before the span gave other weights than recorded; the span starts from the recorded ones."""
    steps: list[ReplayedStep]
    recorded_code: str
    """Code version that made the span's last step."""
    code: str
    """Code version that replayed it."""

    @property
    def unchanged(self) -> bool:
        """True if no change was made, so that every step must come out as recorded."""
        return not self.changes and not self.rewards

    @property
    def identical(self) -> bool:
        """True if every step of the span came out as recorded."""
        return all(step.identical for step in self.steps)

    @property
    def agrees(self) -> bool:
        """True if every step of the span did, as far as the arithmetic that it was replayed with lets it."""
        return all(step.agrees for step in self.steps)


def saved_steps(state: RunState, *, at_most: int) -> Iterator[Step]:
    """Steps up to `at_most` that have a saved optimizer state, newest first."""
    return (step for number in range(at_most, 0, -1) if is_saved(state, step := state.steps[number - 1]))


def plan_replay(state: RunState, *, run: str, first: int, last: int, rewards: str = "") -> ReplayPlan:
    """The plan to train the steps `first` to `last` again. Raises `CannotReplay`."""
    if not state.step:
        raise CannotReplay(f"run {run!r} has no steps yet, so there is nothing to replay")
    if not 1 <= first <= last <= state.step:
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        raise CannotReplay(f"run {run!r} has no {steps}; it has steps 1 to {state.step}")
    if rewards and rewards not in state.rescored:
        names = ", ".join(state.rescored) or "none"
        raise CannotReplay(
            f"run {run!r} has no rewards {rewards!r}; it has: {names}. `{command('rescore', run)}` makes them"
        )
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
                f"continue them with `{command('rescore', run, '--reward', reward, '--name', rewards)}`"
            )
    return plan


def later_start(state: RunState, step: int) -> str:
    """The next saved state to replay from, in a sentence for users, if a step cannot be trained again."""
    for number in range(step, state.step):
        if is_saved(state, state.steps[number - 1]):
            return f"steps from {number + 1} on can be replayed, from the state saved there: --from {number + 1}"
    return "no later optimizer state is saved, so nothing after it can be replayed either"


def is_saved(state: RunState, step: Step) -> bool:
    """True if the optimizer state of a step was saved and is still there."""
    return step.state_path is not None and step.state_path not in state.retired_states
