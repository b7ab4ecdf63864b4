"""An environment's observations are what the policy reads, its rewards become returns, and its faults no reward.

Ids here: 0 pad, 1 end, 2 user, 3 assistant, 4 `+`, 5 … 14 the digits 0 … 9, 15 `=`.
"""

from __future__ import annotations

import asyncio
import functools
import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.chat.chat_tokens import ChatTokens
from rollouts.chat.tools import tool
from rollouts.engines.scripted_engine import ScriptedEngine
from rollouts.environments import environments
from rollouts.environments.environments import Environment, EnvironmentWorkflow, Observation, returns
from rollouts.rewards.scoring import score
from rollouts.workflow import Score, Workflow, WrongWorkflow, workflow_context
from storage.records import RolloutGroup, Task, Trajectory
from tests.unit.rollouts.scripted_text import an_engine, play_group

TASK = Task(id="count", prompt="3")


class _Counter(Environment):
    """Says one number more each time; done when `length` replies were given, the last one worth `prize`."""

    def __init__(self, *, length: int = 3, prize: float = 1.0, step_reward: float | None = None) -> None:
        self.length, self.prize, self.step_reward = length, prize, step_reward
        self.replies: list[str] = []
        self.closed = 0

    async def reset(self, task: Task) -> str:
        return f"{task.prompt}="

    async def step(self, reply: str) -> Observation | str:
        self.replies.append(reply)
        self.is_done = self.is_done or len(self.replies) == self.length
        if self.is_done:
            return Observation(reward=self.prize)
        text = f"{len(self.replies)}+"  # a string is an observation without a reward
        return text if self.step_reward is None else Observation(text=text, reward=self.step_reward)

    async def close(self) -> None:
        self.closed += 1


class _Workflow(EnvironmentWorkflow):
    """Keeps the environments it made, in the order of the attempts."""

    def __init__(self, make: Callable[[], Environment], *, max_turns: int = 8, discount: float = 1.0) -> None:
        super().__init__()
        self.made: list[Any] = []
        self._make, self.max_turns, self.discount = make, max_turns, discount

    def make_environment(self) -> Environment:
        self.made.append(self._make())
        return self.made[-1]


def _group(tokens: ChatTokens, workflow: Workflow, *, engine: Any = None, **options: Any) -> RolloutGroup:
    """A group of attempts at `TASK` whose every reply is `7`, unless `engine` says something else."""
    return asyncio.run(play_group(workflow, tokens, engine or ScriptedEngine(lambda *_: [12, 1]), TASK, **options))


def _attempt(tokens: ChatTokens, workflow: Workflow, **options: Any) -> Trajectory:
    [trajectory] = _group(tokens, workflow, **options).trajectories
    return trajectory


@pytest.mark.parametrize("nothing", [math.nan, math.inf, None, np.float32("nan")])
def test_a_reward_that_is_no_number_is_none_and_so_are_the_returns_before_it(tokens: ChatTokens, nothing: Any):
    trajectory = _attempt(tokens, _Workflow(lambda: _Counter(prize=nothing, step_reward=0.5)))
    assert (trajectory.status, trajectory.reward) == ("ok", None) and not trajectory.usable
    assert returns([1.0, None, Observation(reward=Decimal("0.5")).reward], discount=0.5) == [None, None, 0.5]


def test_the_observation_of_reset_and_of_every_step_is_in_the_prompt(tokens: ChatTokens):
    workflow = _Workflow(_Counter)
    trajectory = _attempt(tokens, workflow)
    assert [turn.context_ids for turn in trajectory.turns] == [[2, 8, 15, 3], [2, 6, 4, 3], [2, 7, 4, 3]]
    assert [(m.role, m.content) for m in trajectory.messages] == [
        *(("user", "3="), ("assistant", "7"), ("user", "1+"), ("assistant", "7"), ("user", "2+"), ("assistant", "7"))
    ]
    assert workflow.made[0].replies == ["7", "7", "7"]
    assert (trajectory.status, trajectory.reward, workflow.made[0].closed) == ("ok", 1.0, 1)


def test_rewards_of_later_turns_are_added_discounted_once_per_turn(tokens: ChatTokens):
    for step_reward, values in [(None, [2.0, 4.0, 8.0]), (-1.0, [0.5, 3.0, 8.0])]:
        make = functools.partial(_Counter, prize=8.0, step_reward=step_reward)
        trajectory = _attempt(tokens, _Workflow(make, discount=0.5))
        assert trajectory.reward_parts == {f"turn_{turn}": value for turn, value in enumerate(values)}
        assert trajectory.reward == values[0]


@given(st.lists(st.floats(-5, 5), max_size=12), st.floats(0, 1))
def test_a_return_is_the_discounted_sum_of_what_follows(rewards: list[float], discount: float):
    expected = [
        sum(reward * discount**later for later, reward in enumerate(rewards[turn:])) for turn in range(len(rewards))
    ]
    assert returns(rewards, discount=discount) == pytest.approx(expected, abs=1e-9)


