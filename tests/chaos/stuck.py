"""Workflows that never come back, each in its own way."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import rollouts.engines.scripted_engine
from rollouts.chat.chat import Chat
from rollouts.engines.engine import WeightUpdate
from rollouts.engines.scripted_engine import ScriptedEngine
from rollouts.rewards.scoring import score
from rollouts.workflow import Score, workflow_context
from storage.records import Task
from tests.flows.guesses import Guesses, parity


class Blocks(Guesses):
    """Holds the worker's event loop, so that no deadline in the worker can end it."""

    async def run(self, task: Task, chat: Chat) -> Score:
        if type(chat) is Chat:  # not when the start plays it
            time.sleep(10_000)
        return await super().run(task, chat)


def endless(reply: str, answer: str) -> float:
    """A reward that never comes, and leaves the processor to those that do."""
    while True:
        signal.pause()


class ScoresForEver(Guesses):
    """The first attempt of every group gets a reward that never comes."""

    async def run(self, task: Task, chat: Chat) -> Score:
        reply = await chat.ask(task.prompt)
        return await score(parity if workflow_context().attempt else endless, reply, task.answer)


class StuckEngine(ScriptedEngine):
    """Never comes to the end of loading policy 2 where it serves policy 1; loads in a task of its own, as vLLM's."""

    async def load_policy(self, folder: Path, version: int) -> WeightUpdate:
        return await asyncio.create_task(self._load(folder, version))

    async def _load(self, folder: Path, version: int) -> WeightUpdate:
        if (self.version, version) == (1, 2):
            await asyncio.Event().wait()
        return await super().load_policy(folder, version)


class LoadsForEver(Guesses):
    """Brings the worker that plays it to an engine that is stuck once; one that starts with policy 2 is not."""

    def __init__(self, dataset: str | None) -> None:
        super().__init__(dataset)
        rollouts.engines.scripted_engine.ScriptedEngine = StuckEngine  # type: ignore[misc]
