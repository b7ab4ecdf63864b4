"""Runs many prompt groups at once and stops exactly where the staleness formula says.

    lease ─▶ ready prompts ─▶ admit (capacity) ─▶ Player.group ─▶ RolloutGroup ─▶ prepare_batch() ─▶ a shard
               ▲                    ▲                  │ rejected: stored too, its room comes back
               │                    └──────────────────┤
               └── came to nothing: the same prompt again, `retries` times ◀──┘

Who waits for whom: `prepare_batch` waits for groups to finish and keeps admitting while it waits; admission waits
for `set_version` (a newer policy, or a look at the log) when the formula says so. Which prompts are free is for the
log to say: `lease` is the worker's, and asks it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from rollouts.production.admission import capacity, should_wait, stragglers
from rollouts.production.attempts import Player
from rollouts.production.prompts import Prompt
from storage.records import RolloutGroup, Sampling, Trajectory

LEASE_SHARE = 8
"""The lease of a worker alone is for at least this part of a batch: a filter that rejects much must not cost a log
entry per group."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What bounds the executor; see `settings/rollout.py` and `settings/train.py` for each."""

    n_samples: int
    batch_size: int
    max_staleness: float
    steps_per_update: int
    dynamic_batch: bool
    total_groups: int
    """Groups the whole run needs: steps × batch_size."""
    max_concurrent: int
    min_usable: int
    retries: int
    cancel_stale: bool
    """Give up running groups that no step could train any more."""
    shard_bytes: int
    shard_seconds: float
    num_producers: int = 1
    """How many workers lease prompts of this run."""


@dataclasses.dataclass(kw_only=True)
class _Running:
    prompt: Prompt
    version: int
    """Served when the group started: none of its tokens is older."""
    started: float
    given_up: str = ""


