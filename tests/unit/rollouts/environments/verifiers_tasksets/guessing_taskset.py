"""A verifiers environment as its users write one: an exchange of several turns, judged at its end."""

from collections.abc import Iterable

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    secret: int


class GuessTask(vf.Task[GuessData]):
    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.secret))

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self) -> Iterable[GuessTask]:
        for secret in range(10):
            yield GuessTask(GuessData(prompt=None, secret=secret), self.config.task)


class GuessingConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(max_turns=4)


class GuessingEnv(vf.Env[GuessingConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as game:
            guess = await game.turn("0-9?")
            while not guess.terminated and guess.last_reply != str(task.data.secret):
                higher = guess.last_reply.isdecimal() and int(guess.last_reply) < task.data.secret
                guess = await game.turn("higher" if higher else "lower")


__all__ = ["GuessTaskset", "GuessingEnv"]
