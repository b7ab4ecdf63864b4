"""Runs many attempts at once, groups them, and stops exactly where the staleness formula says.

    PromptStream ─▶ admit (capacity) ─▶ n attempts ─▶ RolloutGroup ─▶ accepted? ─▶ prepare_batch()
         ▲                                                               │ no: stored too, its room given back
         └───────────────── given back when a group is abandoned ◀───────┘

Who waits for whom: `prepare_batch` waits for groups to finish and keeps admitting while it waits; admission waits
for `set_version` (a newer policy) when the formula says so. Grouping belongs here: a workflow plays one attempt.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence

from rollouts.admission import capacity
from rollouts.attempts import Player
from rollouts.prompts import PromptStream
from storage.records import RolloutGroup, RolloutTask, Sampling


class NothingAccepted(RuntimeError):
    """Every group of many in a row failed or was rejected; the message says how and shows the last error."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What bounds the executor; see `rollouts/config.py` for each."""

    n_samples: int
    batch_size: int
    max_staleness: float
    total_groups: int
    """Accepted groups the whole run needs: steps × batch_size."""
    max_concurrent: int
    max_attempts: int
    shard_bytes: int
    shard_seconds: float


class Executor:
    """Produces groups for one run. One per rollout worker; lives in one event loop."""

    def __init__(
        self,
        *,
        player: Player,
        prompts: PromptStream,
        limits: Limits,
        sampling: Sampling,
    ) -> None:
        self._player = player
        self._prompts = prompts
        self._limits = limits
        self._sampling = sampling
        self._version = 0
        self._accepted = 0
        self._retries: dict[int, int] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._finished: list[RolloutGroup] = []
        self._oldest_finished = 0.0
        self._handed_out = 0
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._in_a_row = 0
        self._last_error = ""

    def set_version(self, version: int, *, accepted: int, retries: dict[int, int]) -> None:
        """A policy is live: re-base the admission formula on what the log holds.

        `accepted` is version · batch_size + committed pending groups; groups finished here and not yet committed
        are added. `retries` counts, per position, groups lost to a damaged shard: those positions run again.
        """
        self._version = version
        self._accepted = accepted + self._handed_out + sum(group.accepted for group in self._finished)
        for position, count in retries.items():
            if self._retries.get(position, 0) < count:
                self._retries[position] = count
                self._prompts.give_back(position)
        self._admit()
        self._changed.set()

    @property
    def room(self) -> int:
        """Groups that may start now."""
        limits = self._limits
        running = len(self._running)
        by_staleness = capacity(
            max_concurrent=limits.max_concurrent,
            running=running,
            max_staleness=limits.max_staleness,
            version=self._version,
            batch_size=limits.batch_size,
            accepted=self._accepted,
        )
        return min(by_staleness, limits.total_groups - self._accepted - running)

    async def wait_for_work(self) -> None:
        """Return once there is something to collect or room to start something."""
        while not (self._running or self._finished or self.room > 0 or self._failure):
            self._changed.clear()
            await self._changed.wait()

    async def prepare_batch(self) -> list[RolloutGroup]:
        """Finished groups for one shard; keeps submitting while it waits.

        Returns when a batch of groups, `shard_bytes`, or `shard_seconds` is reached, the policy version changes
        with groups at hand, or nothing more can run before the next version. Raises what a workflow's programming
        error raised, and `NothingAccepted` instead of waiting for ever.
        """
        version = self._version
        self._admit()
        while not self._flush_due(version):
            self._changed.clear()
            timeout = None
            if self._finished:
                timeout = max(0.0, self._oldest_finished + self._limits.shard_seconds - time.monotonic())
            try:
                async with asyncio.timeout(timeout):
                    await self._changed.wait()
            except TimeoutError:
                continue  # shard_seconds have passed; _flush_due says so now
            self._admit()
        if self._failure is not None:
            raise self._failure
        ready, self._finished = self._finished, []
        self._handed_out = sum(group.accepted for group in ready)
        return ready

    def mark_committed(self) -> None:
        """The groups last handed out are in the log, where `set_version` will count them from now on."""
        self._handed_out = 0

    async def evaluate(
        self, tasks: Sequence[RolloutTask], *, version: int, n_samples: int, sampling: Sampling, position: int
    ) -> list[RolloutGroup]:
        """Attempt held-out tasks, at most `max_concurrent` at a time; admission and prompts are not touched.

        `version` is the policy version that is loaded, for the groups' names.
        """
        gate = asyncio.Semaphore(self._limits.max_concurrent)

        async def one(task: RolloutTask) -> RolloutGroup:
            async with gate:
                name = f"eval{version}.{task.id}"
                return await self._player.group(
                    task,
                    group_id=name,
                    position=position,
                    epoch=0,
                    n_samples=n_samples,
                    sampling=sampling,
                    is_eval=True,
                )

        return list(await asyncio.gather(*(one(task) for task in tasks)))

    async def close(self) -> None:
        """Cancel what is running; its prompts are not committed, so a resume asks them again."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def report(self) -> str:
        """One sentence on where the executor stands."""
        accepted = sum(group.accepted for group in self._finished)
        rejected = len(self._finished) - accepted
        sentence = (
            f"{accepted} of {self._limits.batch_size} accepted, {rejected} rejected, {len(self._running)} running, "
            f"{self._in_a_row} in a row without acceptance"
        )
        return f"{sentence}; last error: {self._last_error}" if self._last_error else sentence

    def _flush_due(self, version: int) -> bool:
        if self._failure is not None:
            return True
        if not self._finished:
            return not self._running and self.room <= 0
        limits = self._limits
        turns = [turn for group in self._finished for t in group.trajectories for turn in t.turns]
        size = sum(len(turn.context_ids) + len(turn.sampled_ids) for turn in turns)
        return (
            sum(group.accepted for group in self._finished) >= limits.batch_size
            or size * 13 >= limits.shard_bytes  # int32 id + float32 logprob + int32 version + bool mask
            or time.monotonic() - self._oldest_finished >= limits.shard_seconds
            or version != self._version
            or (not self._running and self.room <= 0)
        )

    def _admit(self) -> None:
        while self._failure is None and self.room > 0:
            position, epoch, task = self._prompts.next()
            running = asyncio.create_task(self._run_group(position, epoch, task))
            self._running.add(running)

    async def _run_group(self, position: int, epoch: int, task: RolloutTask) -> None:
        limits = self._limits
        retry = self._retries.get(position, 0)
        try:
            group = await self._player.group(
                task,
                group_id=f"{epoch}.{task.id}" + (f".retry{retry}" if retry else ""),
                position=position,
                epoch=epoch,
                n_samples=limits.n_samples,
                sampling=self._sampling,
                is_eval=False,
            )
            if not self._finished:
                self._oldest_finished = time.monotonic()
            self._finished.append(group)
            if not group.accepted:
                errors = [trajectory.error for trajectory in group.trajectories if trajectory.error]
                self._last_error = errors[-1] if errors else self._last_error
            self._accepted += group.accepted
            self._in_a_row = 0 if group.accepted else self._in_a_row + 1
            if self._in_a_row >= limits.max_attempts * limits.batch_size:
                self._failure = NothingAccepted(f"giving up: {self.report()}")
        except asyncio.CancelledError:
            self._prompts.give_back(position)
            raise
        except Exception as error:  # noqa: BLE001 - a bug in the workflow: prepare_batch raises it to the caller
            self._failure = error
        finally:
            task_now = asyncio.current_task()
            assert task_now is not None
            self._running.discard(task_now)
            self._changed.set()
