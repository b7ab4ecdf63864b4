"""The rollout worker: an engine, an executor and the run's log in one process.

    collect():  executor ─▶ groups ─▶ shard file ─▶ log entry ─▶ Shard
    publish():  policy folder (digest checked) ─▶ engine swaps weights ─▶ admission re-based ─▶ engine checksum
    evaluate(): held-out tasks on the version that is loaded; a swap waits for it, training does not

A plain class: `infra/` may host it in another process, tests call it directly.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import math
import sys
import time
import uuid
from collections import Counter
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from infra.starting import Startable
from infra.user_code import load_object
from infra.weight_broadcast import Broadcast
from rollouts.chat.chat_tokens import ChatTokens
from rollouts.chat.tool_parsing import ToolParser
from rollouts.engines.engine import WeightUpdate
from rollouts.engines.served_policy import ServedPolicy
from rollouts.production.admission import AHEAD_PATIENCE, is_short
from rollouts.production.attempts import AttemptLimits, Player
from rollouts.production.engine_choice import make_engine
from rollouts.production.evaluation import evaluate_tasks
from rollouts.production.executor import Executor, Limits
from rollouts.production.prompts import Prompt, PromptOrder
from rollouts.production.shard_writer import ShardWriter
from rollouts.rewards.scoring import RewardPool
from rollouts.workflow import Workflow
from settings.engine import EngineSettings
from settings.reward import RewardSettings
from storage.log.claims import ClaimRules, num_counted
from storage.log.entries import Evaluation, Lease, Policy, Shard
from storage.log.producers import Presence
from storage.log.run_log import RunLog
from storage.log.run_state import Conflict
from storage.log.runs import open_run
from storage.objects.opening import open_store
from storage.records import RolloutGroup, Sampling

logger = logging.getLogger("millrace.rollout")


def waiting_tasks() -> list[str]:
    """One line per place at which asyncio tasks of this process wait, most crowded first."""
    places: Counter[str] = Counter()
    for task in asyncio.all_tasks():
        frames = [f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" for frame in task.get_stack(limit=4)]
        coroutine = task.get_coro()
        places[f"{getattr(coroutine, '__qualname__', coroutine)} at {' < '.join(frames) or 'its start'}"] += 1
    return [f"  {count} × {place}" for place, count in places.most_common(20)]


class RolloutWorker(Startable):
    """Produces committed shards for one run until it is closed. Call `start` first."""

    def __init__(
        self,
        *,
        store_uri: str,
        run_id: str,
        name: str,
        workflow: str,
        dataset: str | None,
        engine: EngineSettings,
        limits: Limits,
        rules: ClaimRules,
        sampling: Sampling,
        attempt_limits: AttemptLimits,
        reward: RewardSettings,
        seed: int,
        code_version: str,
        config_sha256: str,
        cache: str,
        lora_rank: int = 0,
        outside: bool = False,
        lease_timeout: float = 60.0,
    ) -> None:
        """`lora_rank` above 0: the policies are adapters of that rank, and the base model is policy 0.

        `outside`: the driver has not started this worker, which gives it several signs of life per `lease_timeout`.
        """
        self._store_uri = store_uri
        self._run_id = run_id
        self._name = name
        self._workflow_path = workflow
        self._dataset = dataset
        self._engine_settings = engine
        self._limits = limits
        self._rules = rules
        self._sampling = sampling
        self._attempt_limits = attempt_limits
        self._reward = reward
        self._seed = seed
        self._code_version = code_version
        self._config_sha256 = config_sha256
        self._cache = Path(cache)
        self._lora_rank = lora_rank
        self._outside = outside
        self._lease_timeout = lease_timeout
        self._log_lock = asyncio.Lock()
        self._has_started = False
        self._collected_at = 0.0  # Unix seconds: when the newest shard was complete, or the next was released

    async def start(self, version: int | None = None) -> str:
        """Load a policy version, the live one by default; returns the engine's weight checksum.

        Where that version is a damaged delta its anchor is loaded, see `ServedPolicy.first`, the checksum is empty, and
        `wait_for_work` tries again. Raises `ValueError` for a version the run does not have, or not any more.
        """
        self._log: RunLog = open_run(open_store(self._store_uri), self._run_id)
        self._presence = Presence(self._log, self._name, outside=self._outside, lease_timeout=self._lease_timeout)
        self._served = ServedPolicy(
            self._log,
            self._log_lock,
            cache=self._cache,
            most_behind=self._limits.max_staleness * self._limits.steps_per_update,
        )
        policy, folder = self._served.first(version)
        model = self._served.base() if self._lora_rank else folder
        self._workflow: Workflow = load_object(self._workflow_path)(self._dataset)
        self._engine = make_engine(  # before transformers is imported here: vLLM's core does so beside us
            self._engine_settings, model, seed=self._seed, version=policy.version, lora_rank=self._lora_rank
        )
        self._tokens = ChatTokens.load(model)
        self._shards = ShardWriter(
            log=self._log,
            producer=self._name,
            tokens=self._tokens,
            config_sha256=self._config_sha256,
            code_version=self._code_version,
        )
        checksum = await self._engine.start(folder, policy.version)
        self._served.serve(self._engine, policy.version)
        self._rewards = RewardPool(
            num_processes=self._reward.processes,
            timeout=self._reward.timeout,
            on_timeout=self._reward.on_timeout,
            memory_gb=self._reward.memory_gb,
        )
        await self._rewards.start()
        self._player = Player(
            workflow=self._workflow,
            engine=self._engine,
            tokens=self._tokens,
            rewards=self._rewards,
            limits=self._attempt_limits,
            max_model_len=self._engine_settings.max_model_len,
            tool_parser=ToolParser(self._engine_settings.tool_parser, self._tokens.tokenizer),
            shaping=self._reward,
        )
        self._prompts = PromptOrder(self._workflow.tasks("train"), seed=self._seed)
        self._executor = Executor(
            player=self._player,
            lease=self._lease,
            limits=self._limits,
            sampling=self._sampling,
        )
        self._has_started = True
        return "" if self._served.overdue else checksum

    async def join(self) -> None:
        """Take part in the run: the prompts in flight are divided among those who do."""
        async with self._log_lock:
            await self._presence.join()

    async def refresh(self) -> None:
        """Look at the log again: let prompts start that it now leaves room for."""
        async with self._log_lock:
            await asyncio.to_thread(self._log.refresh)
            if self._log.state.paused or not self._executor.used_up(self._served.version, self._num_accepted()):
                await self._call_back()
            self._rebase()

    async def wait_for_work(self) -> None:
        """Return once `collect` would have something to do; what `publish` could not load is tried again first. Where
        the next policy is soon there its groups begin meanwhile."""
        if self._served.overdue is not None:
            await self.publish(self._served.overdue)
        may_begin = True
        while not self._executor.has_work:
            if not (may_begin and await self._begin_ahead()):
                await self._executor.wait_for_change()
            elif not await self._served.released_within(AHEAD_PATIENCE * self._attempt_limits.attempt_timeout):
                may_begin = False
                async with self._log_lock:
                    await self._call_back()

    async def _begin_ahead(self) -> bool:
        """Start the groups of the next policy while it is made, if that is short: the engine holds them back for it."""
        steps, served, timeout = self._log.state.steps, self._served, self._attempt_limits.attempt_timeout
        num_steps = self._limits.steps_per_update
        if served.pin.locked() or not (steps and is_short(steps[-1].metrics, num_steps, attempt_timeout=timeout)):
            return False
        async with served.pin:
            if not self._executor.waits_for_policy:
                return False
            await served.hold_for(served.version + num_steps)
        await self.refresh()
        return True

    async def _call_back(self) -> None:
        """Let groups that were started ahead wait for their turn again: the engine is needed. Holding the lock."""
        if self._served.holds:
            await self._executor.call_back()
            released = self._served.release()
            self._rebase()
            await released

    async def wait_for_stragglers(self, version: int) -> None:
        """See `Executor.wait_for_stragglers`; what has finished is committed."""
        if await self._executor.wait_for_stragglers(version):
            await self._commit_groups(self._executor.hand_out(), seconds=0.0)

    def progress(self) -> int:
        """Groups finished so far."""
        return self._executor.num_finished

    def report(self) -> str:
        """Where this worker stands, and where each of its asyncio tasks waits."""
        held = f"the engine serves policy {self._served.version}, and keeps requests for the next" * self._served.holds
        return "\n".join([self._executor.report(), *([held] if held else []), *waiting_tasks()])

    async def collect(self) -> Shard | None:
        """Produce and commit the next shard; null when nothing more can run before the next policy."""
        started = time.time()
        groups = await self._executor.prepare_batch()
        # Attempts begin where there is room for them, not with this call, which gets its turn after hundreds of them.
        begun = min((group.queued_at for group in groups), default=started)
        started = max(min(started, begun), self._collected_at)
        self._collected_at = time.time()
        return await self._commit_groups(groups, seconds=self._collected_at - started)

    async def _commit_groups(self, groups: list[RolloutGroup], *, seconds: float) -> Shard | None:
        """Null when there are none, or others have committed all of these prompts."""
        shard, prepared = None, groups
        async with self._log_lock:
            while groups and shard is None:
                shard_id = f"{self._log.state.step:06d}-{self._name}-{uuid.uuid4().hex[:8]}"
                try:
                    shard = await asyncio.to_thread(
                        self._shards.write, shard_id, groups, sampling=self._sampling, wall_seconds=seconds
                    )
                except Conflict:
                    # A producer that was given up for dead came back and committed some of these prompts first.
                    left = [group for group in groups if not self._is_committed(group)]
                    if len(left) == len(groups) and shard_id not in self._log.state.retired_shards:
                        raise
                    groups = left
            self._executor.mark_committed(prepared)
            if prepared:
                self._rebase()  # what was dropped, or went over the bound while it waited, is room again
        return shard

    async def rollout_batch(self, num_prompts: int) -> list[RolloutGroup]:
        """Attempt the first prompts of the run once and return every group; for debugging, nothing is committed."""
        return await self._executor.rollout_batch([self._prompts.at(position) for position in range(num_prompts)])

    def can_receive(self) -> bool:
        """True where a broadcast would be taken at once, and not after an evaluation."""
        return not self._served.pin.locked()

    async def receive(self, policy: Policy, broadcast: Broadcast) -> WeightUpdate | None:
        """See `ServedPolicy.receive`."""
        return await self._admit_after(self._served.receive(policy, broadcast))

    async def publish(self, policy: Policy) -> WeightUpdate | None:
        """See `ServedPolicy.publish`; `wait_for_work` tries again what is overdue."""
        return await self._admit_after(self._served.publish(policy))

    async def _admit_after(self, updating: Awaitable[WeightUpdate | None]) -> WeightUpdate | None:
        """A new policy is room for more, and what was started ahead begins; without one it is called back."""
        held, update = self._served.holds, None
        try:
            update = await updating
        finally:
            if update is None:
                async with self._log_lock:
                    await self._call_back()
        if update is not None:
            self._collected_at = time.time() if held else self._collected_at
            await self.refresh()
        return update

    async def evaluate(
        self, *, split: str, num_tasks: int, n_samples: int, temperature: float, max_concurrent: int
    ) -> Evaluation:
        """Score held-out tasks with the loaded version only, store the trajectories and log the result.

        A publication waits until it is over. Raises `rollouts.production.evaluation.MixedVersions`, `ValueError` for an
        empty split.
        """
        async with self._served.pin:
            return await self._evaluate(
                split=split,
                num_tasks=num_tasks,
                n_samples=n_samples,
                temperature=temperature,
                max_concurrent=max_concurrent,
            )

    async def evaluate_version(self, version: int, **settings: Any) -> Evaluation:
        """`evaluate` one policy version, which is loaded first: for a worker that does nothing but evaluate.

        Calls run one after another. Raises `ValueError` for a version the run does not have, or not any more.
        """
        async with self._served.pin:
            await self._served.load(version)
            return await self._evaluate(**settings)

    async def _evaluate(
        self, *, split: str, num_tasks: int, n_samples: int, temperature: float, max_concurrent: int
    ) -> Evaluation:
        async with self._log_lock:
            await self._call_back()
        version, sampling = self._served.version, dataclasses.replace(self._sampling, temperature=temperature)

        async def commit(shard_id: str, groups: list[RolloutGroup], seconds: float) -> None:
            async with self._log_lock:
                await asyncio.to_thread(
                    self._shards.write, shard_id, groups, sampling=sampling, wall_seconds=seconds, is_eval=True
                )

        evaluation = await evaluate_tasks(
            itertools.islice(self._workflow.tasks(split), num_tasks),
            player=self._player,
            version=version,
            split=split,
            n_samples=n_samples,
            sampling=sampling,
            max_concurrent=max_concurrent,
            shard_id=f"eval{version}-{self._name}-{uuid.uuid4().hex[:8]}",
            shard_bytes=self._limits.shard_bytes,
            commit=commit,
        )
        async with self._log_lock:
            await asyncio.to_thread(self._log.append, evaluation)
        return evaluation

    async def close(self) -> None:
        """Stop producing, release the engine and the reward processes, commit what has finished."""
        if not self._has_started:
            return  # whoever closes it now ends its process
        finished = await self._executor.close()
        await self._workflow.close()
        if "rollouts.endpoint.agent_endpoint" in sys.modules:  # what nobody has imported nobody has started
            from rollouts.endpoint.agent_endpoint import close_agent_endpoint

            await close_agent_endpoint()
        await self._rewards.close()
        await self._engine.stop()
        await self._commit_groups(finished, seconds=0.0)
        await self._presence.leave()

    async def _lease(self) -> list[Prompt]:
        """Prompts for the executor that nobody else has, entered into the log before the first of them starts."""
        async with self._log_lock:
            while True:
                await asyncio.to_thread(self._log.refresh)
                self._rebase()
                state, wanted = self._log.state, self._executor.wanted
                if not wanted:
                    return []
                if self._name not in state.producers:  # given up for dead, and alive after all
                    await self._presence.join()
                    continue
                lease = Lease(holder=self._name, positions=state.free_positions(wanted), number=state.num_leases)
                try:
                    await asyncio.to_thread(self._log.append, lease)
                except Conflict:
                    continue  # another worker was first
                return [self._prompts.at(position, retry=state.retries[position]) for position in lease.positions]

    def _rebase(self) -> None:
        """Tell the executor what the log counts against it."""
        state = self._log.state
        elsewhere = sum(holder != self._name for holder in state.leased.values())
        self._executor.paused = bool(state.paused)
        self._executor.set_version(
            self._served.next_version, accepted=self._num_accepted(), elsewhere=elsewhere, limits=self._limits_now()
        )

    def _num_accepted(self) -> int:
        """By the log. Of steps, not versions served here: between a step and `publish` its groups stay accepted."""
        return self._log.state.step * self._limits.batch_size + num_counted(self._log.state, self._rules)

    def _limits_now(self) -> Limits:
        """The run's end as its newest session has it, and a fair share of what may be in flight at all: the first
        worker to ask must not take everybody's prompts."""
        limits, state = self._limits, self._log.state
        if state.sessions and state.sessions[-1].steps:
            limits = dataclasses.replace(limits, total_groups=state.sessions[-1].steps * limits.batch_size)
        num_producers = len(state.producers.keys() | {self._name})
        if num_producers == 1:
            return limits
        share = math.ceil((1 + limits.max_staleness) * limits.steps_per_update * limits.batch_size / num_producers)
        return dataclasses.replace(
            limits, max_concurrent=min(limits.max_concurrent, share), num_producers=num_producers
        )

    def _is_committed(self, group: RolloutGroup) -> bool:
        """Whether somebody else has committed this prompt, or this very attempt at it that came to nothing."""
        state = self._log.state
        known = state.groups.get(group.id)
        return group.position in state.positions or (known is not None and known.position == group.position)
