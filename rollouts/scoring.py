"""Rewards in killable child processes: one pathological answer cannot freeze a run.

In: a module-level function and JSON-able arguments. Out: a `Score`.

    workflow ─ score(f, …) ─▶ idle child ─ one JSON line ─▶ f(…) ─ one JSON line ─▶ Score
                                   └─ deadline passed: kill -9, a new child, RewardTimeout
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import math
import os
import sys
from asyncio.subprocess import Process
from collections.abc import Callable
from typing import Any

from rollouts.loading import path_of
from rollouts.workflow import Score


class RewardFailed(Exception):
    """The reward function raised, returned no reward, or its process died; the message carries its own words."""


class RewardTimeout(Exception):
    """The reward function passed its deadline and its process was killed."""


class RewardPool:
    """A fixed number of child processes, started when first needed. Use it as an async context manager."""

    def __init__(self, *, num_processes: int, timeout: float) -> None:
        self._timeout = timeout
        self._slots: asyncio.Queue[Process | None] = asyncio.Queue()
        for _ in range(num_processes):
            self._slots.put_nowait(None)
        self._num_processes = num_processes
        self.num_killed = 0

    async def score(self, reward: Callable[..., Any], *arguments: Any) -> Score:
        """Call `reward(*arguments)` in a child.

        Raises `RewardTimeout` past the deadline and `RewardFailed` when it raises, returns something that is no
        reward, or its process dies.
        """
        request = json.dumps({"function": path_of(reward), "arguments": arguments}).encode() + b"\n"
        child = await self._slots.get()
        try:
            if child is None or child.returncode is not None:
                child = await _start_child()
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(request)
            async with asyncio.timeout(self._timeout):
                line = await child.stdout.readline()
            if not line:  # Replaced at once: until its status arrives a dead child looks like an idle one.
                _kill(child)
                child = None
        except TimeoutError:
            _kill(child)
            child = None
            self.num_killed += 1
            raise RewardTimeout(f"{path_of(reward)} took more than {self._timeout:g} s and was killed") from None
        except BaseException:
            # Cancelled in the middle of a conversation: the child's next line would answer the wrong question.
            _kill(child)
            child = None
            raise
        finally:
            self._slots.put_nowait(child)
        if not line:
            raise RewardFailed(f"{path_of(reward)}: its process died")
        answer = json.loads(line)
        if "error" in answer:
            raise RewardFailed(f"{path_of(reward)}: {answer['error']}")
        try:
            return _as_score(answer["value"], name=reward.__name__)
        except (TypeError, ValueError) as error:
            returned = f"{path_of(reward)} returned {answer['value']!r}"
            raise RewardFailed(f"{returned}; return a finite number, None or a dictionary of them") from error

    async def close(self) -> None:
        """Kill the children."""
        for _ in range(self._num_processes):
            child = await self._slots.get()
            _kill(child)
            if child is not None:
                await child.wait()

    async def __aenter__(self) -> RewardPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


_POOL: contextvars.ContextVar[RewardPool] = contextvars.ContextVar("reward_pool")


async def score(reward: Callable[..., Any], *arguments: Any) -> Score:
    """Score inside a workflow: `return await score(gsm8k, reply, task.answer)`.

    `reward` is a module-level function returning a number, null for not applicable, or a dictionary of named parts.
    """
    return await _POOL.get().score(reward, *arguments)


def set_reward_pool(pool: RewardPool) -> None:
    """Called by the executor at the start of an attempt's own asyncio task."""
    _POOL.set(pool)


async def _start_child() -> Process:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollouts.reward_process"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment,
        limit=2**24,
    )


def _kill(child: Process | None) -> None:
    if child is not None and child.returncode is None:
        child.kill()


def _as_score(value: Any, *, name: str) -> Score:
    if isinstance(value, dict):
        parts = {key: _number(part) for key, part in value.items()}
        known = [part for part in parts.values() if part is not None]
        return Score(reward=sum(known) if known else None, parts=parts)
    reward = _number(value)
    return Score(reward=reward, parts={name: reward})


def _number(value: Any) -> float | None:
    """None and NaN both mean not applicable."""
    if value is None or math.isnan(float(value)):
        return None
    if math.isinf(float(value)):
        raise ValueError("an infinite reward leaves no finite mean")
    return float(value)
