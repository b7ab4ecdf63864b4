"""The executor groups attempts, survives every failure of one of them, and stops exactly where admission says."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from rollouts.chat.chat import Chat
from rollouts.chat.chat_tokens import ChatTokens
from rollouts.chat.tools import ToolUnavailable
from rollouts.engines.engine import EngineError
from rollouts.engines.scripted_engine import ScriptedEngine
from rollouts.production.attempts import Player
from rollouts.production.executor import Executor
from rollouts.production.failures import FailsAlike
from rollouts.production.quota import Quota
from rollouts.rewards.scoring import RewardFailed, RewardPool, RewardTimeout
from rollouts.workflow import Score, Workflow, WrongWorkflow, workflow_context
from settings.errors import in_one_line
from storage.records import RolloutGroup, Task
from tests.builders import FreePrompts, a_config, wait_for_work

Play = Callable[[Task, Chat], Awaitable[Any]]


class _Workflow(Workflow):
    """Plays attempts by a function."""

    def __init__(self, play: Play) -> None:
        super().__init__()
        self.run = play  # type: ignore[method-assign]


async def _answer(task: Task, chat: Chat) -> Score:
    """One turn; the attempt's number is its reward."""
    await chat.ask(task.prompt)
    return Score(reward=float(workflow_context().attempt))


class _Executor(Executor):
    """What a worker does with its quota and its executor, in one call."""

    def set_version(self, version: int, *, accepted: int, paused: bool = False) -> None:
        num_producers = self.quota.num_producers
        self.quota.rebase(version=version, committed=accepted, num_producers=num_producers, paused=paused)
        self.admit()


_LIMITS: dict[str, Any] = {
    "n_samples": 2,
    "batch_size": 4,
    "steps": 250,
    "stale_policy": "strict",
    "max_tokens": 8,
    "max_model_len": 64,
    "retries": 0,
    "shard_bytes": 2**20,
    "shard_seconds": 10.0,
}


@contextlib.asynccontextmanager
async def _executing(
    tokens: ChatTokens,
    play: Play = _answer,
    *,
    num_tasks: int = 100,
    committed: Sequence[int] = (),
    engine: ScriptedEngine | None = None,
    total_groups: int = 1000,
    num_producers: int = 1,
    **limits: Any,
) -> AsyncIterator[_Executor]:
    """An executor on scripted parts."""
    config = a_config(**{**_LIMITS, **limits})
    player = Player(
        workflow=_Workflow(play),
        engine=engine or ScriptedEngine(lambda *_: [5, 6, 1]),
        tokens=tokens,
        rewards=RewardPool(num_processes=1, timeout=5),
        config=config,
    )
    quota = Quota(config)
    quota.total, quota.num_producers = total_groups, num_producers
    tasks = [Task(id=f"task{index}", prompt=str(index)) for index in range(num_tasks)]
    executor = _Executor(
        player=player, lease=FreePrompts(tasks, quota, committed=committed), quota=quota, config=config
    )
    try:
        yield executor
    finally:
        await executor.close()


async def _one_batch(*arguments: Any, **options: Any) -> list[RolloutGroup]:
    async with _executing(*arguments, **options) as executor:
        return await executor.prepare_batch()


async def _everything(*arguments: Any, **options: Any) -> list[RolloutGroup]:
    """Batch after batch until nothing more can run before the next version."""
    groups: list[RolloutGroup] = []
    async with _executing(*arguments, **options) as executor:
        while made := await executor.prepare_batch():
            executor.mark_committed(made)
            executor.set_version(0, accepted=sum(group.accepted for group in [*groups, *made]))
            groups += made
    return groups


def _only_attempt(number: int, error: BaseException | None = None, *, seconds: float = 0.0) -> Play:
    """Attempt `number` raises, or sleeps; all others answer."""

    async def play(task: Task, chat: Chat) -> Score:
        if workflow_context().attempt == number:
            await asyncio.sleep(seconds)
            if error is not None:
                raise error
        return await _answer(task, chat)

    return play


