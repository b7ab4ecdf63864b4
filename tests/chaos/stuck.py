"""Workflows that never come back, each in its own way."""

from __future__ import annotations

import asyncio
import time

from rollouts.chat import Chat
from rollouts.workflow import Score
from storage.records import RolloutTask
from tests.flows.guesses import Guesses


class Waits(Guesses):
    """Waits for ever, and lets the event loop turn: the attempt's own deadline ends it."""

    async def run(self, task: RolloutTask, chat: Chat) -> Score:
        await asyncio.Event().wait()
        raise AssertionError


class Blocks(Guesses):
    """Holds the worker's event loop, so that no deadline in the worker can end it."""

    async def run(self, task: RolloutTask, chat: Chat) -> Score:
        time.sleep(10_000)
        raise AssertionError
