"""Whatever a reward does to its process, only that process ends, with all it started; the next call works again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollouts.rewards.answers import math_answer
from rollouts.rewards.scoring import RewardFailed, RewardPool, RewardTimeout
from rollouts.workflow import Score
from tests.unit.rollouts.reward_functions import (
    closing,
    dying_later,
    endless_answer,
    leaving,
    length,
    many_children,
    memory_hog,
    process_id,
    regex_bomb,
    shouting,
    shouting_later,
    with_children,
)

ROOT = Path(__file__).parents[4]
FOUR = Score(reward=4.0, parts={"length": 4.0})


def _then_next(
    reward: Callable[..., Any], *arguments: Any, timeout: float = 30.0, **options: Any
) -> tuple[Score | BaseException, bool]:
    """What a call comes to, and whether its process is still used; the next call on the same pool is checked here."""

    async def play() -> tuple[Score | BaseException, bool]:
        async with RewardPool(num_processes=1, timeout=timeout, **options) as pool:
            before = await pool.score(process_id, "")
            [result] = await asyncio.gather(pool.score(reward, *arguments), return_exceptions=True)
            assert await pool.score(length, "four") == FOUR
            return result, await pool.score(process_id, "") == before

    return asyncio.run(play())


@pytest.mark.parametrize(
    ("call", "options", "error", "words"),
    [
        ((regex_bomb, ""), {"timeout": 2.0}, RewardTimeout, ""),  # it is in the middle of C code
        ((math_answer, "$9^{9^{9^{9}}}$", "81"), {"timeout": 8.0}, RewardTimeout, "math_answer"),
        ((memory_hog, ""), {"memory_gb": 0.5}, RewardFailed, "reward.memory_gb"),
        ((shouting, ""), {}, RewardFailed, "no answer"),
        ((endless_answer, ""), {}, RewardFailed, ""),
    ],
)
def test_what_never_ends_or_speaks_out_of_turn_has_failed_and_its_process_is_not_used_again(
    call: tuple[Any, ...], options: dict[str, float], error: type[Exception], words: str
):
    result, same = _then_next(*call, **options)
    assert isinstance(result, error) and words in str(result) and not same


def test_a_process_that_leaves_python_or_closes_its_streams_is_used_again():
    result, same = _then_next(leaving, "")
    assert isinstance(result, RewardFailed) and "SystemExit" in str(result) and same
    result, same = _then_next(closing, "")
    assert isinstance(result, Score) and result.reward == 1.0 and same


@pytest.mark.parametrize("reward", [shouting_later, dying_later])
def test_what_a_reward_leaves_behind_spoils_no_later_call(reward: Callable[..., Any]):
    async def play() -> None:
        async with RewardPool(num_processes=1, timeout=30.0) as pool:
            process = psutil.Process(int((await pool.score(reward, "")).reward or 0))
            if reward is dying_later:
                await asyncio.to_thread(psutil.wait_procs, [process], 10)
            else:
                await asyncio.to_thread(_wait_for, lambda: process.num_threads() == 1)
            assert await pool.score(length, "four") == FOUR
            assert pool.num_died == 1

    asyncio.run(play())


@pytest.mark.parametrize(("then", "error"), [("for ever", RewardTimeout), ("die", RewardFailed)])
def test_processes_that_a_reward_started_die_with_it(then: str, error: type[Exception], tmp_path: Path):
    result, same = _then_next(with_children, str(tmp_path / "ids"), then, timeout=5.0)
    assert isinstance(result, error) and not same
    for process in (tmp_path / "ids").read_text().split():
        _wait_for(lambda process=process: _is_gone(int(process)))


def test_a_burst_of_processes_dies_as_a_whole(tmp_path: Path):
    result, same = _then_next(many_children, str(tmp_path / "forks"), timeout=3.0)
    assert isinstance(result, RewardTimeout) and not same
    assert (tmp_path / "forks").read_text() == "+" * 50
    _wait_for(lambda: not [p for p in psutil.process_iter() if _has_open(p, tmp_path / "forks")])


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
    worker = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
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


def _has_open(process: psutil.Process, file: Path) -> bool:
    try:
        return process.pid != os.getpid() and str(file) in {opened.path for opened in process.open_files()}
    except psutil.Error:
        return False


def _wait_for(holds: Callable[[], bool]) -> None:
    """Wait until something is so, at most 10 seconds."""
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
