"""Groups that begin ahead of the next policy: their first requests wait in the engine until it is there.

    all that may be sampled is in the log ─▶ begin: the engine holds requests, groups start ─▶ the policy: release
                                                └─ it takes too long, or the engine is needed ─▶ call_back

At `max_staleness = 0` the engine would idle from the last group of a batch until the first prompt of the next one is
rendered and queued. This is done while the trainer computes, when its step is short.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Mapping

from rollouts.engines.served_policy import ServedPolicy
from rollouts.production.executor import Executor
from rollouts.production.leases import Leases
from settings.run_file import RunConfig
from storage.log.run_log import RunLog

SHARE, PATIENCE = 0.01, 0.1
"""Shares of `rollout.attempt_timeout`, because the clocks of attempts run: groups begin ahead of a policy that should
take no longer than the first to make, and are called back when it has taken the second."""


def is_short(metrics: Mapping[str, float], num_steps: int, *, attempt_timeout: float) -> bool:
    """True if groups may begin ahead of the policy that `num_steps` steps like this one make."""
    seconds = sum(metrics.get(f"{phase}_seconds", math.inf) for phase in ("load", "train", "save"))
    return num_steps * seconds <= SHARE * attempt_timeout


@dataclasses.dataclass(kw_only=True, eq=False)
class HeadStart:
    """The head start of one worker."""

    log: RunLog
    config: RunConfig
    served: ServedPolicy
    leases: Leases
    executor: Executor
    version: int | None = dataclasses.field(default=None, init=False)
    """The policy that its groups wait for; None when the engine holds nothing."""
    _over: asyncio.Event = dataclasses.field(default_factory=asyncio.Event, init=False)

    @property
    def next_version(self) -> int:
        """The policy that answers the next request."""
        return self.served.version if self.version is None else self.version

    async def begin(self) -> bool:
        """Let the engine hold requests for the next policy, if that is soon there and nothing else can be done."""
        steps, timeout = self.log.state.steps, self.config.rollout.attempt_timeout
        num_steps = self.config.train.steps_per_update
        pin = self.served.pin
        if (
            self.config.engine.share == "phases"
            or pin.locked()
            or not (steps and is_short(steps[-1].metrics, num_steps, attempt_timeout=timeout))
        ):
            return False
        async with pin:
            if not self.executor.waits_for_policy:
                return False
            # First: a caller that needs the engine meanwhile calls back.
            self.version = self.served.version + num_steps
            self._over.clear()
            await self.served.engine.hold()
        return True

    async def is_over_in_time(self) -> bool:
        """Wait until the policy is there or the groups were called back; False when it takes too long."""
        try:
            async with asyncio.timeout(PATIENCE * self.config.rollout.attempt_timeout):
                await self._over.wait()
        except TimeoutError:
            return False
        return True

    def end(self) -> bool:
        """The engine serves what was waited for, or holds nothing any more. True if it held anything."""
        held, self.version = self.version is not None, None
        self._over.set()
        return held

    async def call_back(self) -> None:
        """Let groups that began ahead wait for their turn again: the engine is needed. The caller holds the log."""
        if self.version is None:
            return
        await self.executor.call_back()
        released = self.served.engine.release()
        self.end()
        self.leases.rebase(self.served.version)
        self.executor.admit()
        await released
