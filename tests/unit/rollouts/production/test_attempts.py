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
from rollouts.workflow import Score, Workflow, WrongWorkflow, workflow_context
from settings.reward import RewardSettings
from storage.records import RolloutGroup, Sampling, Task
from storage.shards.codec import summarise
from tests.builders import Panic, Wordless, a_config
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
        if isinstance(reward := self.rewards[workflow_context().attempt], BaseException):
            raise reward
        return reward


def _group(
    tokens: ChatTokens,
    workflow: Workflow,
    *,
    is_eval: bool = False,
    drops_uniform: bool = False,
    max_model_len: int = 64,
    rule: str = "score",
    prompt: str = "3",
    **settings: Any,
) -> RolloutGroup:
    """Four attempts with replies of 1, 2, 3 and 4 tokens before the end token, of at most 5."""
    limits = {"attempt_timeout": 60.0, "max_model_len": max_model_len, "on_out_of_room": rule}
    shaping = RewardSettings(**settings)

    async def play() -> RolloutGroup:
        async with RewardPool(num_processes=2, timeout=shaping.timeout, on_timeout=shaping.on_timeout) as pool:
            player = Player(
                workflow=workflow,
                engine=ScriptedEngine(lambda _, request: [5] * (int(request.split("/")[1]) + 1) + [1]),
                tokens=tokens,
                rewards=pool,
                config=a_config(**limits, drop_uniform_groups=drops_uniform).model_copy(update={"reward": shaping}),
            )
            task = Task(id="the task", prompt=prompt)
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


def test_what_user_code_raises_ends_its_attempt_and_no_other(tokens: ChatTokens):
    for raised in ((SystemExit(3), KeyError("a"), asyncio.CancelledError()), (Panic("index"), Wordless(), Panic())):
        group = _group(tokens, _Given(*raised, 1.0))
        assert [(each.status, each.reward) for each in group.trajectories] == [*[("env_error", None)] * 3, ("ok", 1.0)]


@pytest.mark.parametrize("raised", [SystemExit(3), Panic("index"), Wordless()])
def test_what_the_comparison_of_attempts_raises_ends_no_worker(tokens: ChatTokens, raised: BaseException):
    class Compares(_Given):
        async def score_group(self, task: Task, attempts: Any) -> list[Score]:
            raise raised

    group = _group(tokens, Compares(1.0, 1.0, 0.0, 0.0))
    assert [(each.status, each.reward) for each in group.trajectories] == [("reward_error", None)] * 4


@pytest.mark.parametrize("raised", [SystemExit(3), Panic("index")])
def test_an_accept_that_leaves_python_is_named(tokens: ChatTokens, raised: BaseException):
    """In a worker the event loop would end with it, and nothing would be heard of that."""

    class Leaves(_Given):
        def accept(self, group: RolloutGroup) -> bool:
            raise raised

    with pytest.raises(WrongWorkflow, match=rf"accept raised {type(raised).__name__}: .*test_attempts\.py:"):
        _group(tokens, Leaves(1.0, 1.0, 0.0, 0.0))


def test_an_accept_that_returns_a_text_is_named(tokens: ChatTokens):
    class SaysNo(_Given):
        def accept(self, group: RolloutGroup) -> Any:
            return "no"

    with pytest.raises(
        WrongWorkflow, match=r"accept returned 'no'; return True or False. It is at .*test_attempts\.py"
    ):
        _group(tokens, SaysNo(1.0, 1.0, 0.0, 0.0))


class _LosesATask(_Given):
    """Comparing its attempts awaits a task that it has cancelled."""

    async def score_group(self, task: Task, attempts: Any) -> list[Score]:
        lost = asyncio.create_task(asyncio.sleep(60))
        lost.cancel()
        await lost
        return []


def test_a_task_that_user_code_cancels_ends_no_group(tokens: ChatTokens):
    group = _group(tokens, _LosesATask(1.0, 1.0, 0.0, 0.0))
    assert [(each.status, each.reward) for each in group.trajectories] == [("reward_error", None)] * 4
    assert "CancelledError" in group.trajectories[0].error


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


class _Talk(Workflow):
    """Asks five times, or until a reply is empty, which is worth −1; `asks_on` asks again, `is_ranked` compares."""

    def __init__(self, *, asks_on: bool = False, is_ranked: bool = False) -> None:
        self._asks_on, self._is_ranked = asks_on, is_ranked

    async def run(self, task: Task, chat: Chat) -> Score:
        for _ in range(5):
            while not await chat.ask(task.prompt):
                if self._asks_on:
                    continue
                return Score(reward=-1.0, parts={"length": 0.0})
        return Score(reward=1.0, parts={"length": 5.0})

    async def score_group(self, task: Task, attempts: Any) -> list[Score] | None:
        return [Score(reward=attempt.reward_parts["length"]) for attempt in attempts] if self._is_ranked else None


@pytest.mark.parametrize(
    ("rule", "workflow", "rewards"),
    [
        ("score", _Talk(), [1.0, 1.0, 1.0, -1.0]),  # in the workflow's own scale
        ("score", _Talk(asks_on=True), [1.0, 1.0, 1.0, 0.0]),
        ("zero", _Talk(), [1.0, 1.0, 1.0, 0.0]),
        ("zero", _Talk(is_ranked=True), [5.0, 5.0, 5.0, 0.0]),  # it has nothing to compare, and stays 0
        ("exclude", _Talk(), [1.0, 1.0, 1.0, None]),
    ],
)
def test_an_attempt_that_fills_the_context_is_worth_what_the_run_file_says(
    tokens: ChatTokens, rule: str, workflow: Workflow, rewards: list[float | None]
):
    group = _group(tokens, workflow, rule=rule, max_model_len=35)
    assert [t.reward for t in group.trajectories] == rewards
    assert [t.status for t in group.trajectories] == ["ok", "ok", "ok", "truncated"]
    assert summarise(group).out_of_room == 1 and summarise(group).usable == 4 - rewards.count(None)
    early = _group(tokens, workflow, rule="zero", max_model_len=8, weights={"length": 1.0})  # parts that none has yet
    assert [t.reward for t in early.trajectories] == [0.0] * 4


@pytest.mark.parametrize("rule", ["score", "zero", "exclude"])
def test_a_prompt_that_fills_the_context_is_not_the_policys_fault(tokens: ChatTokens, rule: str):
    group = _group(tokens, _Talk(), rule=rule, max_model_len=8, prompt="33333333")
    assert [(t.status, t.reward, t.turns, t.out_of_room) for t in group.trajectories] == [
        ("truncated", None, [], 1)
    ] * 4


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
