"""Where a replay starts is read from the log, and what it cannot do is said with a way out."""

from __future__ import annotations

import dataclasses

import pytest

from storage.log.entries import Rescore, Retire
from storage.log.replay_plan import CannotReplay, plan_replay
from storage.log.run_log import RunLog
from tests.builders import a_log, a_shard, a_step, a_summary


def _log(*, steps: int = 5, states: tuple[int, ...] = (2, 4)) -> RunLog:
    """A run whose step k trained on shard `s<k>`, with optimizer state saved at some."""
    log = a_log()
    for number in range(1, steps + 1):
        log.append(a_shard(f"s{number}", [a_summary(number)]))
        step = a_step(log.state, trained=[f"0.task{number}"], attempt=str(number))
        path = f"runs/run/state/{number}" if number in states else None
        log.append(dataclasses.replace(step, state_path=path))
    return log


def _retire(log: RunLog, *, shards: list[str] | None = None, states: list[int] | None = None) -> None:
    paths = [f"runs/run/state/{number}" for number in states or []]
    log.append(Retire(shard_ids=shards or [], policy_versions=[], state_paths=paths, reason="test"))


@pytest.mark.parametrize(
    ("first", "last", "resumed_from"), [(1, 5, 0), (2, 2, 0), (3, 3, 2), (4, 5, 2), (5, 5, 4), (1, 1, 0)]
)
def test_a_replay_starts_from_the_nearest_state_before_its_span(first: int, last: int, resumed_from: int) -> None:
    plan = plan_replay(_log().state, run="run", first=first, last=last)
    assert (plan.resumed_from, list(plan.steps)) == (resumed_from, list(range(resumed_from + 1, last + 1)))


def test_states_that_retention_removed_are_passed_over() -> None:
    log = _log()
    _retire(log, states=[4])
    assert plan_replay(log.state, run="run", first=5, last=5).resumed_from == 2
    _retire(log, states=[2])
    assert plan_replay(log.state, run="run", first=5, last=5).resumed_from == 0


@pytest.mark.parametrize(
    ("first", "last", "sentence"),
    [(0, 0, "no step 0"), (6, 6, "no step 6"), (4, 9, "no steps 4 to 9"), (3, 2, "no steps 3 to 2")],
)
def test_steps_the_run_does_not_have_are_named_with_those_it_has(first: int, last: int, sentence: str) -> None:
    with pytest.raises(CannotReplay, match=f"{sentence}; it has steps 1 to 5"):
        plan_replay(_log().state, run="run", first=first, last=last)
    with pytest.raises(CannotReplay, match="has no steps yet"):
        plan_replay(a_log().state, run="run", first=1, last=1)


def test_a_step_whose_shard_was_retired_is_refused_with_the_next_state_to_start_from() -> None:
    log = _log()
    _retire(log, shards=["s3"])
    with pytest.raises(CannotReplay, match=r"step 3 was trained on shard s3.*--from 5"):
        plan_replay(log.state, run="run", first=4, last=5)
    assert plan_replay(log.state, run="run", first=5, last=5).resumed_from == 4
    assert plan_replay(log.state, run="run", first=1, last=2).resumed_from == 0
    _retire(log, states=[4])
    with pytest.raises(CannotReplay, match="no later optimizer state is saved"):
        plan_replay(log.state, run="run", first=5, last=5)


def test_rewards_must_exist_and_cover_the_span_but_not_the_steps_before_it() -> None:
    log = _log()
    with pytest.raises(CannotReplay, match=r"no rewards 'mine'; it has: none"):
        plan_replay(log.state, run="run", first=4, last=4, rewards="mine")
    log.append(Rescore(name="mine", reward="my.module:reward", reward_sha256="1" * 64, files={"s4": "2" * 64}))
    assert plan_replay(log.state, run="run", first=4, last=4, rewards="mine").resumed_from == 2
    with pytest.raises(CannotReplay, match=r"not cover shard s5 of step 5.*rescore run --reward my.module:reward"):
        plan_replay(log.state, run="run", first=4, last=5, rewards="mine")
