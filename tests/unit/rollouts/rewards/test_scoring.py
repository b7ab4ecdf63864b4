"""Rewards run in child processes: no answer, however bad, freezes the pool or is taken for another's.

Whatever a reward does to its process, only that process ends, with all it started; the next call works again.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.user_code import load_object
from rollouts.rewards.scoring import RewardFailed, RewardPool, RewardTimeout, score_all, set_reward_pool
from rollouts.workflow import Score, as_score
from tests.unit.rollouts import reward_functions as rewards

pytestmark = pytest.mark.server
FOUR = Score(reward=4.0, parts={"length": 4.0})


@contextlib.asynccontextmanager
async def _pool(num_processes: int = 1, timeout: float = 30.0, **options: Any) -> AsyncIterator[RewardPool]:
    """The pool of this test's workflow."""
    async with RewardPool(num_processes=num_processes, timeout=timeout, **options) as pool:
        set_reward_pool(pool)
        yield pool


async def _scores(*calls: tuple[Any, ...], num_processes: int = 1) -> list[Score | BaseException]:
    """What each of some calls, all made at once, comes to."""
    async with _pool(num_processes) as pool:
        return await asyncio.gather(*(pool.score(*call) for call in calls), return_exceptions=True)


async def test_a_number_is_the_reward_and_its_only_part_and_named_parts_are_summed():
    text = 'ü"\n\\🙂' * 100_000
    calls = [(rewards.length, "four"), (rewards.parts, ""), (rewards.length, text)]
    calls.append((rewards.noisy, ""))  # what a reward prints is no answer
    assert await _scores(*calls) == [
        FOUR,
        Score(reward=0.75, parts={"right": 1.0, "format": -0.25, "style": None, "speed": None}),
        Score(reward=float(len(text)), parts={"length": float(len(text))}),
        Score(reward=1.0, parts={"noisy": 1.0}),
    ]


async def test_not_applicable_is_null_and_a_value_of_the_wrong_type_a_failure():
    for scored in await _scores(
        *((rewards.nothing, kind) for kind in ("none", "nan", "infinity", "empty", "no parts"))
    ):
        assert isinstance(scored, Score) and scored.reward is None
    kinds = ("list", "text", "object", "part", "digits")
    for failed in await _scores(*((rewards.wrong_type, kind) for kind in kinds)):
        assert isinstance(failed, RewardFailed) and "wrong_type" in str(failed)


LIKE_NUMBERS = [0.5, 1.0, 0.5, 0.5, 0.5, 0.5, 1.0, 3.0, None, None, None, None, None, None, None, 2.0]


async def test_what_cannot_be_sent_to_a_reward_is_named():
    async def reply() -> str:
        return "four"

    forgotten, thing = await _scores((rewards.length, reply()), (rewards.length, object()))
    assert isinstance(forgotten, TypeError) and "reply() was not awaited: write `await`" in str(forgotten)
    assert isinstance(thing, TypeError) and "a object cannot be sent to a reward function; give it texts" in str(thing)


async def test_numbers_of_any_library_are_rewards_and_what_is_not_finite_in_a_shard_is_none():
    returned, named = rewards.number_like(""), {str(place): value for place, value in enumerate(LIKE_NUMBERS)}
    async with _pool() as pool:
        for scored in (await pool.score(rewards.number_like, ""), await score_all(returned)):
            assert scored == Score(reward=9.5, parts=named)
    for value, expected in zip(returned.values(), LIKE_NUMBERS, strict=True):
        for scored in (as_score(value, rewards.number_like), as_score(Score(reward=value), rewards.number_like)):
            assert scored.reward == expected and type(scored.reward) is type(expected)


async def test_a_started_pool_has_its_processes_before_the_first_call_uses_them_and_ends_them():
    before = {child.pid for child in psutil.Process().children()}
    async with _pool(2) as pool:
        await pool.start()
        await pool.start()  # there are as many as there shall be
        started = [child for child in psutil.Process().children() if child.pid not in before]
        scores = await asyncio.gather(*(pool.score(rewards.process_id, "") for _ in range(8)))
        assert len(started) == 2 and {score.reward for score in scores} <= {child.pid for child in started}
    assert not any(child.is_running() for child in started)


async def test_answers_go_to_the_questions_they_belong_to_and_who_kills_its_process_fails_alone():
    died, *scored = await _scores((rewards.dying, ""), *[(rewards.length, "x" * n) for n in range(30)], num_processes=2)
    assert isinstance(died, RewardFailed) and "its process died" in str(died)
    assert [s.reward for s in scored if isinstance(s, Score)] == list(range(30))


