"""Rewards in killable child processes: one pathological answer cannot freeze a run.

In: a module-level function and JSON-able arguments, or several of them by name. Out: a `Score`.

    workflow ─ score(f, …) ─▶ idle child ─ one JSON line ─▶ f(…) ─ one JSON line ─▶ Score
                                   ├─ deadline passed: kill -9 with all it started, a new child, `on_timeout`
                                   └─ it ended or wrote something else: the same, RewardFailed

A child replies to one line after the other. If its replies take less time than messages, it gets several at once.
Weights, scale, clipping and the overlong penalty come later, see `reward_shaping.py`: a `Score` is raw.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import itertools
import json
import math
import os
import signal
import sys
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from infra.user_code import own_command, path_of
from rollouts.reward_values import as_number
from rollouts.rewards.reward_shaping import weighted_sum
from rollouts.workflow import Score, owe
from settings.errors import InvalidInput

_LONGEST_REPLY = 2**24  # bytes
_COLLECT_SECONDS = 5.0
_MOST_AT_ONCE, _SECONDS_AT_ONCE = 32, 0.005

_name_of = functools.lru_cache(maxsize=256)(path_of)  # it looks at files

Part = tuple[Any, ...] | Awaitable[Any] | float | None
"""What `score_all` takes: `(function, *arguments)` for a reward process, something to await, or a known value."""


class RewardFailed(Exception):
    """The reward function raised, returned no reward, or its process died; the message has its own error."""


class RewardTimeout(Exception):
    """The reward function passed its deadline and its process was killed."""


@dataclass(eq=False)
class _Call:
    """A request on its way to a child, and back."""

    name: str
    request_id: int
    line: bytes
    reply: asyncio.Future[dict[str, Any]]
    child: Process | None = None
    """The child that works on it now."""
    is_second_try: bool = False

    def fail(self, error: BaseException) -> None:
        """Raise `error` to the caller, unless it has been cancelled."""
        if not self.reply.done():
            self.reply.set_exception(error)


class RewardPool:
    """A fixed number of child processes, started when first needed, or by `start`. An async context manager."""

    def __init__(
        self,
        *,
        num_processes: int,
        timeout: float,
        on_timeout: Literal["exclude", "zero", "fail"] = "exclude",
        memory_gb: float | None = None,
    ) -> None:
        """`timeout` is in seconds per call, `memory_gb` in GiB of address space per child: see `settings/reward.py`."""
        self._timeout = timeout
        self.on_timeout = on_timeout
        """`zero`: a call past its deadline is worth 0; `exclude` and `fail`: it raises, the player does the rest.
        Built-in rewards are worth 0 under `exclude`, too."""
        self._command = own_command("rollouts.rewards.reward_process:main")
        self._command += [] if memory_gb is None else [str(int(memory_gb * 2**30))]
        self._num_processes = num_processes
        self._waiting: deque[_Call] = deque()
        self._idle: deque[Process] = deque()
        self._serving: set[asyncio.Task[None]] = set()
        """One for each child that is at work."""
        self._ending: set[asyncio.Task[None]] = set()
        self._seconds = math.inf
        """Mean of recent calls; the newest counts for a fifth. Infinite if it is unknown, as after an error."""
        self._request_ids = itertools.count()
        self._has_worked = False

    async def start(self) -> None:
        """Start all children now, so that the first calls do not wait for Python to start."""
        while len(self._idle) < self._num_processes:
            self._idle.append(await self._start_child())

    async def score(self, reward: Callable[..., Any], *arguments: Any, vote: str | None = None) -> Score:
        """Call `reward(*arguments)` in a child. Raises what `value` raises."""
        value = await self.value(reward, *arguments)
        parts = value if isinstance(value, dict) else {reward.__name__: value}
        return Score(reward=weighted_sum(parts, {}), parts=parts, vote=vote)

    async def value(self, reward: Callable[..., Any], *arguments: Any) -> float | None | dict[str, float | None]:
        """What `reward(*arguments)` returns: a number, None for not applicable, or named parts. 0 if a built-in reward
        of a reply passes the deadline, uses up the memory or ends its process.

        Raises `RewardTimeout` past the deadline, unless that means 0, and `RewardFailed` when it raises, returns
        something that is no reward, or its process dies.
        """
        if not callable(reward):
            raise InvalidInput(f"score() takes a reward function first, and then its arguments, not {reward!r}")
        name, request_id = _name_of(reward), next(self._request_ids)
        if "<" in name.rpartition(":")[2]:
            fault = (
                "a reward is a function of a module, which another process finds, not one in a function, or a lambda"
            )
            raise RewardFailed(f"{name}: InvalidInput: {fault}")
        if inspect.iscoroutinefunction(reward):
            fault = "a reward is called in a process of its own and awaited by nothing: write `def`"
            raise RewardFailed(f"{name}: InvalidInput: {fault}")
        is_built_in = name.startswith(("rollouts.rewards.answers:", "rollouts.rewards.code_reward:"))
        request = {"id": request_id, "function": name, "arguments": arguments}
        line = json.dumps(request, default=_refuse).encode() + b"\n"
        call = _Call(name, request_id, line, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        if len(self._serving) < self._num_processes:
            self._serving.add(asyncio.create_task(self._serve()))
        try:
            reply = await call.reply
        except asyncio.CancelledError:
            if call.child is not None:
                _kill(call.child)
            raise
        except (RewardTimeout, RewardFailed) as error:  # the latter if its process died
            is_late = isinstance(error, RewardTimeout)
            # A built-in one computes from the reply alone: if others worked, the policy made it so.
            is_own = is_built_in and self._has_worked and not (is_late and self.on_timeout == "fail")
            if is_late:
                owe("a reward's time limit")
            if is_own or (is_late and self.on_timeout == "zero"):
                return 0.0
            raise
        if is_built_in and self._has_worked and reply.get("is_last"):  # out of memory
            return 0.0
        if "error" in reply:
            raise RewardFailed(f"{name}: {reply['error']}")
        value = reply["value"]
        try:
            return (
                {key: as_number(part) for key, part in value.items()} if isinstance(value, dict) else as_number(value)
            )
        except TypeError as error:
            returned = f"{name} returned {value!r}"
            raise RewardFailed(f"{returned}; return a number, None or a dictionary of them") from error

    async def _serve(self) -> None:
        """Let one child work until no call waits."""
        child = self._idle.popleft() if self._idle else None
        try:
            while self._waiting:
                child = await self._work(child)
        finally:
            task = asyncio.current_task()
            assert task is not None
            self._serving.discard(task)  # before any other caller runs: it must not rely on this task
        if child is not None:
            self._idle.append(child)

    async def _work(self, child: Process | None) -> Process | None:
        """Give a child as many calls as it takes at once; returns it, or None if it has ended.

        The calls that it had not begun by then wait for another child.
        """
        # Several quick calls share a message, which would take longer than the reply.
        share = math.ceil(len(self._waiting) / self._num_processes)
        at_once = max(1, min(share, _MOST_AT_ONCE, int(_SECONDS_AT_ONCE / max(self._seconds, 1e-9))))
        calls = [self._waiting.popleft() for _ in range(at_once)]
        calls = [call for call in calls if not call.reply.done()]  # without those that were cancelled meanwhile
        if not calls:
            return child
        was_used = child is not None
        try:
            child = child or await self._start_child()
        except Exception as error:  # noqa: BLE001 - out of processes or memory: raised to the callers
            for call in calls:
                call.fail(error)
            return None
        assert child.stdin is not None
        child.stdin.write(b"".join(call.line for call in calls))
        for number, call in enumerate(calls):
            reply = await self._reply_of(child, call, was_used=was_used or number > 0)
            if reply is not None:
                self._has_worked = self._has_worked or "value" in reply
                self._count_seconds(reply.get("seconds"))
                if not call.reply.done():
                    call.reply.set_result(reply)
            # Anything but a proper reply ends the child: its next line would belong to another call.
            if reply is None or reply.get("is_last"):
                self._end(child)
                self._waiting.extendleft(reversed([call for call in calls[number:] if not call.reply.done()]))
                return None
        return child

    async def _reply_of(self, child: Process, call: _Call, *, was_used: bool) -> dict[str, Any] | None:
        """The child's reply; None if it gave none: then the call has failed, or waits for another try."""
        assert child.stdout is not None
        call.child, line = child, b""
        try:
            async with asyncio.timeout(self._timeout):
                line = await child.stdout.readline()
        except TimeoutError:
            call.fail(RewardTimeout(f"{call.name} took more than {self._timeout:g} s and was killed"))
            return None
        except ValueError:  # longer than any reply may be
            line = b"..."
        finally:
            call.child = None
        with contextlib.suppress(ValueError):
            reply = json.loads(line)
            if isinstance(reply, dict) and reply.keys() & {"value", "error"} and reply.get("id") == call.request_id:
                return reply
        if was_used and not call.is_second_try:  # an earlier call left something behind; no fault of this function
            call.is_second_try = True
        else:
            did = "wrote something that is no answer" if line else "died"
            call.fail(RewardFailed(f"{call.name}: its process {did}"))
        return None

    def _count_seconds(self, seconds: Any) -> None:
        if not (isinstance(seconds, float) and 0 <= seconds < math.inf):
            self._seconds = math.inf
        else:
            self._seconds = seconds if math.isinf(self._seconds) else 0.8 * self._seconds + 0.2 * seconds

    async def _start_child(self) -> Process:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        return await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            limit=_LONGEST_REPLY,
            start_new_session=True,  # a process group of its own, to kill with everything that a reward starts
        )

    def _end(self, child: Process) -> None:
        """Kill a child and what it started, and collect it in the background."""
        _kill(child)
        ending = asyncio.create_task(_collect(child))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Kill the children and what they started, once the calls have ended."""
        await asyncio.gather(*self._serving, return_exceptions=True)
        for child in self._idle:
            self._end(child)
        await asyncio.gather(*self._ending)

    async def __aenter__(self) -> RewardPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


_POOL: contextvars.ContextVar[RewardPool] = contextvars.ContextVar("reward_pool")


async def score(reward: Callable[..., Any], *arguments: Any, vote: str | None = None) -> Score:
    """Score inside a workflow: `return await score(gsm8k, reply, task.answer)`.

    `reward` is a module-level function that returns a number, None for not applicable, or a dictionary of named parts.
    With `vote=final_answer(reply)` an evaluation counts majority votes, see `Score`.
    """
    return await _POOL.get().score(reward, *arguments, vote=vote)


async def score_all(parts: Mapping[str, Part], *, vote: str | None = None) -> Score:
    """Several rewards at once, by name; the reward is the sum of those that apply, None if none does.

        return await score_all({
            "correct": (gsm8k, reply, task.answer),          # in a reward process
            "format": (matches, reply, r"^<think>"),         # at the same time, in another
            "style": self.judge(task.prompt, reply),         # awaited here: it must only wait, never compute
            "turns": -0.1 * len(chat.turns),                 # known already
        })

    The run file's `[reward] weights` refer to these names. Parts of a function that returns a dictionary are named
    `correct.<key>`. If one fails, the attempt fails: the others are waited for, then the first error is raised.
    """
    values = await asyncio.gather(*(_part(part) for part in parts.values()), return_exceptions=True)
    named: dict[str, float | None] = {}
    for name, value in zip(parts, values, strict=True):
        if isinstance(value, BaseException):
            raise value
        named |= {f"{name}.{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
    return Score(reward=weighted_sum(named, {}), parts=named, vote=vote)


def set_reward_pool(pool: RewardPool) -> None:
    """Called by the executor at the start of an attempt's own asyncio task."""
    _POOL.set(pool)


def _refuse(argument: object) -> object:
    """Raise `TypeError` for what cannot be sent to a reward process."""
    if inspect.iscoroutine(argument):
        argument.close()  # or Python warns of it
        raise TypeError(f"{argument.__qualname__}() was not awaited: write `await` before the call")
    fault = f"a {type(argument).__name__} cannot be sent to a reward function"
    raise TypeError(f"{fault}; give it texts, numbers, lists and dictionaries")


async def _part(part: Part) -> float | None | dict[str, float | None]:
    if isinstance(part, tuple):
        function, *arguments = part
        return await _POOL.get().value(function, *arguments)
    value = await part if inspect.isawaitable(part) else part
    return as_number(value.reward if isinstance(value, Score) else value)


def _kill(child: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


async def _collect(child: Process) -> None:
    """Wait for a killed child and close its pipes, which a process that left its group may hold open."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_COLLECT_SECONDS):
            await child.communicate()
