"""Rewards run in real child processes: no answer, however bad, freezes the pool or is taken for another's."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.user_code import load_object
from rollouts.rewards.scoring import RewardFailed, RewardPool, RewardTimeout, score, score_all, set_reward_pool
from rollouts.workflow import Score
from tests.unit.rollouts.reward_functions import (
    burning,
    dying,
    failing,
    for_ever,
    length,
    meeting,
    noisy,
    nothing,
    parts,
    process_id,
    slow,
    wrong_type,
)


def _with_pool(
    play: Callable[[RewardPool], Awaitable[Any]], *, num_processes: int = 1, timeout: float = 30.0, **options: Any
) -> Any:
    async def inside() -> Any:
        async with RewardPool(num_processes=num_processes, timeout=timeout, **options) as pool:
            set_reward_pool(pool)
            return await play(pool)

    return asyncio.run(inside())


def _scores(*calls: tuple[Any, ...], num_processes: int = 1, timeout: float = 30.0) -> list[Score | BaseException]:
    """What each of some calls, all made at once, comes to."""

    async def play(pool: RewardPool) -> list[Score | BaseException]:
        return await asyncio.gather(*(pool.score(*call) for call in calls), return_exceptions=True)

    return _with_pool(play, num_processes=num_processes, timeout=timeout)


def test_a_number_is_the_reward_and_its_only_part_and_named_parts_are_summed():
    text = 'ü"\n\\🙂' * 100_000
    calls = [(length, "four"), (parts, ""), (length, text), (noisy, "")]  # what a reward prints is no answer
    assert _scores(*calls) == [
        Score(reward=4.0, parts={"length": 4.0}),
        Score(reward=0.75, parts={"right": 1.0, "format": -0.25, "style": None, "speed": None}),
        Score(reward=float(len(text)), parts={"length": float(len(text))}),
        Score(reward=1.0, parts={"noisy": 1.0}),
    ]


def test_not_applicable_is_null_and_a_value_of_the_wrong_type_a_failure():
    for scored in _scores(*((nothing, kind) for kind in ("none", "nan", "empty", "no parts"))):
        assert isinstance(scored, Score) and scored.reward is None
    for failed in _scores(*((wrong_type, kind) for kind in ("list", "text", "object", "part", "infinity"))):
        assert isinstance(failed, RewardFailed) and "wrong_type" in str(failed)


def test_a_started_pool_has_its_processes_before_the_first_call_and_uses_them():
    async def play(pool: RewardPool) -> tuple[set[int], set[float | None]]:
        await pool.start()
        await pool.start()  # there are as many as there shall be
        started = {child.pid for child in psutil.Process().children()}
        scores = await asyncio.gather(*(pool.score(process_id, "") for _ in range(8)))
        return started, {score.reward for score in scores}

    before = {child.pid for child in psutil.Process().children()}
    started, used = _with_pool(play, num_processes=2)
    assert len(started - before) == 2 and used <= started - before


def test_a_reward_that_raises_says_what_and_where_and_the_process_goes_on():
    before, failed, after = _scores((process_id, ""), (failing, "x"), (process_id, ""))
    assert isinstance(failed, RewardFailed)
    place = r"\n  at tests/unit/rollouts/reward_functions.py:\d+ in failing: raise KeyError\(reply\)$"
    assert re.search(f"reward_functions:failing: KeyError: 'x'{place}", str(failed))
    assert before == after


def test_a_reward_that_kills_its_process_fails_alone():
    died, *others = _scores((dying, ""), *[(length, "four")] * 4)
    assert isinstance(died, RewardFailed) and "its process died" in str(died)
    assert others == [Score(reward=4.0, parts={"length": 4.0})] * 4


def test_answers_go_to_the_questions_they_belong_to():
    scored = _scores(*[(length, "x" * n) for n in range(30)], num_processes=2)
    assert [s.reward for s in scored if isinstance(s, Score)] == list(range(30))


def test_among_quick_calls_that_share_a_message_each_fails_or_is_cancelled_alone():
    async def play(pool: RewardPool) -> tuple[list[Score | BaseException], int]:
        for _ in range(5):
            await pool.score(length, "")  # the pool learns that they are quick
        calls = [(length, "x" * n) for n in range(60)]
        calls[10], calls[25], calls[40] = (dying, ""), (for_ever, ""), (process_id, "")
        waiting = [asyncio.create_task(pool.score(*call)) for call in calls]
        await asyncio.sleep(0)
        waiting[50].cancel()
        return await asyncio.gather(*waiting, return_exceptions=True), pool.num_timeouts

    scored, num_timeouts = _with_pool(play, timeout=2.0)
    assert isinstance(scored[10], RewardFailed) and "died" in str(scored[10])
    assert isinstance(scored[25], RewardTimeout) and num_timeouts == 1
    assert isinstance(scored[50], asyncio.CancelledError)
    others = [n for n in range(60) if n not in (10, 25, 40, 50)]
    assert [scored[n] for n in others] == [Score(reward=float(n), parts={"length": float(n)}) for n in others]


def test_closing_the_pool_ends_its_processes():
    async def play(pool: RewardPool) -> list[psutil.Process]:
        scored = await asyncio.gather(*(pool.score(process_id, "") for _ in range(2)))
        return [psutil.Process(int(one.reward or 0)) for one in scored]

    _, alive = psutil.wait_procs(_with_pool(play, num_processes=2), timeout=10)
    assert not alive


def test_a_function_of_the_users_file_is_found_by_the_child(tmp_path: Path):
    (tmp_path / "my_rewards.py").write_text("def shout(reply):\n    return float(reply.isupper())\n")
    shout = load_object(f"{tmp_path}/my_rewards.py:shout")
    assert _scores((shout, "YES")) == [Score(reward=1.0, parts={"shout": 1.0})]


def test_a_function_no_other_process_can_find_fails_with_the_reason():
    def local(reply: str) -> float:
        return 1.0

    [failed] = _scores((local, ""))
    assert isinstance(failed, RewardFailed) and "local" in str(failed)


def test_several_rewards_are_named_and_their_sum_is_the_reward():
    async def judge(verdict: float | None) -> Score:
        return Score(reward=verdict, parts={"judge": verdict})

    async def play(pool: RewardPool) -> Score:
        return await score_all(
            {
                "long": (length, "four"),
                "split": (parts, ""),
                "style": judge(0.5),
                "silent": judge(None),
                "turns": -1,
                "none": (nothing, "nan"),
            }
        )

    scored = _with_pool(play, num_processes=2)
    assert scored.reward == 4.0 + (1.0 - 0.25) + 0.5 - 1
    assert scored.parts == {
        "long": 4.0,
        **{"split.right": 1.0, "split.format": -0.25, "split.style": None, "split.speed": None},
        **{"style": 0.5, "silent": None, "turns": -1.0, "none": None},
    }


def test_several_rewards_of_which_none_applies_are_no_reward():
    async def play(pool: RewardPool) -> Score:
        return await score_all({"one": (nothing, "none"), "other": None})

    assert _with_pool(play) == Score(reward=None, parts={"one": None, "other": None})


def test_several_rewards_run_at_the_same_time(tmp_path: Path):
    async def play(pool: RewardPool) -> list[float | None]:
        scored = await score_all({str(n): (meeting, str(tmp_path), 3) for n in range(3)})
        return list(scored.parts.values())

    assert _with_pool(play, num_processes=3) == [3.0] * 3


def test_one_reward_that_fails_fails_the_attempt_and_breaks_no_other():
    async def play(pool: RewardPool) -> None:
        with pytest.raises(RewardFailed, match="failing: KeyError: 'x'"):
            await score_all({"right": (length, "four"), "broken": (failing, "x"), "slow": (slow, 0.2)})
        assert (pool.num_killed, pool.num_died) == (0, 0)
        assert (await pool.score(length, "four")).reward == 4.0

    _with_pool(play, num_processes=3)


def test_a_timeout_that_counts_as_zero_is_a_part_like_any_other():
    async def play(pool: RewardPool) -> tuple[Score, Score]:
        several = await score_all({"right": (length, "four"), "endless": (for_ever, "")})
        assert pool.num_timeouts == 1 and pool.num_killed == 1
        return several, await score(for_ever, "")

    several, single = _with_pool(play, timeout=2.0, on_timeout="zero")
    assert several == Score(reward=4.0, parts={"right": 4.0, "endless": 0.0})
    assert single == Score(reward=0.0, parts={"for_ever": 0.0})


@pytest.mark.parametrize("policy", ["exclude", "fail"])
def test_what_became_of_the_children_is_counted(policy: Any):
    async def play(pool: RewardPool) -> tuple[int, int, int]:
        with pytest.raises(RewardFailed):
            await pool.score(dying, "")
        with pytest.raises(RewardTimeout, match="for_ever took more than 2 s and was killed"):
            await score_all({"right": (length, "four"), "endless": (for_ever, "")})
        assert (await pool.score(length, "four")).reward == 4.0  # by a child that has started
        waiting = asyncio.create_task(pool.score(slow, 0.5))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await pool.score(length, "four")).reward == 4.0  # not what was cancelled
        return pool.num_timeouts, pool.num_killed, pool.num_died

    assert _with_pool(play, timeout=2.0, on_timeout=policy) == (1, 2, 1)


def test_a_reward_that_computes_does_not_hold_up_the_event_loop():
    async def play(pool: RewardPool) -> int:
        await pool.score(length, "")
        scoring, turns = asyncio.create_task(pool.score(burning, 2.0)), 0
        while not scoring.done():
            await asyncio.sleep(0.005)
            turns += 1
        assert (await scoring).reward == 2.0
        return turns

    assert _with_pool(play) > 100, "of about 400; a loop that is held has one or two"