async def test_among_quick_calls_that_share_a_message_each_fails_or_is_cancelled_alone():
    async with _pool(timeout=2.0) as pool:
        for _ in range(5):
            await pool.score(rewards.length, "")  # the pool learns that they are quick
        calls = [(rewards.length, "x" * n) for n in range(60)]
        calls[10], calls[25], calls[40] = (rewards.dying, ""), (rewards.for_ever, ""), (rewards.process_id, "")
        waiting = [asyncio.create_task(pool.score(*call)) for call in calls]
        await asyncio.sleep(0)
        waiting[50].cancel()
        scored = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(scored[10], RewardFailed) and "died" in str(scored[10])
    assert isinstance(scored[25], RewardTimeout) and isinstance(scored[50], asyncio.CancelledError)
    others = [n for n in range(60) if n not in (10, 25, 40, 50)]
    assert [scored[n] for n in others] == [Score(reward=float(n), parts={"length": float(n)}) for n in others]


async def test_a_function_of_the_users_file_is_found_by_the_child_and_a_local_one_is_not(tmp_path: Path):
    def local(reply: str) -> float:
        return 1.0

    (tmp_path / "my_rewards.py").write_text("def shout(reply):\n    return float(reply.isupper())\n")
    shouted, failed = await _scores((load_object(f"{tmp_path}/my_rewards.py:shout"), "YES"), (local, ""))
    assert shouted == Score(reward=1.0, parts={"shout": 1.0})
    assert isinstance(failed, RewardFailed) and "local" in str(failed)


async def test_several_rewards_run_at_once_and_are_named_and_their_sum_is_the_reward(tmp_path: Path):
    async def judge(verdict: float | None) -> Score:
        return Score(reward=verdict, parts={"judge": verdict})

    async with _pool(2):
        scored = await score_all(
            {
                **{"long": (rewards.length, "four"), "split": (rewards.parts, ""), "none": (rewards.nothing, "nan")},
                **{"style": judge(0.5), "silent": judge(None), "turns": -1},
            }
        )
        unscored = await score_all({"one": (rewards.nothing, "none"), "other": None})
        met = await score_all({name: (rewards.meeting, str(tmp_path), 2) for name in ("one", "other")})
    assert scored.reward == 4.0 + (1.0 - 0.25) + 0.5 - 1
    assert scored.parts == {
        **{"long": 4.0, "split.right": 1.0, "split.format": -0.25, "split.style": None, "split.speed": None},
        **{"style": 0.5, "silent": None, "turns": -1.0, "none": None},
    }
    assert unscored == Score(reward=None, parts={"one": None, "other": None})
    assert met.parts == {"one": 2.0, "other": 2.0}


async def test_a_reward_that_raises_says_what_and_where_fails_the_attempt_and_breaks_no_other():
    place = r"\n  at tests/unit/rollouts/reward_functions.py:\d+ in failing: raise KeyError\(reply\)$"
    async with _pool() as pool:
        before = await pool.score(rewards.process_id, "")
        with pytest.raises(RewardFailed, match=f"reward_functions:failing: KeyError: 'x'{place}"):
            await score_all({"broken": (rewards.failing, "x"), "slow": (rewards.slow, 0.2)})
        assert await pool.score(rewards.process_id, "") == before, "no process was killed for it"


@pytest.mark.parametrize("policy", ["exclude", "zero"])
async def test_a_timeout_is_an_error_or_counts_as_a_part_of_zero(policy: str):
    async with _pool(timeout=2.0, on_timeout=policy):
        several = score_all({"right": (rewards.length, "four"), "endless": (rewards.for_ever, "")})
        if policy == "zero":
            assert await several == Score(reward=4.0, parts={"right": 4.0, "endless": 0.0})
            return
        with pytest.raises(RewardTimeout, match="for_ever took more than 2 s and was killed"):
            await several


async def test_a_cancelled_call_ends_its_process_and_leaves_no_answer_for_the_next():
    async with _pool() as pool:
        before = await pool.score(rewards.process_id, "")
        waiting = asyncio.create_task(pool.score(rewards.slow, 0.5))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await pool.score(rewards.length, "four") == FOUR
        assert await pool.score(rewards.process_id, "") != before