def test_an_episode_that_is_not_done_in_time_ends_as_max_turns_and_is_trained(tokens: ChatTokens):
    workflow = _Workflow(lambda: _Counter(length=5, step_reward=0.25), max_turns=2)
    trajectory = _attempt(tokens, workflow)
    assert (trajectory.status, len(trajectory.turns), trajectory.usable) == ("max_turns", 2, True)
    assert trajectory.reward == 0.5 and trajectory.reward_parts == {"turn_0": 0.5, "turn_1": 0.25}
    assert workflow.made[0].closed == 1
    assert _attempt(tokens, _Workflow(_Counter, max_turns=3)).status == "ok", "done in the very last turn"


class _Till(_Counter):
    """A shop: look prices up as often as you like, then say the sum."""

    @tool
    async def price(self, name: str) -> int:
        """The price of something."""
        self.looked_up = name
        return 7

    @tool
    def leave(self) -> str:
        """Leave the shop."""
        self.is_done = True
        return "bye"


def _in_words(tokens: ChatTokens, *replies: str, **options: Any) -> tuple[Trajectory, _Till]:
    workflow = _Workflow(lambda: _Till(length=2))
    trajectory = _attempt(tokens, workflow, engine=an_engine(tokens, *replies), **options)
    return trajectory, workflow.made[0]


def test_the_methods_of_an_environment_may_be_tools(text_tokens: ChatTokens):
    trajectory, shop = _in_words(text_tokens, '[price {"name": "tea"}]', "7?", "7!")
    assert [(m.role, m.content) for m in trajectory.messages] == [
        *(("user", "3="), ("assistant", '[price {"name": "tea"}]'), ("tool", "7"), ("assistant", "7?")),
        *(("user", "1+"), ("assistant", "7!")),
    ]
    assert (shop.looked_up, shop.replies) == ("tea", ["7?", "7!"])  # the environment sees replies, not calls
    assert trajectory.reward_parts == {"turn_0": 1.0, "turn_1": 1.0}
    trajectory, shop = _in_words(text_tokens, "[leave {}]", "bye bye")  # a tool may end the episode
    assert (trajectory.status, shop.replies, len(trajectory.turns)) == ("ok", ["bye bye"], 2)


def test_the_environment_sees_what_follows_the_thoughts_unless_it_asks_for_all(text_tokens: ChatTokens):
    replies = ['<think>[leave {}]</think>[price {"name": "tea"}]', "<think>7?</think>7", "<think>8"]
    for with_thoughts, seen in ((False, ["7", ""]), (True, replies[1:])):
        workflow = _Workflow(lambda: _Till(length=2))
        workflow.with_thoughts = with_thoughts
        trajectory = _attempt(text_tokens, workflow, engine=an_engine(text_tokens, *replies))
        assert (workflow.made[0].replies, workflow.made[0].looked_up) == (seen, "tea")
        assert [len(turn.tool_calls) for turn in trajectory.turns] == [1, 0, 0]


def test_a_policy_that_only_calls_tools_runs_out_of_turns(text_tokens: ChatTokens):
    trajectory, shop = _in_words(text_tokens, *["[price {}]"] * 9)
    assert (trajectory.status, trajectory.reward, trajectory.usable) == ("max_turns", 0.0, True)
    assert (shop.replies, shop.closed, len(trajectory.turns)) == ([], 1, 9)


