"""Prompts for one rollout worker: leased in the run's log before they start, so that no other worker has them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from rollouts.production.prompts import Prompt, PromptOrder
from rollouts.production.quota import Quota
from settings.run_file import RunConfig
from storage.log.claims import num_committed, num_needed
from storage.log.entries import Lease
from storage.log.producers import Presence
from storage.log.run_log import RunLog
from storage.log.run_state import Conflict


@dataclass(kw_only=True, eq=False)
class Leases:
    """The leases of one worker."""

    log: RunLog
    lock: asyncio.Lock
    """Held while the log is read or written."""
    config: RunConfig
    presence: Presence
    prompts: PromptOrder

    def __post_init__(self) -> None:
        self.quota = Quota(self.config)

    async def take(self) -> list[Prompt]:
        """Lease what the quota wants, after a look at the log."""
        async with self.lock:
            while True:
                await asyncio.to_thread(self.log.refresh)
                self.rebase(self.quota.version)
                state, num_wanted = self.log.state, self.quota.wanted
                if not num_wanted:
                    return []
                if self.presence.holder not in state.producers:  # given up for dead, and alive after all
                    await self.presence.join()
                    continue
                positions = state.free_positions(num_wanted)
                lease = Lease(holder=self.presence.holder, positions=positions, number=state.num_leases)
                try:
                    await asyncio.to_thread(self.log.append, lease)
                except Conflict:
                    continue  # another worker was first
                return [self.prompts.at(position, retry=state.retries[position]) for position in positions]

    def rebase(self, version: int) -> None:
        """Tell the quota what the log counts, and which policy answers next."""
        state = self.log.state
        self.quota.rebase(
            version=version,
            committed=num_committed(state, self.config),
            elsewhere=sum(holder != self.presence.holder for holder in state.leased.values()),
            num_producers=len(state.producers.keys() | {self.presence.holder}),
            total=num_needed(state, self.config),
            paused=bool(state.paused),
        )
