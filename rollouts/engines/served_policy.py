"""Which policy an engine serves, and how it comes by the next: read from the store, or broadcast by the trainer.

    Policy ─▶ folder (fetched, made whole, digest checked) ─▶ the engine swaps weights ─▶ version
                └── a damaged delta: what is served stays, within the staleness bound, and `overdue` is for later

In: policies of a run's log. Out: their folders, and what the engine says of each update.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from infra.weight_broadcast import Broadcast
from rollouts.engines.engine import Engine, EngineError, WeightUpdate
from storage.log.entries import Policy
from storage.log.run_log import RunLog
from storage.log.runs import find_policy
from storage.policies.policies import DamagedDelta, PolicyReader

logger = logging.getLogger("millrace.rollout")


@dataclass(kw_only=True, eq=False)
class ServedPolicy:
    """The policy of one engine. Call `first`, start an engine with it, and set `engine` and `version`."""

    log: RunLog
    log_lock: asyncio.Lock
    """Held while the log is read anew."""
    cache: Path
    most_behind: float
    """Versions that the engine may be behind the newest one while that one cannot be made."""
    engine: Engine = field(init=False)
    """Gets the updates."""
    version: int = field(default=0, init=False)
    """The policy version the engine serves."""
    pin: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Held while the engine must stay with this version, or sleeps."""
    is_asleep: bool = field(default=False, init=False)
    overdue: Policy | None = field(default=None, init=False)
    """The policy that should be served and could not be made; None if nothing is missing."""

    def __post_init__(self) -> None:
        self._reader = PolicyReader(self.log, self.cache)

    def first(self, version: int | None) -> tuple[Policy, Path]:
        """What to start an engine with, and its folder: a version of the run, the live one by default.

        If that is a damaged delta it is overdue, and its anchor is returned: the trainer, which starts at the same
        time, may put the weights back. Raises `InvalidInput` for a version the run does not have, or not any more.
        """
        policy = find_policy(self.log, version)
        try:
            return policy, self._reader.fetch(policy)
        except DamagedDelta as error:
            anchor = find_policy(self.log, policy.anchor)
            logger.warning("starting with policy %d instead of %d: %s", anchor.version, policy.version, error)
            self.overdue = policy
            return anchor, self._reader.fetch(anchor)

    def base(self) -> Path:
        """The folder of the base policy, which adapters are for."""
        return self._reader.fetch(find_policy(self.log, 0))

    async def publish(self, policy: Policy, *, wakes: bool = True) -> WeightUpdate | None:
        """Serve a policy from the next token on, read from the store. An engine that sleeps is woken; without `wakes`
        this waits until the driver does so.

        None if the engine serves a newer one. Also None if it is a damaged delta: it is overdue from now on, and the
        engine goes on with what it has. Raises `storage.policies.policies.DamagedDelta` if it may not,
        `storage.objects.digests.DigestMismatch` before touching the engine, and `EngineError` with the old version
        still serving.
        """
        await self._fold_in(policy)
        try:
            folder = await asyncio.to_thread(self._reader.fetch, policy)
        except DamagedDelta as error:
            if policy.version - self.version > self.most_behind:
                raise
            logger.warning("policy %d serves on instead of %d: %s", self.version, policy.version, error)
            self.overdue = policy
            return None
        async with self._pinned() if wakes else self.pin:
            if policy.version < self.version:
                await self.engine.wake()
                return None  # two were published at once, and the later one was here first
            self.overdue = None
            update = await self.engine.load_policy(folder, policy.version)
            self.version = policy.version
        return update

    async def receive(self, policy: Policy, broadcast: Broadcast) -> WeightUpdate | None:
        """`publish` by broadcast, and from the store if that fails."""
        await self._fold_in(policy)
        try:
            async with self._pinned():
                update = await self.engine.receive_policy(broadcast, functools.partial(self._reader.fetch, policy))
                self.overdue = None
                self.version = policy.version
        except EngineError as error:
            logger.warning("policy %d is read from the store, its broadcast failed: %s", policy.version, error)
            return await self.publish(policy)
        return update

    async def sleep(self) -> None:
        """Give the engine's memory back until a policy is published, or `wake`; an evaluation ends first, and the next
        one waits. Raises `EngineError` if the engine is awake as before."""
        if self.is_asleep:
            return
        await self.pin.acquire()
        try:
            await self.engine.sleep()
        except BaseException:
            self.pin.release()
            raise
        self.is_asleep = True

    async def wake(self) -> None:
        """Serve the policy of before, if the engine sleeps."""
        if self.is_asleep:
            async with self._pinned():
                await self.engine.wake()

    @contextlib.asynccontextmanager
    async def _pinned(self) -> AsyncIterator[None]:
        """`pin` is held inside. An engine that sleeps is awake afterwards, or of no use."""
        if not self.is_asleep:
            await self.pin.acquire()
        self.is_asleep = False
        try:
            yield
        finally:
            self.pin.release()

    async def load(self, version: int) -> None:
        """Serve any version of the run; for an engine that only evaluates, by a caller that holds `pin`.

        Raises `InvalidInput` for a version the run does not have, or not any more.
        """
        if version == self.version:
            return
        async with self.log_lock:
            await asyncio.to_thread(self.log.refresh)
        folder = await asyncio.to_thread(self._reader.fetch, find_policy(self.log, version))
        await self.engine.load_policy(folder, version)
        self.version = version

    async def _fold_in(self, policy: Policy) -> None:
        """Make sure that the log's fold has the policy, and with it the anchor of a delta."""
        if policy.version not in self.log.state.policies:
            async with self.log_lock:
                await asyncio.to_thread(self.log.refresh)
