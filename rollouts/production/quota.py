"""How many prompt groups one rollout worker may start: its policy version, its limits and its counts in one object.

    lease ─▶ waiting ─▶ start ─▶ running ─▶ end ─▶ finished ─▶ hand_out ─▶ handed_out ─▶ commit ─▶ committed
                                               └─ rejected: not counted, its room comes back

In: what happens to groups, and what the log counts. Out: `room` and `wanted`. There is no clock and no I/O in here.
The formula and its worked values are AReaL's (https://arxiv.org/abs/2505.24298, section 5.1), in weight updates. All of
this only paces production: the staleness bound itself is enforced at the claim, per token (`storage/log/claims.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from settings.run_file import RunConfig
from storage.log.claims import num_allowed, smallest_part, streams

LEASE_SHARE = 8
"""The lease of a worker alone is for at least this part of a batch: a filter that rejects much must not cost a log
entry per group."""
BUSY = 0.8
"""Share of `max_concurrent` that must be running for a claim to wait. With heavy-tailed durations, waiting on for less
costs more steps than it saves groups: see benchmarks/staleness.py."""


class Quota:
    """The quota of one worker. All counts are of groups."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.version = 0
        """The policy that answers what starts from here on."""
        self.paused = False
        """True while nothing new is to start."""
        self.committed = 0
        """Steps · batch_size + pending groups of the log that a step may still train."""
        self.elsewhere = 0
        """Leased by other workers."""
        self.num_producers = 1
        """Workers that lease prompts of this run."""
        self.total = config.steps * config.batch_size
        """What the whole run needs."""
        self.waiting = self.running = self.finished = self.handed_out = 0
        """As in the picture above; the last two are those that count."""

    # ── What happens ────────────────────────────────────────────────────────────────────────────────────────────────

    def rebase(
        self,
        *,
        version: int,
        committed: int,
        elsewhere: int = 0,
        num_producers: int = 1,
        total: int | None = None,
        paused: bool = False,
    ) -> None:
        """Take over what the log says; what happened here and is not in the log yet stays counted."""
        self.version, self.paused = version, paused
        self.committed, self.elsewhere, self.num_producers = committed, elsewhere, num_producers
        self.total = self.total if total is None else total

    def lease(self, count: int) -> None:
        """Prompts are this worker's to start, also those that come back."""
        self.waiting += count

    def start(self) -> None:
        self.waiting -= 1
        self.running += 1

    def end(self, *, counted: int) -> None:
        """A running group has finished, or was called back and is not counted; so many finished groups are counted."""
        self.running -= 1
        self.finished += counted

    def hand_out(self) -> None:
        self.handed_out, self.finished = self.handed_out + self.finished, 0

    def commit(self, count: int) -> None:
        """The log counts `count` of the groups handed out from now on, or they were dropped."""
        self.handed_out -= count
        self.committed += count

    # ── What follows ────────────────────────────────────────────────────────────────────────────────────────────────

    def counts(self, *, accepted: bool, will_retry: bool) -> bool:
        """True if a finished group uses up room: a rejected one gives it back, unless a step takes attempts as they
        come (`rollout.dynamic_batch`)."""
        return not will_retry if self._config.rollout.dynamic_batch else accepted

    @property
    def accepted(self) -> int:
        """All that counts against the staleness room, but what runs here."""
        return self.committed + self.elsewhere + self.handed_out + self.finished

    @property
    def room(self) -> int:
        """Groups that may start now; negative when there are more than may be.

        concurrency room = max_concurrent − running; among several workers, no more than a fair share of what may be in
        flight at all, so that the first to ask does not take everything
        staleness room   = num_allowed(version) − (accepted + running)

        max_staleness = 0 is synchronous training.
        """
        if self.paused:
            return 0
        used = self.accepted + self.running
        return min(
            self._max_concurrent - self.running, num_allowed(self.version, self._config) - used, self.total - used
        )

    @property
    def wanted(self) -> int:
        """Prompts to lease now."""
        missing = self.room - self.waiting
        # Among several workers, leases beyond the room would take it from each other until none may start anything.
        surplus = self._config.batch_size // LEASE_SHARE if self.num_producers == 1 else 0
        return max(missing, surplus) if missing > 0 else 0

    def used_up(self, version: int) -> bool:
        """True if the log holds all groups that may be sampled before there is a newer policy than `version`."""
        return num_allowed(version, self._config) <= self.committed

    @property
    def waits_for_policy(self) -> bool:
        """True if all that may be sampled before the next policy is in the log, and there is more to do then."""
        idle = not (self.paused or self.running or self.finished or self.handed_out)
        return idle and self.accepted < self.total and self.used_up(self.version)

    @property
    def is_batch(self) -> bool:
        """True if what has finished is what the next step misses, or this worker's share of it; or a part that the
        trainer can begin with."""
        missing = self._config.batch_size - (self.committed + self.handed_out) % self._config.batch_size
        if streams(self._config):
            missing = min(missing, smallest_part(self._config))
        return self.finished >= math.ceil(missing / self.num_producers)

    def lag(self, version: int) -> int:
        """Weight updates between the policy that a group started under and the one that answers now."""
        return self._update(self.version) - self._update(version)

    def is_lost(self, version: int) -> bool:
        """True if no step can train a group that started under `version`."""
        return self._config.train.stale_policy == "strict" and self.lag(version) > self._bound

    def stragglers(self, heads: Sequence[int], version: int) -> int:
        """How many groups policy `version` + 1 pushes over the bound: within it now, over it then.

        `heads` are the versions under which the groups started that no claim can take yet.
        """
        now, then = self._update(version), self._update(version + 1)
        return sum(now - self._update(head) <= self._bound < then - self._update(head) for head in heads)

    def should_wait(self, heads: Sequence[int], version: int) -> bool:
        """True if a claim at `version` waits for the groups that the next version would push over the bound.

        Only as long as the engine is busy: otherwise it would idle for one long group, and so would the trainer.
        """
        return self.stragglers(heads, version) > 0 and self.running >= BUSY * self._max_concurrent

    def _update(self, version: int) -> int:
        return version // self._config.train.steps_per_update

    @property
    def _bound(self) -> int:
        return math.ceil(self._config.max_staleness)

    @property
    def _max_concurrent(self) -> int:
        most = self._config.rollout.max_concurrent
        if self.num_producers == 1:
            return most
        in_flight = (1 + self._config.max_staleness) * self._config.train.steps_per_update * self._config.batch_size
        return min(most, math.ceil(in_flight / self.num_producers))
