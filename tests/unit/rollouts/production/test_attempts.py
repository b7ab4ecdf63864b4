"""Attempts are scored, shaped and given a status as the run file's `[reward]` says."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from rollouts.chat.chat import Chat
from rollouts.chat.chat_tokens import ChatTokens
from rollouts.engines.scripted_engine import ScriptedEngine
from rollouts.production.attempts import Player
from rollouts.production.evaluation import Tally
from rollouts.rewards.scoring import RewardPool, RewardTimeout, score, score_all
from rollouts.workflow import Score, Workflow, workflow_context
from settings.reward import RewardSettings
from storage.records import RolloutGroup, Sampling, Task
from storage.shards.codec import summarise
from tests.builders import a_config
from tests.unit.rollouts.reward_functions import for_ever, length, nothing

pytestmark = pytest.mark.server


class _Lengths(Workflow):
    """The reply's length is worth something, its style is not applicable."""

    async def run(self, task: Task, chat: Chat) -> Score:
        reply = await chat.ask(task.prompt)
        return await score_all({"length": (length, reply), "style": (nothing, "none"), "constant": 1.0})


class _SecondEndless(_Lengths):
    """The second attempt's reward never ends."""

    async def run(self, task: Task, chat: Chat) -> Score:
        if workflow_context().attempt != 1:
            return await super().run(task, chat)
        return await score(for_ever, await chat.ask(task.prompt))


class _Ranked(_Lengths):
    """The longest reply of a group wins."""

    async def score_group(self, task: Task, attempts: Any) -> list[Score]:
        longest = max(attempt.reward_parts["length"] for attempt in attempts)
        return [Score(reward=0.5, parts={"won": float(a.reward_parts["length"] == longest)}) for a in attempts]


class _Given(Workflow):
    """Attempt n gets the n-th of some rewards."""

    def __init__(self, *rewards: Any) -> None:
        super().__init__()
        self.rewards = rewards

    async def run(self, task: Task, chat: Chat) -> Any:
        await chat.ask(task.prompt)
        return self.rewards[workflow_context().attempt]


def _group(
    tokens: ChatTokens, workflow: Workflow, *, is_eval: bool = False, drops_uniform: bool = False, **settings: Any
) -> RolloutGroup:
    """Four attempts with replies of 1, 2, 3 and 4 tokens before the end token, of at most 5."""
    shaping = RewardSettings(**settings)

    async def play() -> RolloutGroup:
        async with RewardPool(num_processes=2, timeout=shaping.timeout, on_timeout=shaping.on_timeout) as pool:
            player = Player(
                workflow=workflow,
                engine=ScriptedEngine(lambda _, request: [5] * (int(request.split("/")[1]) + 1) + [1]),
                tokens=tokens,
                rewards=pool,
                config=a_config(attempt_timeout=60.0, max_model_len=64, drop_uniform_groups=drops_uniform).model_copy(
                    update={"reward": shaping}
                ),
            )
            task = Task(id="the task", prompt="3")
            where = {"group_id": "0.task", "position": 0, "epoch": 0, "n_samples": 4, "is_eval": is_eval}
            return await player.group(task, sampling=Sampling(max_tokens=5), **where)

    return asyncio.run(play())


def test_parts_stay_raw_and_the_reward_is_shaped(tokens: ChatTokens):
    group = _group(
        tokens, _Lengths(), weights={"length": 0.5, "constant": -1.0}, overlong_tokens=2, scale=2.0, clip=2.0
    )
    assert [t.reward for t in group.trajectories] == [-1.0, 0.0, 1.0 - 0.5, 2.0 - 1.0]
    assert [t.reward_parts for t in group.trajectories] == [
        {"length": float(n), "style": None, "constant": 1.0, "overlong": min(0.0, (2 - n) / 2)} for n in (1, 2, 3, 4)
    ]


@pytest.mark.parametrize(
    ("rewards", "settings", "reason"),
    [
        ((1, 1, 1, 1), {"overlong_tokens": 2}, "uniform reward 1"),  # the penalties differ
        ((0.1 + 0.2, 0.3, 0.3, math.nan), {}, "uniform reward 0.3"),
        ((0.0, 0.0, 0.0, 0.0), {"bias": 1.0, "overlong_tokens": 2}, "uniform reward 0"),
        ((2.0, 3.0, 3.0, 3.0), {"clip": 1.0}, ""),  # alike only once clipped
        ((0.3, 0.3, 0.3, 0.3001), {}, ""),
        ((1e-5, 0.0, 0.0, 0.0), {}, ""),
    ],
)
def test_groups_are_uniform_by_their_scores_before_shaping(
    tokens: ChatTokens, rewards: tuple[float, ...], settings: dict[str, Any], reason: str
):
    group = _group(tokens, _Given(*rewards), drops_uniform=True, **settings)
    assert (group.reject_reason, group.accepted) == (reason, not reason)


def test_what_is_not_finite_is_no_reward_and_reaches_neither_log_nor_score(tokens: ChatTokens):
    group = _group(tokens, _Given(math.nan, Score(reward=math.inf), 1e39, Score(reward=1, parts={"x": math.nan})))
    assert [attempt.reward for attempt in group.trajectories] == [None, None, None, 1.0]
    assert group.trajectories[3].reward_parts == {"x": None}
    assert summarise(group).mean_reward == 1.0
    tally = Tally(4)
    tally.add(group)
    assert tally.score == 0.25 and tally.failures == {"no_reward": 3}


def test_an_evaluation_reports_the_tasks_own_reward(tokens: ChatTokens):
    group = _group(tokens, _Lengths(), is_eval=True, scale=2.0, bias=7.0, overlong_tokens=2, weights={"constant": 3.0})
    assert [t.reward for t in group.trajectories] == [4.0, 5.0, 6.0, 7.0]
    assert "overlong" not in group.trajectories[3].reward_parts


def test_rewards_that_compare_a_group_are_shaped_too(tokens: ChatTokens):
    assert [t.reward for t in _group(tokens, _Ranked(), scale=3.0).trajectories] == [1.5] * 4
    weights = {"length": 0.0, "constant": 0.0, "won": 4.0}
    assert [t.reward for t in _group(tokens, _Ranked(), weights=weights).trajectories] == [0.0, 0.0, 0.0, 4.0]


def test_a_misspelt_weight_stops_the_first_group(tokens: ChatTokens):
    with pytest.raises(ValueError, match="names lenght, but the reward parts are constant, length, style"):
        _group(tokens, _Lengths(), weights={"lenght": 2.0})


@pytest.mark.parametrize("on_timeout", ["exclude", "zero", "fail"])
def test_a_reward_that_takes_too_long_excludes_its_attempt_counts_as_zero_or_fails_the_run(
    tokens: ChatTokens, on_timeout: str
):
    if on_timeout == "fail":
        error = "reward_functions:for_ever took more than 3 s .* 'the task'.*on_timeout"
        with pytest.raises(RewardTimeout, match=error):
            _group(tokens, _SecondEndless(), timeout=3.0, on_timeout="fail")
        return
    group = _group(tokens, _SecondEndless(), timeout=3.0, on_timeout=on_timeout, bias=1.0)
    second = (None, {}) if on_timeout == "exclude" else (1.0, {"for_ever": 0.0})
    assert [t.reward for t in group.trajectories] == [3.0, second[0], 5.0, 6.0]
    assert group.trajectories[1].reward_parts == second[1]
    assert [t.status for t in group.trajectories] == ["ok", "timeout" if on_timeout == "exclude" else "ok", "ok", "ok"]