async def test_a_reward_that_computes_does_not_hold_up_the_event_loop():
    async with _pool() as pool:
        await pool.score(rewards.length, "")
        scoring, turns = asyncio.create_task(pool.score(rewards.burning, 1.0)), 0
        while not scoring.done():
            await asyncio.sleep(0.005)
            turns += 1
        assert (await scoring).reward == 1.0
    assert turns > 50, "of about 200; a loop that is held has one or two"


# ── What rewards do to their processes ──────────────────────────────────────────────────────────────────────────────


async def _then_next(*call: Any, timeout: float = 30.0, **options: Any) -> tuple[Score | BaseException, bool]:
    """What a call comes to, and whether its process is still used; the next call on the same pool is checked here."""
    async with _pool(timeout=timeout, **options) as pool:
        before = await pool.score(rewards.process_id, "")
        [result] = await asyncio.gather(pool.score(*call), return_exceptions=True)
        assert await pool.score(rewards.length, "four") == FOUR
        return result, await pool.score(rewards.process_id, "") == before


@pytest.mark.parametrize(
    ("call", "options", "error", "words"),
    [
        ((rewards.regex_bomb, ""), {"timeout": 2.0}, RewardTimeout, ""),  # it is in the middle of C code
        ((rewards.memory_hog, ""), {"memory_gb": 0.5}, RewardFailed, "reward.memory_gb"),
        ((rewards.shouting, ""), {}, RewardFailed, "no answer"),
        ((rewards.endless_answer, ""), {}, RewardFailed, ""),
    ],
)
async def test_what_never_ends_or_speaks_out_of_turn_has_failed_and_its_process_is_not_used_again(
    call: tuple[Any, ...], options: dict[str, float], error: type[Exception], words: str
):
    result, same = await _then_next(*call, **options)
    assert isinstance(result, error) and words in str(result) and not same


async def test_a_process_that_leaves_python_or_closes_its_streams_is_used_again():
    result, same = await _then_next(rewards.leaving, "")
    assert isinstance(result, RewardFailed) and "SystemExit" in str(result) and same
    result, same = await _then_next(rewards.panicking, "")
    assert isinstance(result, RewardFailed) and "Panic: index out of range" in str(result) and same
    result, same = await _then_next(rewards.closing, "")
    assert isinstance(result, Score) and result.reward == 1.0 and same


@pytest.mark.parametrize("reward", [rewards.shouting_later, rewards.dying_later])
async def test_what_a_reward_leaves_behind_spoils_no_later_call(reward: Callable[..., Any]):
    async with _pool() as pool:
        process = psutil.Process(int((await pool.score(reward, "")).reward or 0))
        if reward is rewards.dying_later:
            await asyncio.to_thread(psutil.wait_procs, [process], 10)
        else:
            await asyncio.to_thread(_wait_for, lambda: process.num_threads() == 1)
        assert await pool.score(rewards.length, "four") == FOUR
        assert (await pool.score(rewards.process_id, "")).reward != process.pid


@pytest.mark.parametrize(("then", "error"), [("for ever", RewardTimeout), ("die", RewardFailed)])
async def test_processes_that_a_reward_started_die_with_it(then: str, error: type[Exception], tmp_path: Path):
    """Two children and a grandchild, and of one that lives on a burst of fifty."""
    result, same = await _then_next(rewards.with_children, str(tmp_path / "ids"), then, timeout=3.0)
    assert isinstance(result, error) and not same
    processes = list(map(int, (tmp_path / "ids").read_text().split()))
    assert len(processes) == (53 if then == "for ever" else 3)
    _wait_for(lambda: all(map(_is_gone, processes)))


def test_a_worker_that_is_killed_takes_its_busy_children_along():
    code = """
import asyncio
from rollouts.rewards.scoring import RewardPool
from tests.unit.rollouts.reward_functions import for_ever, process_id
async def play():
    async with RewardPool(num_processes=1, timeout=600) as pool:
        print(int((await pool.score(process_id, "")).reward), flush=True)
        await pool.score(for_ever, "")
asyncio.run(play())
"""
    root = Path(__file__).parents[4]
    worker = subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    child = int(worker.stdout.readline())
    _wait_for(lambda: psutil.Process(child).cpu_times().user > 0.3)  # it is at it
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    _wait_for(lambda: _is_gone(child))


def _is_gone(process: int) -> bool:
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _wait_for(holds: Callable[[], bool]) -> None:
    """Wait until something is so, at most 10 seconds."""
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
