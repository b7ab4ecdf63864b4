"""Runs many prompt groups at once and stops exactly where the staleness formula says.

    lease ─▶ ready prompts ─▶ start (quota)   ─▶ Player.group ─▶ RolloutGroup ─▶ prepare_batch() ─▶ a shard
               ▲                    ▲                  │ rejected: stored too, its room comes back
               │                    └──────────────────┤
               └── came to nothing: the same prompt again, `retries` times ◀──┘

`prepare_batch` waits for groups to finish, and starts others meanwhile. A prompt without room in the quota waits for
`admit`, after a newer policy or a look at the log. The log decides, through `lease`, which prompts are free.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from rollouts.engines.draws import seed_of
from rollouts.production.attempts import Player, token_bytes
from rollouts.production.failures import FirstBatch
from rollouts.production.prompts import Prompt
from rollouts.production.quota import Quota
from settings.errors import in_one_line
from settings.run_file import RunConfig
from storage.records import RolloutGroup, Sampling, Trajectory


@dataclasses.dataclass(kw_only=True)
class _Running:
    prompt: Prompt
    version: int
    """Served when the group started: none of its tokens is older."""
    started: float
    given_up: str = ""


@dataclasses.dataclass(kw_only=True, eq=False)
class Executor:
    """Runs the groups of one rollout worker, in one event loop."""

    player: Player
    lease: Callable[[], Awaitable[Sequence[Prompt]]]
    """Returns prompts that are this executor's to start, about `quota.wanted` many; it may rebase the quota."""
    quota: Quota
    config: RunConfig

    def __post_init__(self) -> None:
        self.sampling = Sampling(**self.config.sampling.model_dump())
        self._version = self.quota.version
        self._ready: deque[Prompt] = deque()
        self._called_back: list[Prompt] = []
        self._called_back_under = 0
        """The policy that they had begun ahead of: they begin again with it, or with a newer one."""
        self._leasing: asyncio.Task[None] | None = None
        self._running: dict[asyncio.Task[RolloutGroup], _Running] = {}
        self._finished: list[RolloutGroup] = []
        self._finished_bytes = 0
        self._oldest_finished = 0.0
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self.is_closed = False
        self._last_error = ""
        self._first_batch = FirstBatch()
        self.num_finished = 0
        """Groups so far: what a watchdog takes for progress."""

    def admit(self) -> None:
        """Start what the quota, which has changed, leaves room for."""
        if self.quota.version >= self._called_back_under:
            self._ready.extendleft(reversed(self._called_back))
            self.quota.lease(len(self._called_back))
            self._called_back.clear()
        self._version = self.quota.version
        for task, running in self._running.items():  # a group that no step can train gives its room to another
            if self.quota.is_lost(running.version) and not running.given_up:
                lag, bound = self.quota.lag(running.version), math.ceil(self.config.max_staleness)
                running.given_up = f"cancelled: {lag} updates behind, bound {bound}"
                task.cancel()
        self._start_ready()
        self._changed.set()

    @property
    def waits_for_policy(self) -> bool:
        """True if all that may be sampled before the next policy is in the log, and there is more to do then."""
        return self._is_idle and not self._finished and self.quota.waits_for_policy

    async def call_back(self) -> None:
        """Cancel what is running, as if it had not started: its prompts are the first to start under a newer policy."""
        running = dict(self._running)
        self._called_back_under = max((each.version for each in running.values()), default=self._called_back_under)
        await _cancel(running)  # the policy may come meanwhile
        self._called_back += [each.prompt for task, each in running.items() if task.cancelled() and not each.given_up]

    def in_flight(self) -> list[int]:
        """The policy version each running group started under."""
        return [running.version for running in self._running.values()]

    @property
    def has_work(self) -> bool:
        """True if there is something to collect or room to start something."""
        return not self._is_idle or bool(self._finished) or self.quota.room > 0 or self._failure is not None

    async def wait_for_change(self) -> None:
        """Return when a group has finished or `admit` was called."""
        self._changed.clear()
        await self._changed.wait()

    async def wait_for_stragglers(self, version: int) -> bool:
        """Wait for running groups that policy `version` + 1 would push over the bound, while the engine stays busy.

        True when groups of that kind have finished and are to be handed out.
        """
        while self._failure is None and self.quota.should_wait(self.in_flight(), version):
            await self.wait_for_change()
        heads = [
            min(turn.weight_versions[0] for t in group.usable for turn in t.turns if turn.sampled_ids)
            for group in self._finished
            if group.accepted
        ]
        return self.quota.stragglers(heads, version) > 0

    async def prepare_batch(self) -> list[RolloutGroup]:
        """Finished groups for one shard; keeps starting others while it waits.

        Returns when they are what the next step misses, or this worker's share of it, when a batch of groups,
        `shard_bytes`, or `shard_seconds` is reached, the policy version changes with groups at hand, or nothing more
        can run before the next version. Rejected groups count in a batch, so a filter that rejects everything does not
        hold it up. Raises the error of a broken workflow.
        """
        version = self._version
        self._start_ready()
        while not self._flush_due(version):
            self._changed.clear()
            timeout = None
            if self._finished:
                timeout = max(0.0, self._oldest_finished + self.config.rollout.shard_seconds - _now())
            with contextlib.suppress(TimeoutError):  # shard_seconds have passed
                async with asyncio.timeout(timeout):
                    await self._changed.wait()
            self._start_ready()
        if self._failure is not None:
            raise self._failure
        return self.hand_out()

    def hand_out(self) -> list[RolloutGroup]:
        """What has finished by now; tell `mark_committed` when it is in the log, or was dropped."""
        ready, self._finished, self._finished_bytes = self._finished, [], 0
        self.quota.hand_out()
        return ready

    def mark_committed(self, groups: Sequence[RolloutGroup]) -> None:
        """These groups, handed out before, are counted by the log from now on."""
        self.quota.commit(sum(self._counts(group) for group in groups))

    async def close(self) -> list[RolloutGroup]:
        """Cancel what is running, whose prompts are free again later; returns what has finished by now.

        Nothing begins and nothing finishes any more, also for a caller that still waits for a batch: what cancellation
        does to an attempt is in no shard, and the next start goes on as after a kill.
        """
        self.is_closed = True
        await _cancel(self._running)
        if self._leasing is not None:  # a thread that writes a lease cannot be cancelled, and would write it too late
            await asyncio.wait([self._leasing])
        self._changed.set()
        return self.hand_out()

    def report(self) -> str:
        accepted = sum(group.accepted for group in self._finished)
        sentence = (
            f"policy {self._version}: {accepted} of {self.config.batch_size} accepted and not committed, "
            f"{len(self._finished) - accepted} rejected, {len(self._running)} running, room for {self.quota.room} more"
        )
        if self._running:
            oldest = min(self._running.values(), key=lambda running: running.started)
            seconds = _now() - oldest.started
            sentence += f"; oldest {oldest.prompt.group_id} for {seconds:.0f} s, since policy {oldest.version}"
        return f"{sentence}; last error: {self._last_error}" if self._last_error else sentence

    @property
    def _is_idle(self) -> bool:
        return not (self._running or self._leasing)  # what is ready waits for room, as those do that are not leased

    def _counts(self, group: RolloutGroup) -> bool:
        return self.quota.counts(accepted=group.accepted, will_retry=group.will_retry)

    def _flush_due(self, version: int) -> bool:
        if self._failure is not None or self.is_closed:
            return True
        is_over = self._is_idle and self.quota.room <= 0
        if not self._finished:
            return is_over
        return (
            len(self._finished) >= self.config.batch_size
            or self.quota.is_batch
            or self._finished_bytes >= self.config.rollout.shard_bytes
            or _now() - self._oldest_finished >= self.config.rollout.shard_seconds
            or version != self._version
            or is_over
        )

    def _start_ready(self) -> None:
        if self._failure is not None or self.is_closed:
            return
        while self._ready and self.quota.room > 0:
            prompt = self._ready.popleft()
            task = asyncio.create_task(self.play(prompt))
            self._running[task] = _Running(prompt=prompt, version=self._version, started=_now())
            self.quota.start()
            task.add_done_callback(self._end)
        if self.quota.wanted and self._leasing is None:
            self._leasing = asyncio.create_task(self._lease_more())

    async def _lease_more(self) -> None:
        try:
            prompts = await self.lease()
            self._ready.extend(prompts)
            self.quota.lease(len(prompts))
        except Exception as error:  # noqa: BLE001 - whatever the log said: prepare_batch raises it to the caller
            self._failure = error
        finally:
            self._leasing = None
        if self._ready:
            self._start_ready()
        self._changed.set()

    def _end(self, task: asyncio.Task[RolloutGroup]) -> None:
        """Called when a group's task is over, also one that was cancelled before it began."""
        running, passed = self._running.pop(task), []
        if not task.cancelled() and not self.is_closed:
            error = task.exception()
            if error is None:
                passed = self._take(running.prompt, task.result())
            else:
                self._failure = error  # a bug in the workflow: prepare_batch raises it to the caller
        elif running.given_up:
            passed = self._take(running.prompt, self._cancelled(running.prompt, running.given_up))
        self.quota.end(counted=sum(map(self._counts, passed)))
        self._changed.set()

    async def play(self, prompt: Prompt) -> RolloutGroup:
        """Attempt a prompt once; nothing is counted."""
        return await self.player.group(
            prompt.task,
            group_id=prompt.group_id,
            position=prompt.position,
            epoch=prompt.epoch,
            n_samples=self.config.n_samples,
            sampling=dataclasses.replace(self.sampling, seed=seed_of(self.config.seed, prompt.position, prompt.retry)),
            is_eval=False,
        )

    def _take(self, prompt: Prompt, group: RolloutGroup) -> list[RolloutGroup]:
        """A group has finished: let its prompt run again if it came to nothing. Returns what may be committed now."""
        came_to_nothing = not group.accepted and len(group.usable) < self.config.rollout.min_usable
        if came_to_nothing and prompt.retry < self.config.rollout.retries:
            group = dataclasses.replace(group, will_retry=True)
            # First, so that a place keeps its room until it has its outcome: which places a batch takes is no accident.
            self._ready.appendleft(dataclasses.replace(prompt, retry=prompt.retry + 1))
            self.quota.lease(1)
        errors = [trajectory.error for trajectory in group.trajectories if trajectory.error]
        self._last_error = in_one_line(errors[-1]) if errors else self._last_error
        self.num_finished += 1
        passed = self._first_batch.pass_on(group, is_over=self.quota.committed > 0)
        if passed and not self._finished:
            self._oldest_finished = _now()
        self._finished += passed
        self._finished_bytes += sum(map(token_bytes, passed))
        self._failure = self._first_batch.failure(self.config.batch_size) or self._failure
        return passed

    def _cancelled(self, prompt: Prompt, reason: str) -> RolloutGroup:
        trajectories = [
            Trajectory(attempt=attempt, turns=[], messages=[], status="cancelled", reward=None, error=reason)
            for attempt in range(self.config.n_samples)
        ]
        return RolloutGroup(
            id=prompt.group_id,
            task=prompt.task,
            position=prompt.position,
            epoch=prompt.epoch,
            expected=self.config.n_samples,
            trajectories=trajectories,
            accepted=False,
            reject_reason=reason,
        )


async def _cancel(tasks: Collection[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _now() -> float:
    """The loop's clock, which a simulation may drive."""
    return asyncio.get_running_loop().time()
