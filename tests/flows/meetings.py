"""Workflows whose attempts wait for what happens elsewhere, so that two flows are certain to run side by side.

What they wait for is a file in the state folder, or a step in the run's log. Nobody waits longer than an attempt may.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
from collections.abc import Callable

from rollouts.chat.chat import Chat
from rollouts.workflow import Score, workflow_context
from settings.places.state_folder import home, store_uri
from storage.log.run_log import RunLog
from storage.log.runs import open_run
from storage.objects.opening import open_store
from storage.records import Task
from tests.flows.guesses import Guesses

RUN = "scripted"
EVALUATING = "evaluating"
"""File that says an evaluation has begun."""
GO = "go"
"""File that lets one go on."""
FREE_TASKS = 60
"""Held-out attempts that do not wait."""
LATE = 200
"""The step that runs come to by themselves which end later."""


@functools.lru_cache(maxsize=1)
def _log() -> RunLog:
    return open_run(open_store(store_uri("")), RUN)


async def _until(met: Callable[[], bool]) -> None:
    while not met():
        await asyncio.sleep(0.05)


class Meeting(Guesses):
    """From step 3 on training waits for an evaluation to begin, which waits for step 5."""

    async def run(self, task: Task, chat: Chat) -> Score:
        if workflow_context().is_eval:
            (home() / EVALUATING).touch()
            await _until(lambda: _log().refresh().step >= 5)
        elif _log().refresh().step >= 2:
            await _until((home() / EVALUATING).exists)
        return await super().run(task, chat)


class Paused(Guesses):
    """Held-out attempts after the first few wait until the test lets them go on."""

    asked = 0

    async def run(self, task: Task, chat: Chat) -> Score:
        if workflow_context().is_eval:
            self.asked += 1
            if self.asked > FREE_TASKS:
                await _until((home() / GO).exists)
        return await super().run(task, chat)


class Held(Guesses):
    """Attempts wait until the test lets those of their own state folder go on: as many as the file says, or all."""

    let_go = 0

    def _may_go(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return self.let_go < int((home() / GO).read_text() or sys.maxsize)
        return False

    async def run(self, task: Task, chat: Chat) -> Score:
        await _until(self._may_go)
        self.let_go += 1
        return await super().run(task, chat)


class EndsLater(Guesses):
    """From step `LATE` on attempts wait until the test lets them go on."""

    async def run(self, task: Task, chat: Chat) -> Score:
        go = home() / GO
        if not go.exists() and _log().refresh().step >= LATE:
            await _until(go.exists)
        return await super().run(task, chat)


class Broken(Guesses):
    """Nothing held out can be answered."""

    async def run(self, task: Task, chat: Chat) -> Score:
        if workflow_context().is_eval:
            raise ConnectionError("no database")
        return await super().run(task, chat)