class Executor:
    """Produces groups for one run. One per rollout worker; lives in one event loop.

    `lease` returns prompts that are this executor's to start, about `wanted` many; it may call `set_version`.
    """

    def __init__(
        self,
        *,
        player: Player,
        lease: Callable[[], Awaitable[Sequence[Prompt]]],
        limits: Limits,
        sampling: Sampling,
    ) -> None:
        self._player = player
        self._lease = lease
        self._limits = limits
        self._sampling = sampling
        self._version = 0
        self._committed = 0
        self._accepted = 0
        self._ready: deque[Prompt] = deque()
        self._called_back: list[Prompt] = []
        self._leasing: asyncio.Task[None] | None = None
        self._running: dict[asyncio.Task[RolloutGroup], _Running] = {}
        self._finished: list[RolloutGroup] = []
        self._finished_bytes = 0
        self._oldest_finished = 0.0
        self._handed_out = 0
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._last_error = ""
        self.paused = False
        """True while nothing new is to start."""
        self.num_finished = 0
        """Groups so far: what a watchdog takes for progress."""

    def set_version(self, version: int, *, accepted: int, elsewhere: int = 0, limits: Limits | None = None) -> None:
        """Policy `version` answers what starts from here on: re-base the admission formula on what the log holds.

        `accepted` is steps · batch_size + committed pending groups, and `elsewhere` what other workers have leased;
        groups finished here and not yet committed are added. `limits` replace those before, as workers come and go.
        """
        if version > self._version:
            self._ready.extendleft(reversed(self._called_back))
            self._called_back.clear()
        self._version = version
        self._limits = limits or self._limits
        self._committed = accepted
        self._accepted = accepted + elsewhere + self._handed_out + self._counted(self._finished)
        if self._limits.cancel_stale:
            self._give_up_stale()
        self._admit()
        self._changed.set()

    @property
    def room(self) -> int:
        """Groups that may start now."""
        if self.paused:
            return 0
        running = len(self._running)
        by_staleness = self._capacity(self._version, running=running, accepted=self._accepted)
        return min(by_staleness, self._limits.total_groups - self._accepted - running)

    def used_up(self, version: int, accepted: int) -> bool:
        """Whether so many accepted groups are all that may be sampled before there is a newer policy than `version`."""
        return self._capacity(version, running=0, accepted=accepted) <= 0

    @property
    def waits_for_policy(self) -> bool:
        """True where all that may be sampled before the next policy is in the log, and there is more to do then."""
        return (
            self._is_idle
            and not (self.paused or self._finished or self._handed_out)
            and self._accepted < self._limits.total_groups
            and self.used_up(self._version, self._committed)
        )

    async def call_back(self) -> None:
        """Cancel what is running, as if it had not started: its prompts are the first to start under a newer policy."""
        running = dict(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._called_back += [each.prompt for task, each in running.items() if task.cancelled() and not each.given_up]

    @property
    def wanted(self) -> int:
        """Prompts to lease now."""
        missing = self.room - len(self._ready)
        # Among several, leases beyond the room would take it from each other until nobody may start anything.
        surplus = self._limits.batch_size // LEASE_SHARE if self._limits.num_producers == 1 else 0
        return max(missing, surplus) if missing > 0 else 0

    def in_flight(self) -> list[int]:
        """The policy version each running group started under."""
        return [running.version for running in self._running.values()]

    @property
    def has_work(self) -> bool:
        """Whether there is something to collect or room to start something."""
        return not self._is_idle or bool(self._finished) or self.room > 0 or self._failure is not None

    async def wait_for_change(self) -> None:
        """Return when a group has finished or `set_version` was called."""
        self._changed.clear()
        await self._changed.wait()

    async def wait_for_stragglers(self, version: int) -> bool:
        """Wait for running groups that policy `version` + 1 would push over the bound, while the engine stays busy.

        True when groups of that kind have finished and are to be handed out.
        """
        limits = self._limits
        while self._failure is None and should_wait(
            self.in_flight(),
            version=version,
            running=len(self._running),
            max_concurrent=limits.max_concurrent,
            max_staleness=limits.max_staleness,
            steps_per_update=limits.steps_per_update,
        ):
            await self.wait_for_change()
        heads = [
            min(turn.weight_versions[0] for t in group.usable for turn in t.turns if turn.sampled_ids)
            for group in self._finished
            if group.accepted
        ]
        late = stragglers(
            heads, version=version, max_staleness=limits.max_staleness, steps_per_update=limits.steps_per_update
        )
        return late > 0

    async def prepare_batch(self) -> list[RolloutGroup]:
        """Finished groups for one shard; keeps submitting while it waits.

        Returns when they are what the next step misses, or this worker's share of it, when a batch of groups,
        `shard_bytes`, or `shard_seconds` is reached, the policy version changes with groups at hand, or nothing more
        can run before the next version. A filter that rejects everything cannot hold it up: of a batch, rejected groups
        count. Raises what a workflow's programming error raised.
        """
        version = self._version
        self._admit()
        while not self._flush_due(version):
            self._changed.clear()
            timeout = None
            if self._finished:
                timeout = max(0.0, self._oldest_finished + self._limits.shard_seconds - _now())
            try:
                async with asyncio.timeout(timeout):
                    await self._changed.wait()
            except TimeoutError:
                continue  # shard_seconds have passed; _flush_due says so now
            self._admit()
        if self._failure is not None:
            raise self._failure
        return self.hand_out()

    def hand_out(self) -> list[RolloutGroup]:
        """What has finished by now; tell `mark_committed` when it is in the log, or was dropped."""
        ready, self._finished, self._finished_bytes = self._finished, [], 0
        self._handed_out += self._counted(ready)
        return ready

    def mark_committed(self, groups: Sequence[RolloutGroup]) -> None:
        """These groups, handed out before, are counted by the log from now on."""
        counted = self._counted(groups)
        self._handed_out -= counted
        self._committed += counted

    async def rollout_batch(self, prompts: Sequence[Prompt]) -> list[RolloutGroup]:
        """Attempt these prompts once and return every group, whatever a filter says of it. For debugging."""
        gate = asyncio.Semaphore(self._limits.max_concurrent)

        async def one(prompt: Prompt) -> RolloutGroup:
            async with gate:
                return await self._play(prompt)

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))

    async def close(self) -> list[RolloutGroup]:
        """Cancel what is running, whose prompts are asked again some day; returns what has finished meanwhile."""
        self._ready.clear()
        running = [*self._running, *([self._leasing] if self._leasing else [])]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        return self.hand_out()

    def report(self) -> str:
        """A few words on where the executor stands."""
        accepted = sum(group.accepted for group in self._finished)
        sentence = (
            f"policy {self._version}: {accepted} of {self._limits.batch_size} accepted and not committed, "
            f"{len(self._finished) - accepted} rejected, {len(self._running)} running, room for {self.room} more"
        )
        if self._running:
            oldest = min(self._running.values(), key=lambda running: running.started)
            seconds = _now() - oldest.started
            sentence += f"; oldest {oldest.prompt.group_id} for {seconds:.0f} s, since policy {oldest.version}"
        return f"{sentence}; last error: {self._last_error}" if self._last_error else sentence

    def _capacity(self, version: int, *, running: int, accepted: int) -> int:
        limits = self._limits
        return capacity(
            max_concurrent=limits.max_concurrent,
            running=running,
            max_staleness=limits.max_staleness,
            version=version,
            batch_size=limits.batch_size,
            accepted=accepted,
            steps_per_update=limits.steps_per_update,
        )

    @property
    def _is_idle(self) -> bool:
        return not (self._running or self._leasing)  # what is ready waits for room, as those do that are not leased

    def _counted(self, groups: Sequence[RolloutGroup]) -> int:
        """How many of them use up capacity: a rejected one gives it back, unless a step takes attempts as they come."""
        if self._limits.dynamic_batch:
            return sum(not group.will_retry for group in groups)
        return sum(group.accepted for group in groups)

    def _flush_due(self, version: int) -> bool:
        if self._failure is not None:
            return True
        is_over = self._is_idle and self.room <= 0
        if not self._finished:
            return is_over
        limits = self._limits
        # The trainer waits for whole batches: the end of one must not wait here for the beginning of the next.
        missing = limits.batch_size - (self._committed + self._handed_out) % limits.batch_size
        return (
            len(self._finished) >= limits.batch_size
            or self._counted(self._finished) >= math.ceil(missing / limits.num_producers)
            or self._finished_bytes >= limits.shard_bytes
            or _now() - self._oldest_finished >= limits.shard_seconds
            or version != self._version
            or is_over
        )

    def _admit(self) -> None:
        if self._failure is not None:
            return
        while self._ready and self.room > 0:
            prompt = self._ready.popleft()
            task = asyncio.create_task(self._play(prompt))
            self._running[task] = _Running(prompt=prompt, version=self._version, started=_now())
            task.add_done_callback(self._end)
        if self.wanted and self._leasing is None:
            self._leasing = asyncio.create_task(self._lease_more())

    async def _lease_more(self) -> None:
        try:
            self._ready.extend(await self._lease())
        except Exception as error:  # noqa: BLE001 - whatever the log said: prepare_batch raises it to the caller
            self._failure = error
        finally:
            self._leasing = None
        if self._ready:
            self._admit()
        self._changed.set()

    def _end(self, task: asyncio.Task[RolloutGroup]) -> None:
        """Called when a group's task is over, also one that was cancelled before it began."""
        running = self._running.pop(task)
        if not task.cancelled():
            error = task.exception()
            if error is None:
                self._take(running.prompt, task.result())
            else:
                self._failure = error  # a bug in the workflow: prepare_batch raises it to the caller
        elif running.given_up:
            self._take(running.prompt, self._cancelled(running.prompt, running.given_up))
        self._changed.set()

    async def _play(self, prompt: Prompt) -> RolloutGroup:
        return await self._player.group(
            prompt.task,
            group_id=prompt.group_id,
            position=prompt.position,
            epoch=prompt.epoch,
            n_samples=self._limits.n_samples,
            sampling=self._sampling,
            is_eval=False,
        )

    def _take(self, prompt: Prompt, group: RolloutGroup) -> None:
        """A group has finished: count it, and let its prompt run again where it came to nothing."""
        came_to_nothing = not group.accepted and len(group.usable) < self._limits.min_usable
        if came_to_nothing and prompt.retry < self._limits.retries:
            group = dataclasses.replace(group, will_retry=True)
            self._ready.append(dataclasses.replace(prompt, retry=prompt.retry + 1))
        errors = [trajectory.error for trajectory in group.trajectories if trajectory.error]
        self._last_error = errors[-1] if errors else self._last_error
        if not self._finished:
            self._oldest_finished = _now()
        self._finished.append(group)
        self._finished_bytes += _num_bytes(group)
        self._accepted += self._counted([group])
        self.num_finished += 1

    def _give_up_stale(self) -> None:
        """No step can train a group that is over the bound by now: its room is better used."""
        updates, bound = self._version // self._limits.steps_per_update, math.ceil(self._limits.max_staleness)
        for task, running in self._running.items():
            lag = updates - running.version // self._limits.steps_per_update
            if lag > bound and not running.given_up:
                running.given_up = f"cancelled: {lag} updates behind, bound {bound}"
                task.cancel()

    def _cancelled(self, prompt: Prompt, reason: str) -> RolloutGroup:
        attempts = range(self._limits.n_samples)
        return RolloutGroup(
            id=prompt.group_id,
            task=prompt.task,
            position=prompt.position,
            epoch=prompt.epoch,
            expected=self._limits.n_samples,
            trajectories=[
                Trajectory(attempt=attempt, turns=[], messages=[], status="cancelled", reward=None, error=reason)
                for attempt in attempts
            ],
            accepted=False,
            reject_reason=reason,
        )


def _num_bytes(group: RolloutGroup) -> int:
    """What its tokens take in a shard: int32 id, float32 logprob, int32 version and bool mask of each."""
    turns = [turn for trajectory in group.trajectories for turn in trajectory.turns]
    return 13 * sum(len(turn.context_ids) + len(turn.sampled_ids) for turn in turns)


def _now() -> float:
    """The loop's clock, which a simulation may drive."""
    return asyncio.get_running_loop().time()