class _Broken(_Counter):
    """Raises in one of its methods, in attempt 1 only."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def _fail(self, where: str) -> None:
        if where == self._where and workflow_context().attempt == 1:
            raise OSError(f"{where}: disk full")

    async def reset(self, task: Task) -> str:
        self._fail("reset")
        return await super().reset(task)

    async def step(self, reply: str) -> Observation | str:
        self._fail("step")
        return await super().step(reply)

    async def close(self) -> None:
        await super().close()
        self._fail("close")


@pytest.mark.parametrize("where", ["reset", "step", "close"])
def test_a_fault_of_the_environment_is_never_reward_zero_and_leaves_the_others_alone(tokens: ChatTokens, where: str):
    workflow = _Workflow(lambda: _Broken(where))
    group = _group(tokens, workflow, n_samples=4)
    assert [t.status for t in group.trajectories] == ["ok", "env_error", "ok", "ok"]
    assert [t.reward for t in group.trajectories] == [1.0, None, 1.0, 1.0]
    error = rf"OSError: {where}: disk full\n  at tests/unit/rollouts/environments/test_environments.py:\d+ in _fail: "
    assert re.match(error, group.trajectories[1].error)
    assert [t.attempt for t in group.usable] == [0, 2, 3] and group.accepted
    assert [made.closed for made in workflow.made] == [1, 1, 1, 1]


@pytest.mark.parametrize(("rule", "reward"), [("score", 1.0), ("zero", 0.0), ("exclude", None)])
async def test_an_episode_without_room_keeps_the_rewards_of_its_turns(tokens: ChatTokens, rule: str, reward: Any):
    engine, workflow = ScriptedEngine(lambda *_: [12, 1]), _Workflow(lambda: _Counter(length=9, step_reward=0.5))
    group = await play_group(workflow, tokens, engine, TASK, max_model_len=16, on_out_of_room=rule)
    [trajectory] = group.trajectories
    assert (trajectory.status, trajectory.reward, len(trajectory.turns)) == ("truncated", reward, 2)
    assert workflow.made[0].closed == 1


class _Slow(_Counter):
    """Its step never returns."""

    async def step(self, reply: str) -> Observation | str:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


async def test_an_environment_past_the_deadline_or_of_a_cancelled_attempt_is_closed_all_the_same(tokens: ChatTokens):
    engine, workflow = ScriptedEngine(lambda *_: [12, 1]), _Workflow(_Slow)
    [trajectory] = (await play_group(workflow, tokens, engine, TASK, attempt_timeout=0.05)).trajectories
    assert (trajectory.status, trajectory.reward, workflow.made[0].closed) == ("timeout", None, 1)
    playing = asyncio.create_task(play_group(workflow, tokens, engine, TASK, n_samples=2))
    while len(workflow.made) < 3:
        await asyncio.sleep(0)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert [made.closed for made in workflow.made] == [1, 1, 1]


@pytest.mark.parametrize("where", ["", "step"])
def test_an_environment_that_does_not_close_is_abandoned(
    tokens: ChatTokens, monkeypatch: pytest.MonkeyPatch, where: str
):
    class NeverCloses(_Broken):
        async def close(self) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(environments, "CLOSE_SECONDS", 0.05)
    first, second = _group(tokens, _Workflow(lambda: NeverCloses(where)), n_samples=2).trajectories
    assert (first.status, first.reward) == ("env_error", None)
    error = r"RuntimeError: NeverCloses.close did not return within 0.05 s\n  at tests/.*py:\d+ in close: await asyncio"
    assert re.match(error, first.error)
    assert second.error.startswith("OSError: step: disk full\n" if where else "RuntimeError")  # the first error is seen


class _Ranked(Workflow):
    """Replies are all alike, so `run` cannot tell them apart; the group is scored by `compare`."""

    def __init__(self, compare: Callable[[Sequence[Trajectory]], Any]) -> None:
        super().__init__()
        self._compare = compare

    async def run(self, task: Task, chat: Any) -> Score:
        if workflow_context().attempt == 2:
            raise OSError("no board")
        await chat.ask(task.prompt)
        return Score(reward=float(workflow_context().attempt), parts={"length": 1.0})

    async def score_group(self, task: Task, attempts: Sequence[Trajectory]) -> Any:
        returned = self._compare(attempts)
        return await returned if asyncio.iscoroutine(returned) else returned


def _ranks(attempts: Sequence[Trajectory]) -> list[Score]:
    """The best of the group gets 1, the worst 0."""
    order = sorted(attempt.reward or 0.0 for attempt in attempts)
    ranks = [order.index(attempt.reward or 0.0) / (len(order) - 1) for attempt in attempts]
    return [Score(reward=rank, parts={"rank": rank}) for rank in ranks]


async def _divided(attempts: Sequence[Trajectory]) -> Sequence[Score]:
    """Scores in a child process, as `run` may."""
    return [await score(divmod, int(attempt.reward or 0), 0) for attempt in attempts]


async def _never(attempts: Sequence[Trajectory]) -> Sequence[Score]:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


def _buggy(attempts: Sequence[Trajectory]) -> Sequence[Score]:
    return [Score(reward=1 / 0) for _ in attempts]


@pytest.mark.parametrize(
    ("compare", "status", "words"),
    [
        (_buggy, "reward_error", "score_group: ZeroDivisionError: division by zero"),
        (_divided, "reward_error", "score_group: RewardFailed: builtins:divmod: ZeroDivisionError"),
        (_never, "timeout", "score_group: TimeoutError"),
        (_ranks, "ok", ""),
        (lambda attempts: None, "ok", ""),
    ],
)
def test_rewards_may_compare_a_group_and_one_that_cannot_be_scored_is_lost(
    tokens: ChatTokens, compare: Callable[..., Any], status: str, words: str
):
    group = _group(tokens, _Ranked(compare), n_samples=4, attempt_timeout=0.5 if compare is _never else 60.0)
    assert [t.status for t in group.trajectories] == [status, status, "env_error", status]
    assert group.trajectories[0].error.startswith(words)
    assert group.trajectories[2].error.startswith("OSError: no board\n")
    if words:
        assert [t.reward for t in group.trajectories] == [None] * 4
        assert not group.accepted and group.reject_reason.startswith("0 usable of 4")
    elif compare is _ranks:
        assert [t.reward for t in group.trajectories] == [0.0, 0.5, None, 1.0]
        assert group.trajectories[3].reward_parts == {"length": 1.0, "rank": 1.0}
    else:
        assert [t.reward for t in group.trajectories] == [0.0, 1.0, None, 3.0], "those of `run`"


def test_one_score_per_attempt_or_the_workflow_is_wrong(tokens: ChatTokens):
    for returned in ([Score(reward=1.0)], [1.0, 2.0], []):
        with pytest.raises(WrongWorkflow, match="for 3 attempts; return one Score each"):
            _group(tokens, _Ranked(lambda _, returned=returned: returned), n_samples=4)
