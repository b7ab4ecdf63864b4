"""Rewards in killable child processes: one pathological answer cannot freeze a run.

In: a module-level function and JSON-able arguments, or several of them by name. Out: a `Score`.

    workflow ─ score(f, …) ─▶ idle child ─ one JSON line ─▶ f(…) ─ one JSON line ─▶ Score
                                   ├─ deadline passed: kill -9 with all it started, a new child, `on_timeout`
                                   └─ it ended or spoke out of turn: the same, RewardFailed

Weights, scale, clipping and the overlong penalty come later, see `reward_shaping.py`: a `Score` is raw.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import itertools
import json
import math
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

from rollouts.workflow import Score
from storage.loading import path_of

_LONGEST_ANSWER = 2**24  # bytes
_COLLECT_SECONDS = 5.0

Part = tuple[Any, ...] | Awaitable[Any] | float | None
"""What `score_all` takes: `(function, *arguments)` for a reward process, something to await, or a known value."""


class RewardFailed(Exception):
    """The reward function raised, returned no reward, or its process died; the message carries its own words."""


class RewardTimeout(Exception):
    """The reward function passed its deadline and its process was killed."""


class RewardPool:
    """A fixed number of child processes, started when first needed. Use it as an async context manager."""

    def __init__(
        self,
        *,
        num_processes: int,
        timeout: float,
        on_timeout: Literal["exclude", "zero", "fail"] = "exclude",
        memory_gb: float | None = None,
    ) -> None:
        """`timeout` is in seconds a call, `memory_gb` in GiB of address space a child; see `rollouts/config.py`."""
        self._timeout = timeout
        self.on_timeout = on_timeout
        """`zero`: a call past its deadline is worth 0; `exclude` and `fail`: it raises, the player does the rest."""
        self._command = [sys.executable, "-m", "rollouts.reward_process"]
        self._command += [] if memory_gb is None else [str(int(memory_gb * 2**30))]
        self._slots: asyncio.Queue[Process | None] = asyncio.Queue()
        for _ in range(num_processes):
            self._slots.put_nowait(None)
        self._num_processes = num_processes
        self._request_ids = itertools.count()
        self._ending: set[asyncio.Task[None]] = set()
        self.num_timeouts = 0
        """Calls that passed the deadline, whatever `on_timeout` made of them."""
        self.num_killed = 0
        """Children killed past the deadline, or because their attempt was cancelled in the middle of a call."""
        self.num_died = 0
        """Children that ended by themselves, or wrote something that is no answer."""

    async def score(self, reward: Callable[..., Any], *arguments: Any) -> Score:
        """Call `reward(*arguments)` in a child. Raises what `value` raises."""
        value = await self.value(reward, *arguments)
        parts = value if isinstance(value, dict) else {reward.__name__: value}
        return Score(reward=_total(parts), parts=parts)

    async def value(self, reward: Callable[..., Any], *arguments: Any) -> float | None | dict[str, float | None]:
        """What `reward(*arguments)` returns: a number, null for not applicable, or named parts.

        Raises `RewardTimeout` past the deadline, unless that means 0, and `RewardFailed` when it raises, returns
        something that is no reward, or its process dies.
        """
        name = path_of(reward)
        try:
            answer = await self._ask(name, arguments)
        except RewardTimeout:
            if self.on_timeout == "zero":
                return 0.0
            raise
        if "error" in answer:
            raise RewardFailed(f"{name}: {answer['error']}")
        value = answer["value"]
        try:
            return {key: _number(part) for key, part in value.items()} if isinstance(value, dict) else _number(value)
        except (TypeError, ValueError) as error:
            returned = f"{name} returned {value!r}"
            raise RewardFailed(f"{returned}; return a finite number, None or a dictionary of them") from error

    async def _ask(self, name: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
        """A child's answer to one request."""
        request_id = next(self._request_ids)
        line = json.dumps({"id": request_id, "function": name, "arguments": arguments}).encode() + b"\n"
        child = await self._slots.get()
        # Anything but a proper answer ends the child: its next line would answer the wrong question.
        keep: Process | None = None
        deadline = asyncio.timeout(self._timeout)
        try:
            was_used = child is not None
            if child is None:
                child = await self._start_child()
            async with deadline:
                said = await _converse(child, line)
                answer = _answer(said, request_id)
                if answer is None and was_used:  # something an earlier call left behind; no fault of this function
                    self._end(child)
                    self.num_died += 1
                    child = await self._start_child()
                    said = await _converse(child, line)
                    answer = _answer(said, request_id)
            if answer is None:
                self.num_died += 1
                did = "wrote something that is no answer" if said else "died"
                raise RewardFailed(f"{name}: its process {did}")
            keep = None if answer.get("is_last") else child
            return answer
        except TimeoutError:
            if not deadline.expired():
                raise
            self.num_timeouts += 1
            self.num_killed += 1
            raise RewardTimeout(f"{name} took more than {self._timeout:g} s and was killed") from None
        except asyncio.CancelledError:
            self.num_killed += child is not None
            raise
        finally:
            if keep is None and child is not None:
                self._end(child)
            self._slots.put_nowait(keep)

    async def _start_child(self) -> Process:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        return await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            limit=_LONGEST_ANSWER,
            start_new_session=True,  # a process group of its own, to be killed with all that a reward starts
        )

    def _end(self, child: Process) -> None:
        """Kill a child and what it started; the rest of it is collected beside what comes next."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        ending = asyncio.create_task(_collect(child))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Kill the children and what they started."""
        for _ in range(self._num_processes):
            child = await self._slots.get()
            if child is not None:
                self._end(child)
        await asyncio.gather(*self._ending)

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


