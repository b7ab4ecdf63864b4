"""One GPU for an engine and the trainer in turns (`engine.share = "phases"`): who holds its memory, and when.

    generating ─▶ falling asleep ─▶ taking ─▶ training ─▶ leaving ─▶ free ─▶ waking ─▶ generating
      engine awake     engine          trainer's states      trainer      engine: weights, then its cache
                     gives back         come from the host   gives back

Who does not do its part, in time, is killed: its memory is free then, and another process takes its place as after any
death. So the memory is never held by both, no engine is left asleep, and nothing that was committed is lost.

In: engines as they start, the trainer. Out: the phase, and the seconds that each change took. Without phases, nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from enum import StrEnum
from typing import Any, Protocol

from infra.ray.hosted import WorkerDied
from infra.ray.liveness import RayLost

logger = logging.getLogger("millrace.device")


class Phase(StrEnum):
    """What happens on the device."""

    GENERATING = "generating"
    FALLING_ASLEEP = "falling asleep"
    TAKING = "taking"
    TRAINING = "training"
    LEAVING = "leaving"
    FREE = "free"
    WAKING = "waking"


NEXT = {
    Phase.GENERATING: Phase.FALLING_ASLEEP,
    Phase.FALLING_ASLEEP: Phase.TAKING,
    Phase.TAKING: Phase.TRAINING,
    Phase.TRAINING: Phase.LEAVING,
    Phase.LEAVING: Phase.FREE,
    Phase.FREE: Phase.WAKING,
    Phase.WAKING: Phase.GENERATING,
}
"""The one way round. A fault changes who lives, never the order."""


class Process(Protocol):
    """A hosted worker."""

    async def call(self, method: str) -> Any:
        """Await a method over there."""

    def kill(self) -> None:
        """End the process at once: the driver gives its memory back."""


class SharedDevice:
    """The state machine of one session."""

    def __init__(self, trainer: Callable[[], Process | None], *, in_phases: bool, seconds: float) -> None:
        """`trainer` is the one there is now; None before it has been opened. A change may take `seconds`."""
        self.in_phases = in_phases
        self.phase = Phase.GENERATING
        self.seconds: dict[str, float] = {}
        """What each change took the last time."""
        self._trainer = trainer
        self._patience = seconds
        self._engines: dict[str, Process] = {}
        self._lock = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def starting(self, name: str, engine: Process) -> AsyncIterator[None]:
        """An engine starts inside, when the trainer is not on the device; from then on it takes part."""
        if not self.in_phases:
            yield
            return
        async with self._lock:
            yield
            self._engines[name] = engine

    @contextlib.asynccontextmanager
    async def opening(self) -> AsyncIterator[None]:
        """A trainer opens inside: in the place of one that has died, or at the start, when engines sleep for it."""
        if not self.in_phases or self.phase is Phase.TRAINING:
            yield
            return
        try:
            async with self.training():
                yield
        finally:
            await self.generate()

    @contextlib.asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Inside, the trainer has the device to itself. `generate` comes after it."""
        if not self.in_phases:
            yield
            return
        async with self._lock:
            if self.phase is Phase.FREE:  # a step before this one came to nothing
                await self._change(Phase.WAKING, "wake", self._engines)
                self._enter(Phase.GENERATING)
            try:
                await self._change(Phase.FALLING_ASLEEP, "sleep", self._engines)
                await self._change(Phase.TAKING, "take_device", self._trainers())
                self._enter(Phase.TRAINING)
                yield
            finally:
                while self.phase is not Phase.TRAINING:  # cancelled on the way: the device is free by now
                    self._enter(NEXT[self.phase])
                await self._change(Phase.LEAVING, "leave_device", self._trainers())
                self._enter(Phase.FREE)

    async def generate(self) -> None:
        """Wake the engines that no new policy has woken: they serve the policy of before."""
        if self.phase is not Phase.FREE:
            return
        async with self._lock:
            await self._change(Phase.WAKING, "wake", self._engines)
            self._enter(Phase.GENERATING)

    def _trainers(self) -> dict[str, Process]:
        trainer = self._trainer()
        return {} if trainer is None else {"the trainer": trainer}

    def _enter(self, phase: Phase) -> None:
        assert NEXT[self.phase] is phase, f"from {self.phase} to {phase}"
        self.phase = phase

    async def _change(self, phase: Phase, method: str, processes: dict[str, Process]) -> None:
        """Enter a phase in which these processes do something. Those that do not are killed and left out."""
        self._enter(phase)
        started = time.perf_counter()
        outcomes = await asyncio.gather(
            *(self._one(method, name, process) for name, process in list(processes.items())), return_exceptions=True
        )
        self.seconds[method] = time.perf_counter() - started
        for name, outcome in zip(list(processes), outcomes, strict=True):
            if outcome is not None:
                processes.pop(name)
        if lost := next((each for each in outcomes if isinstance(each, RayLost | asyncio.CancelledError)), None):
            raise lost

    async def _one(self, method: str, name: str, process: Process) -> None:
        """Raises after the process has ended."""
        try:
            async with asyncio.timeout(self._patience):
                await process.call(method)
        except (WorkerDied, RayLost):
            raise
        except Exception as error:
            why = f"no answer for {self._patience:g} s" if isinstance(error, TimeoutError) else str(error)
            logger.warning("%s did not %s (%s): it is ended, another takes its place", name, _WORDS[method], why)
            process.kill()
            raise


_WORDS = {
    "sleep": "give the GPU's memory back",
    "wake": "wake up",
    "take_device": "come to the GPU",
    "leave_device": "leave the GPU",
}
