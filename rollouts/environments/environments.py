"""Environments with several turns: reset → observation → reply → step → observation …, one environment per attempt.

    task ─▶ reset ─▶ observation ─▶ chat.ask ─▶ reply ─▶ step ─▶ observation and reward ─▶ … ─▶ close
                         ▲                                              │
                         └────────── not done, turns are left ──────────┘

In: an `Environment` that the user writes. Out: a `Score` of discounted returns, a named part per turn. The policy reads
every observation as a message of the user. An exception in `reset`, `step` or `close` is a fault of the environment:
the attempt ends as `env_error`, without a reward, and the others go on. `examples/guess_number.py` is an example.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rollouts.chat.chat import Chat
from rollouts.chat.tools import tools_of
from rollouts.reward_values import as_number
from rollouts.workflow import Score, Workflow
from storage.records import Task

CLOSE_SECONDS = 10.0
"""An environment that takes longer to close is abandoned."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What a step returns."""

    text: str = ""
    """The next message to the policy; unused once `is_done` is set."""
    reward: float | None = 0.0
    """Reward of this reply alone; `returns` adds the later ones. None, NaN and infinity: it has none."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward", as_number(self.reward))


class Environment:
    """Subclass this. One object plays one attempt and is never used again.

    Methods decorated with `tool` are tools that the policy may call before it replies.
    """

    is_done: bool = False
    """Set it in `step` or in a tool to end the episode; after a tool, it ends with the next reply."""

    async def reset(self, task: Task) -> str:
        """Prepare the task; returns the first observation."""
        raise NotImplementedError

    async def step(self, reply: str) -> Observation | str:
        """Take the policy's reply and return the next observation. A string is an observation without a reward."""
        raise NotImplementedError

    async def close(self) -> None:
        """Release everything. Called once for every environment, also after a failure or a cancellation."""


class EnvironmentWorkflow(Workflow):
    """Plays `make_environment()` until it is done. Subclass this and give it `tasks` and `make_environment`."""

    max_turns: int = 8
    """Replies per episode; an episode that is not done by then ends with status `max_turns`."""
    with_thoughts: bool = False
    """True gives `step` the whole reply, with the policy's thoughts."""
    discount: float = 1.0
    """γ: the factor of a reward for each turn before it."""

    def make_environment(self) -> Environment:
        """A new environment, for one attempt."""
        raise NotImplementedError

    async def run(self, task: Task, chat: Chat) -> Score:
        """Play one episode. The reward is the return of the first turn; part `turn_<t>` is the return of turn t."""
        environment = self.make_environment()
        try:
            rewards = await self._play(environment, task, chat)
        except BaseException as error:
            try:
                await _close(environment)
            except Exception as second:  # noqa: BLE001 - the first error is reported, this one as its note
                error.add_note(f"then closing failed: {type(second).__name__}: {second}")
            raise
        await _close(environment)
        values = returns(rewards, discount=self.discount)
        return Score(reward=values[0], parts={f"turn_{turn}": value for turn, value in enumerate(values)})

    async def _play(self, environment: Environment, task: Task, chat: Chat) -> list[float | None]:
        """The reward of every turn."""
        tools = tools_of(environment)
        text = await environment.reset(task)
        rewards: list[float | None] = []
        while True:
            reply = await chat.ask(text, tools=tools, with_thoughts=self.with_thoughts)
            if chat.max_turns_reached or chat.out_of_room:  # tools or room ran out, so there is no reply for `step`
                return [*rewards, 0.0]
            observation = await environment.step(reply)
            if isinstance(observation, str):
                observation = Observation(text=observation)
            rewards.append(observation.reward)
            if environment.is_done:
                return rewards
            if len(rewards) == self.max_turns:
                chat.max_turns_reached = True
                return rewards
            text = observation.text


def returns(rewards: Sequence[float | None], *, discount: float) -> list[float | None]:
    """The return of every turn: R_t = r_t + γ · R_{t+1}; None up to the last turn whose reward is None.

    Example: `returns([0, 0, 1], discount=0.5)` is `[0.25, 0.5, 1.0]`.
    """
    values: list[float | None] = []
    following: float | None = 0.0
    for reward in reversed(rewards):
        following = None if reward is None or following is None else reward + discount * following
        values.append(following)
    return values[::-1]


async def _close(environment: Environment) -> None:
    try:
        async with asyncio.timeout(CLOSE_SECONDS) as limit:
            await environment.close()
    except TimeoutError as error:
        if not limit.expired():
            raise
        name = type(environment).__name__
        raise RuntimeError(f"{name}.close did not return within {CLOSE_SECONDS:g} s") from error