async def score_all(parts: Mapping[str, Part]) -> Score:
    """Several rewards at once, by name; the reward is the sum of those that apply, null where none does.

        return await score_all({
            "correct": (gsm8k, reply, task.answer),          # in a reward process
            "format": (matches, reply, r"^<think>"),         # at the same time, in another
            "style": self.judge(task.prompt, reply),         # awaited here: it must only wait, never compute
            "turns": -0.1 * len(chat.turns),                 # known already
        })

    The run file's `[reward] weights` refer to these names. Parts of a function that returns a dictionary are named
    `correct.<key>`. When one fails the attempt has failed: the others are waited for, then the first error is raised.
    """
    found = await asyncio.gather(*(_part(part) for part in parts.values()), return_exceptions=True)
    named: dict[str, float | None] = {}
    for name, value in zip(parts, found, strict=True):
        if isinstance(value, BaseException):
            raise value
        named |= {f"{name}.{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
    return Score(reward=_total(named), parts=named)


def set_reward_pool(pool: RewardPool) -> None:
    """Called by the executor at the start of an attempt's own asyncio task."""
    _POOL.set(pool)


async def _part(part: Part) -> float | None | dict[str, float | None]:
    if isinstance(part, tuple):
        function, *arguments = part
        return await _POOL.get().value(function, *arguments)
    value = await part if inspect.isawaitable(part) else part
    return _number(value.reward if isinstance(value, Score) else value)


async def _collect(child: Process) -> None:
    """Wait for a killed child and close its pipes, which a process that left its group may hold open."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_COLLECT_SECONDS):
            await child.communicate()


async def _converse(child: Process, line: bytes) -> bytes:
    """Say a line and hear one; empty where the child has ended."""
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(line)
    try:
        return await child.stdout.readline()
    except ValueError:  # longer than any answer may be
        return b"..."


def _answer(line: bytes, request_id: int) -> dict[str, Any] | None:
    """Null for anything but the answer to this very request."""
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    is_answer = isinstance(answer, dict) and answer.keys() & {"value", "error"} and answer.get("id") == request_id
    return answer if is_answer else None


def _total(parts: Mapping[str, float | None]) -> float | None:
    known = [part for part in parts.values() if part is not None]
    return sum(known) if known else None


def _number(value: Any) -> float | None:
    """None and NaN both mean not applicable."""
    if value is None or math.isnan(float(value)):
        return None
    if math.isinf(float(value)):
        raise ValueError("an infinite reward leaves no finite mean")
    return float(value)