def _positions(groups: Sequence[RolloutGroup]) -> list[int]:
    return sorted(group.position for group in groups)


async def test_every_prompt_is_tried_n_times_and_comes_back_as_one_group(tokens: ChatTokens):
    groups = await _one_batch(tokens, n_samples=3)
    assert _positions(groups) == [0, 1, 2, 3]
    for group in groups:
        assert group.id == f"0.{group.task.id}" and group.epoch == 0 and group.expected == 3
        assert [t.attempt for t in group.trajectories] == [0, 1, 2]
        assert [t.reward for t in group.trajectories] == [0.0, 1.0, 2.0]
        assert {t.status for t in group.trajectories} == {"ok"} and group.accepted
        assert group.queued_at <= group.trajectories[0].started_at <= group.trajectories[0].finished_at
        assert group.trajectories[0].turns[0].sampled_ids == [5, 6, 1]
        assert [message.content for message in group.trajectories[0].messages] == [group.task.prompt, "01"]


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (KeyError("board"), "env_error", "KeyError: 'board'"),
        (EngineError("out of memory"), "engine_error", "out of memory"),
        (RewardFailed("f: ZeroDivisionError"), "reward_error", "ZeroDivisionError"),
        (RewardTimeout("f took more than 1 s"), "timeout", "more than 1 s"),
        (TimeoutError(), "timeout", "attempt took more than 1 s"),
        (None, "timeout", "attempt took more than 1 s at tests/unit/rollouts/production/test_executor.py:"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_one_of_eight_that_fails_or_hangs_leaves_seven(
    tokens: ChatTokens, error: BaseException | None, status: str, words: str
):
    play = _only_attempt(3, error, seconds=0 if error else 60)
    groups = await _one_batch(tokens, play, n_samples=8, attempt_timeout=1.0)
    for group in groups:
        assert group.expected == len(group.trajectories) == 8 and group.accepted
        assert [t.attempt for t in group.usable] == [0, 1, 2, 4, 5, 6, 7]
        failed = group.trajectories[3]
        assert (failed.status, failed.reward) == (status, None)
        assert words in in_one_line(failed.error)
        assert group.owes == (status if status in ("engine_error", "timeout") else ""), "the others fail alike again"


async def test_a_group_with_too_few_usable_attempts_is_kept_but_not_accepted(tokens: ChatTokens):
    async def play(task: Task, chat: Chat) -> Score:
        if task.id == "task3" and workflow_context().attempt > 0:
            raise KeyError("board")
        return await _answer(task, chat)

    groups = await _everything(tokens, play, num_tasks=5, n_samples=4)
    [group] = [group for group in groups if group.task.id == "task3"]
    assert not group.accepted and group.reject_reason == "1 usable of 4, 2 needed"
    assert len(group.trajectories) == 4
    assert sum(group.accepted for group in groups) == 4


async def test_uniform_groups_are_dropped_only_where_asked_for_and_give_their_room_back(tokens: ChatTokens):
    async def play(task: Task, chat: Chat) -> Score:
        await chat.ask(task.prompt)
        return Score(reward=1.0 if task.id in ("task0", "task1") else float(workflow_context().attempt))

    assert all(group.accepted for group in await _one_batch(tokens, play, num_tasks=5))
    groups = await _everything(tokens, play, num_tasks=5, drop_uniform_groups=True)
    dropped = {group.task.id: group.reject_reason for group in groups if not group.accepted}
    assert dropped == {"task0": "uniform reward 1", "task1": "uniform reward 1"}
    assert sum(group.accepted for group in groups) == 4 and _positions(groups) == list(range(len(groups)))


async def test_a_workflow_that_returns_anything_but_one_score_is_an_error(tokens: ChatTokens):
    async def play(task: Task, chat: Chat) -> Any:
        return returned

    for returned in ([Score(reward=1.0)], None, "1.0"):
        with pytest.raises(WrongWorkflow, match=f"returned {type(returned).__name__}; one call plays one attempt"):
            await _one_batch(tokens, play)


async def test_no_more_groups_run_at_once_than_allowed_and_a_reply_cut_off_is_truncated_and_trained(tokens: ChatTokens):
    engine = ScriptedEngine(lambda *_: [5, 6, 7, 8, 1], seconds_per_token=0.002)
    groups = await _one_batch(tokens, engine=engine, max_concurrent=3, batch_size=12, n_samples=2, max_tokens=2)
    assert len(groups) == 12 and {t.status for group in groups for t in group.usable} == {"truncated"}
    assert engine.peak_running == 3 * 2


async def test_a_run_makes_exactly_as_many_groups_as_it_needs(tokens: ChatTokens):
    """Of five tasks: none, some, all but one, all, one more."""
    for wanted, dynamic_batch in itertools.product((0, 1, 2, 4, 5, 6), (False, True)):
        limits = {"total_groups": wanted, "max_staleness": 9, "batch_size": 2, "dynamic_batch": dynamic_batch}
        groups = await _everything(tokens, num_tasks=5, **limits)
        assert sorted(_positions(groups)) == list(range(wanted)) and len({group.id for group in groups}) == wanted


async def _broken(task: Task, chat: Chat) -> Score:
    raise KeyError(task.id)


async def _broken_reward(task: Task, chat: Chat) -> Score:
    raise RewardFailed(f"my:reward: KeyError: {task.id}\n  at my/rewards.py:3 in reward")


@pytest.mark.parametrize(("retries", "batch_size"), [(0, 4), (1, 4), (0, 1)])
@pytest.mark.parametrize(
    ("play", "reason"),
    [
        (_broken, r"KeyError: 'task\d+'\n  at tests/.*/test_executor.py:\d+ in _broken: raise"),
        (_broken_reward, r"my:reward: KeyError: task\d+\n  at my/rewards.py:3 in reward"),
    ],
)
async def test_a_first_batch_that_fails_for_one_reason_stops_the_run_and_loses_no_prompt(
    tokens: ChatTokens, play: Play, reason: str, retries: int, batch_size: int
):
    async with _executing(tokens, play, max_concurrent=2, retries=retries, batch_size=batch_size) as executor:
        with pytest.raises(FailsAlike, match=f"all attempts at the first 4 prompts failed in one way:\n{reason}"):
            await executor.prepare_batch()
        groups = await executor.close()
    assert len(groups) >= 4 * retries and all(group.will_retry for group in groups)


async def _no_server(task: Task, chat: Chat) -> Score:
    raise ToolUnavailable("HTTP 500")


@pytest.mark.parametrize("plays", [[_answer, _broken], [_broken_reward, _broken], [_no_server]])
async def test_a_first_batch_that_fails_for_several_reasons_or_for_a_servers_does_not(
    tokens: ChatTokens, plays: list[Play]
):
    order: dict[str, int] = {}

    async def play(task: Task, chat: Chat) -> Score:
        return await plays[order.setdefault(task.id, len(order)) % len(plays)](task, chat)

    groups: list[RolloutGroup] = []
    async with _executing(tokens, play, max_concurrent=1) as executor:
        while len(groups) < 8 and (made := await executor.prepare_batch()):
            executor.mark_committed(made)
            groups += made
    assert len(groups) >= 7


async def test_a_batch_that_fails_after_a_good_one_does_not_stop_the_run(tokens: ChatTokens):
    async with _executing(tokens, _broken, committed=range(4)) as executor:
        executor.set_version(1, accepted=4)
        for _ in range(3):
            groups = await executor.prepare_batch()
            executor.mark_committed(groups)
            assert len(groups) == 4 and not any(group.accepted for group in groups)
        assert "last error: KeyError: 'task" in executor.report()


@pytest.mark.parametrize(("num_failures", "accepted"), [(99, [False] * 3), (1, [False, True])])
async def test_a_prompt_that_came_to_nothing_runs_again_as_often_as_allowed(
    tokens: ChatTokens, num_failures: int, accepted: list[bool]
):
    failures = []

    async def play(task: Task, chat: Chat) -> Score:
        if task.id == "task3" and len(failures) < 2 * num_failures:
            failures.append(task.id)
            raise KeyError("board")
        return await _answer(task, chat)

    groups = await _everything(tokens, play, num_tasks=5, retries=2, total_groups=4)
    tries = [group for group in groups if group.task.id == "task3"]
    assert [group.id for group in tries] == ["0.task3", "0.task3.retry1", "0.task3.retry2"][: len(accepted)]
    assert [group.accepted for group in tries] == accepted
    assert [group.will_retry for group in tries] == [True] * (len(accepted) - 1) + [False]
    assert len({group.position for group in tries}) == 1
    assert sum(group.accepted for group in groups) == 4


async def test_draws_follow_from_seed_place_try_and_attempt_whatever_else_runs(tokens: ChatTokens):
    def seeds(groups: list[RolloutGroup]) -> dict[tuple[int, bool, int], int | None]:
        turns = [(group, attempt, attempt.turns[0]) for group in groups for attempt in group.trajectories]
        return {(group.position, group.will_retry, each.attempt): turn.seed for group, each, turn in turns}

    def but_once() -> Play:
        failed: list[str] = []

        async def play(task: Task, chat: Chat) -> Score:
            score = await _answer(task, chat)
            if task.id == "task3" and len(failed) < 2:
                failed.append(task.id)
                raise KeyError("board")
            return score

        return play

    limits: dict[str, Any] = {"num_tasks": 5, "retries": 1, "total_groups": 4, "seed": 3}
    alone = seeds(await _everything(tokens, but_once(), max_concurrent=1, **limits))
    assert alone == seeds(await _everything(tokens, but_once(), max_concurrent=4, **limits))
    assert {position for position, _, _ in alone} == {0, 1, 2, 3}, "one that runs again keeps its room"
    assert len(alone) == len(set(alone.values())) == 2 * (4 + 1) and None not in alone.values()
    other = seeds(await _everything(tokens, but_once(), **{**limits, "seed": 4}))
    assert not set(alone.values()) & set(other.values())


async def test_a_group_over_the_bound_is_given_up_and_its_room_used(tokens: ChatTokens):
    hung: list[str] = []

    async def play(task: Task, chat: Chat) -> Score:
        hung.append(task.id)
        if task.id == hung[0]:
            await asyncio.Event().wait()
        return await _answer(task, chat)

    async with _executing(tokens, play, max_staleness=1, batch_size=3) as executor:
        groups, committed = [], 0
        for version in range(3):
            executor.set_version(version, accepted=committed)
            assert executor.in_flight().count(0) == (1 if version else 0)
            groups = await executor.prepare_batch()
            executor.mark_committed(groups)
            committed += sum(group.accepted for group in groups)
        [cancelled] = [group for group in groups if not group.accepted]
        assert cancelled.task.id == hung[0] and cancelled.reject_reason == "cancelled: 2 updates behind, bound 1"
        assert {t.status for t in cancelled.trajectories} == {"cancelled"}
        assert executor.in_flight().count(0) == 0


@pytest.mark.parametrize("called_back", [False, True])
async def test_groups_that_have_not_begun_are_given_up_or_called_back_as_those_that_have(
    tokens: ChatTokens, called_back: bool
):
    async with _executing(tokens, max_staleness=1) as executor:
        executor.set_version(0, accepted=0)
        while not executor.in_flight():
            await asyncio.sleep(0)
        # A group's task begins in the loop's next turn.
        if called_back:
            await executor.call_back()
            assert executor.in_flight() == []
        executor.set_version(2, accepted=0)
        groups = await executor.prepare_batch()
        reasons = [group.reject_reason for group in groups[:4]]
        assert reasons == [""] * 4 if called_back else ["cancelled: 2 updates behind, bound 1"] * 4
        assert executor.in_flight().count(0) == 0


async def test_groups_at_hand_are_flushed_when_the_version_changes_and_closing_cancels_what_runs(tokens: ChatTokens):
    async def play(task: Task, chat: Chat) -> Score:
        if int(task.prompt) % 2:
            await asyncio.Event().wait()
        return await _answer(task, chat)

    async with _executing(tokens, play) as executor:
        batch = asyncio.create_task(executor.prepare_batch())
        while executor.num_finished < 2:
            await executor.wait_for_change()
        assert not batch.done()
        executor.set_version(1, accepted=4)
        first, seen = await batch, executor.num_finished
        while executor.num_finished == seen:
            await executor.wait_for_change()
        handed_out = [*first, *await executor.close()]
        assert len(handed_out) == executor.num_finished > len(first) > 0
        assert all(int(group.task.prompt) % 2 == 0 for group in handed_out if group.accepted)
        assert executor.in_flight() == []


@pytest.mark.parametrize("limits", [{"shard_bytes": 1024}, {"shard_seconds": 0.05}], ids=["bytes", "seconds"])
async def test_a_shard_is_flushed_early_when_it_is_large_or_old(tokens: ChatTokens, limits: dict[str, Any]):
    async def play(task: Task, chat: Chat) -> Score:
        if int(task.prompt) % 2:
            await asyncio.sleep(60)
        return await _answer(task, chat)

    groups = await _one_batch(tokens, play, batch_size=16, **limits)
    assert 0 < len(groups) < 16


@pytest.mark.parametrize(
    ("pending", "num_producers", "sizes"),
    [(0, 1, [4, 4]), (1, 1, [3, 4]), (3, 1, [1, 4]), (5, 1, [3, 4]), (0, 2, [2, 1]), (1, 2, [2, 1]), (2, 4, [1, 1])],
)
async def test_a_shard_is_what_the_next_step_misses_or_a_workers_share_of_it(
    tokens: ChatTokens, pending: int, num_producers: int, sizes: list[int]
):
    limits: dict[str, Any] = {"max_staleness": 4, "max_concurrent": 1, "committed": range(12 + pending)}
    async with _executing(tokens, num_producers=num_producers, **limits) as executor:
        executor.set_version(3, accepted=3 * 4 + pending)
        for size in sizes:
            groups = await executor.prepare_batch()
            executor.mark_committed(groups)
            assert len(groups) == size


async def test_rejected_groups_do_not_complete_a_step_and_are_committed_by_the_batch(tokens: ChatTokens):
    async def play(task: Task, chat: Chat) -> Score:
        await chat.ask(task.prompt)
        return Score(reward=float(workflow_context().attempt * (int(task.prompt) % 3 == 0)))

    groups = await _one_batch(tokens, play, drop_uniform_groups=True, max_concurrent=1, max_staleness=4)
    assert len(groups) == 4 and 0 < sum(group.accepted for group in groups) < 4


async def test_paused_it_finishes_what_runs_and_begins_nothing_of_what_is_ready(tokens: ChatTokens) -> None:
    gate = asyncio.Event()

    async def wait(task: Task, chat: Chat) -> Score:
        await gate.wait()
        return await _answer(task, chat)

    async with _executing(tokens, wait, batch_size=32, max_concurrent=2) as executor:
        collecting = asyncio.ensure_future(executor.prepare_batch())
        while len(executor.in_flight()) < 2:  # of a lease of four; two are ready
            await asyncio.sleep(0)
        executor.set_version(0, accepted=0, paused=True)
        gate.set()
        groups = await collecting
        assert len(groups) == 2 and not executor.in_flight() and executor.quota.wanted == 0
        executor.mark_committed(groups)
        waiting = asyncio.ensure_future(wait_for_work(executor))
        await asyncio.sleep(0.01)
        assert not waiting.done(), "a producer does not spin on prompts it may not start"
        executor.set_version(0, accepted=len(groups))
        await waiting
        assert len(executor.in_flight()) == 2
