"""A verifiers environment as its users write one: two seats, a speaker and a judge that is not trained."""

from collections.abc import Iterable

import verifiers.v1 as vf


class ClaimTaskset(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self) -> Iterable[vf.Task]:
        yield vf.Task(vf.TaskData(prompt="1+1=2?"), self.config.task)


class DebateConfig(vf.EnvConfig):
    speaker: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()
    judge_is_trained: bool = False


class DebateEnv(vf.Env[DebateConfig]):
    async def setup(self, agents: vf.Agents) -> None:
        agents.judge.trainable = self.config.judge_is_trained

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        speech = await agents.speaker.run(task)
        await agents.judge.run(vf.Task(vf.TaskData(prompt=f"{speech.last_reply}: yes or no?")))

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        speech, verdict = episode.traces
        speech.record_reward("convincing", float(verdict.last_reply == "yes"))


__all__ = ["ClaimTaskset", "DebateEnv"]
