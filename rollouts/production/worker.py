"""The rollout worker: an engine, an executor and the run's log in one process.

    collect():  executor ─▶ groups ─▶ shard file ─▶ log entry ─▶ Shard
    publish():  policy folder (digest checked) ─▶ engine swaps weights ─▶ quota re-based ─▶ engine checksum
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
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from infra.user_code import load_object
from infra.weight_broadcast import Broadcast
from rollouts.chat.chat_tokens import ChatTokens
from rollouts.chat.thoughts import ThoughtParser
from rollouts.chat.tool_parsing import ToolParser
from rollouts.engines.engine import EngineError, WeightUpdate
from rollouts.engines.served_policy import ServedPolicy
from rollouts.production.attempts import Player, give_threads
from rollouts.production.engine_choice import fitted_to_model, make_engine
from rollouts.production.evaluation import evaluate_tasks
from rollouts.production.executor import Executor
from rollouts.production.failures import Failures
from rollouts.production.head_start import HeadStart
from rollouts.production.leases import Leases
from rollouts.production.prompts import PromptOrder, task_set
from rollouts.rewards.scoring import RewardPool
from rollouts.sandbox.sandbox import require_sandbox
from rollouts.workflow import Workflow
from settings.errors import failure_text
from settings.evaluation import EvaluationSettings
from settings.run_file import RunConfig
from storage.log.claims import is_fixed
from storage.log.entries import Evaluation, Policy, Shard
from storage.log.producers import Presence
from storage.log.run_log import RunLog
from storage.log.run_state import Conflict
from storage.log.runs import open_run, run_config
from storage.objects.digests import sha256_of_json
from storage.objects.opening import open_store
from storage.records import RolloutGroup, Sampling, Task
from storage.shards.codec import Provenance
from storage.shards.failed_attempts import failed_attempts
from storage.shards.shards import commit_shard

logger = logging.getLogger("millrace.rollout")


def waiting_tasks() -> list[str]:
    """One line per place at which asyncio tasks of this process wait, most crowded first."""
    places: Counter[str] = Counter()
    for task in asyncio.all_tasks():
        frames = [f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" for frame in task.get_stack(limit=4)]
        coroutine = task.get_coro()
        places[f"{getattr(coroutine, '__qualname__', coroutine)} at {' < '.join(frames) or 'its start'}"] += 1
    return [f"  {count} × {place}" for place, count in places.most_common(20)]


@dataclass(kw_only=True, eq=False)
class RolloutWorker:
    """Produces committed shards for one run until it is closed; `open` makes one."""

    config: RunConfig
    log: RunLog
    lock: asyncio.Lock
    """Held while the log is read or written."""
    served: ServedPolicy
    player: Player
    provenance: Provenance
    """Origin of its shards, without the id, which each shard has of its own."""
    leases: Leases
    opened: str
    """Checksum of the weights that the engine started with."""

    def __post_init__(self) -> None:
        self._executor = Executor(
            player=self.player, lease=self.leases.take, quota=self.leases.quota, config=self.config
        )
        self._head_start = HeadStart(
            log=self.log, config=self.config, served=self.served, leases=self.leases, executor=self._executor
        )
        self._failures = Failures()
        self._tasks: dict[str, Sequence[Task]] = {}  # by split, once it was evaluated
        self._collected_at = time.perf_counter()  # when the newest shard was complete, or the next was released

    @classmethod
    async def open(
        cls,
        config: RunConfig,
        *,
        store_uri: str,
        name: str,
        cache: str,
        code_version: str,
        outside: bool = False,
        version: int | None = None,
    ) -> RolloutWorker:
        """A worker whose engine serves a policy version, the live one by default.

        `outside`: the driver has not started this worker, which gives it several signs of life per
        `rollout.lease_timeout`. With `train.lora` the policies are adapters, and the base model is policy 0.

        If that version is a damaged delta, its anchor is loaded, see `ServedPolicy.first`; `opened` is empty, and
        `wait_for_work` tries again. Raises `InvalidInput` for a version the run does not have, or not any more.
        """
        if config.rollout.require_sandbox:
            require_sandbox()
        log = open_run(open_store(store_uri), config.run)
        lock = asyncio.Lock()
        most_behind = 0 if is_fixed(config) else config.max_staleness * config.train.steps_per_update
        served = ServedPolicy(log=log, log_lock=lock, cache=Path(cache), most_behind=most_behind)
        policy, folder = served.first(version)
        model = folder if config.train.lora is None else served.base()
        config = fitted_to_model(config, model)
        evaluation = config.evaluation
        at_once = (config.rollout.max_concurrent * config.n_samples, evaluation.max_concurrent * evaluation.n_samples)
        give_threads(max(at_once))
        workflow: Workflow = load_object(config.workflow)(config.dataset or None)
        # Before transformers is imported here: vLLM's core imports it beside us.
        engine = make_engine(config, model)
        tokens = ChatTokens.load(model, settings=config.engine.chat_template_kwargs)
        if config.reproducible:  # of a model that was not on the machine of the command
            tokens.check_day()
        checksum = await engine.start(folder, policy.version, stop_ids=tokens.turn_ends)
        served.engine, served.version = engine, policy.version
        rewards = RewardPool(
            num_processes=config.reward.processes,
            timeout=config.reward.timeout,
            on_timeout=config.reward.on_timeout,
            memory_gb=config.reward.memory_gb,
        )
        await rewards.start()
        player = Player(
            workflow=workflow,
            engine=engine,
            tokens=tokens,
            rewards=rewards,
            tool_parser=ToolParser(config.engine.tool_parser, tokens.tokenizer),
            thought_parser=ThoughtParser(config.engine.reasoning_parser, tokens.tokenizer),
            config=config,
        )
        provenance = Provenance(
            run_id=log.run_id,
            shard_id="",
            producer=name,
            tokenizer_sha256=tokens.tokenizer_sha256,
            chat_template_sha256=tokens.chat_template_sha256,
            config_sha256=sha256_of_json(run_config(log)),
            code_version=code_version,
        )
        presence = Presence(log, name, outside=outside, lease_timeout=config.rollout.lease_timeout)
        tasks = workflow.tasks("train")
        prompts = PromptOrder(tasks, seed=config.seed, since=task_set(log.state, tasks, run=log.run_id))
        leases = Leases(log=log, lock=lock, config=config, presence=presence, prompts=prompts)
        return cls(
            config=config,
            log=log,
            lock=lock,
            served=served,
            player=player,
            provenance=provenance,
            leases=leases,
            opened="" if served.overdue else checksum,
        )

    async def join(self) -> None:
        """Take part in the run: the prompts in flight are divided among all producers."""
        async with self.lock:
            await self.leases.presence.join()

    async def refresh(self) -> None:
        """Look at the log again: let prompts start that it now leaves room for."""
        async with self.lock:
            await asyncio.to_thread(self.log.refresh)
            self.leases.rebase(self._head_start.next_version)
            if self.leases.quota.paused or not self.leases.quota.used_up(self.served.version):
                await self._head_start.call_back()
            self._executor.admit()

    async def wait_for_work(self) -> None:
        """Return once `collect` would have something to do; what `publish` could not load is tried again first. If the
        next policy is soon there its groups begin meanwhile."""
        if self.served.overdue is not None:
            await self.publish(self.served.overdue, wakes=False)
        may_begin = True
        while not self._executor.has_work:
            if not (may_begin and await self._head_start.begin()):
                await self._executor.wait_for_change()
                continue
            await self.refresh()
            if not await self._head_start.is_over_in_time():
                may_begin = False
                async with self.lock:
                    await self._head_start.call_back()

    async def wait_for_stragglers(self, version: int) -> None:
        """See `Executor.wait_for_stragglers`; what has finished is committed."""
        if await self._executor.wait_for_stragglers(version):
            await self._commit_groups(self._executor.hand_out(), seconds=0.0)

    def proof(self) -> str:
        """See `Engine.proof`."""
        return self.player.engine.proof

    def progress(self) -> int:
        return self._executor.num_finished

    def report(self) -> str:
        """The state of this worker, and where each of its asyncio tasks waits."""
        held = [f"the engine serves policy {self.served.version}, and keeps requests for the next"]
        return "\n".join([self._executor.report(), *held * (self._head_start.version is not None), *waiting_tasks()])

    async def collect(self) -> Shard | None:
        """Produce and commit the next shard; None if nothing more can run before the next policy."""
        started = time.perf_counter()
        groups = await self._executor.prepare_batch()
        # Attempts begin as soon as there is room, not with this call, which gets its turn after hundreds of them.
        now, seconds = time.perf_counter(), time.time() - min((group.queued_at for group in groups), default=math.inf)
        seconds = min(max(seconds, now - started), now - self._collected_at)  # the machine's time may have been set
        self._collected_at = now
        return await self._commit_groups(groups, seconds=seconds)

    async def _commit_groups(self, groups: list[RolloutGroup], *, seconds: float) -> Shard | None:
        """None if there are none, or other workers have committed all of these prompts."""
        shard, prepared = None, groups
        async with self.lock:
            while groups and shard is None:
                shard_id = f"{self.log.state.step:06d}-{self.provenance.producer}-{uuid.uuid4().hex[:8]}"
                try:
                    shard = await self._write(shard_id, groups, sampling=self._executor.sampling, wall_seconds=seconds)
                except Conflict:
                    # A producer that was given up for dead came back and committed some of these prompts first.
                    left = [group for group in groups if not self._is_committed(group)]
                    if len(left) == len(groups) and shard_id not in self.log.state.retired_shards:
                        raise
                    groups = left
            self._executor.mark_committed(prepared)
            if prepared:  # what was dropped, or went over the bound while it waited, is room again
                self.leases.rebase(self._head_start.next_version)
                self._executor.admit()
        return shard

    async def _write(
        self,
        shard_id: str,
        groups: Sequence[RolloutGroup],
        *,
        sampling: Sampling,
        wall_seconds: float,
        is_eval: bool = False,
    ) -> Shard:
        """Commit the groups as one shard. Its `wall_seconds` are divided into generating and rewarding as the attempts'
        own seconds, which overlap."""
        self._failures.add(failed_attempts(groups))
        attempts = [trajectory for group in groups for trajectory in group.trajectories]
        rewarding = sum(trajectory.reward_seconds for trajectory in attempts)
        generating = sum(turn.generate_seconds for trajectory in attempts for turn in trajectory.turns)
        share = rewarding / (rewarding + generating) if rewarding + generating else 0.0
        return await asyncio.to_thread(
            commit_shard,
            self.log,
            groups,
            provenance=dataclasses.replace(self.provenance, shard_id=shard_id),
            sampling=sampling,
            is_eval=is_eval,
            seconds={"generate": wall_seconds * (1 - share), "reward": wall_seconds * share},
        )

    async def rollout_prompt(self, position: int) -> RolloutGroup:
        """Attempt one prompt of the run once, by its place in the order; for debugging, nothing is committed."""
        return await self._executor.play(self.leases.prompts.at(position))

    def can_receive(self) -> bool:
        """True if a broadcast would be taken at once, and not after an evaluation."""
        return self.served.is_asleep or not self.served.pin.locked()

    async def sleep(self) -> None:
        """See `ServedPolicy.sleep`."""
        await self.served.sleep()

    async def wake(self) -> None:
        """See `ServedPolicy.wake`."""
        await self.served.wake()

    async def receive(self, policy: Policy, broadcast: Broadcast) -> WeightUpdate | None:
        return await self._admit_after(self.served.receive(policy, broadcast))

    async def publish(self, policy: Policy, *, wakes: bool = True) -> WeightUpdate | None:
        """See `ServedPolicy.publish`; `wait_for_work` tries again what is overdue."""
        return await self._admit_after(self.served.publish(policy, wakes=wakes))

    async def _admit_after(self, updating: Awaitable[WeightUpdate | None]) -> WeightUpdate | None:
        """A new policy is room for more, and what began ahead is released; without one it is called back."""
        update = None
        try:
            update = await updating
        finally:
            if update is None:
                async with self.lock:
                    await self._head_start.call_back()
        if update is not None:
            if self._head_start.end():
                self._collected_at = time.perf_counter()
            await self.refresh()
        return update

    async def evaluate(
        self, settings: EvaluationSettings, version: int | None = None, *, adopt_tasks: bool = False
    ) -> Evaluation:
        """Score held-out tasks with one policy version only, store the trajectories and log the result.

        It is the version that is loaded; a worker that only evaluates may load another `version` first. Publications
        and further calls wait until it is over. Raises `rollouts.production.evaluation.MixedVersions`, and
        `InvalidInput` for an empty split, other tasks than the run has had unless `adopt_tasks`, or a version the run
        does not have, or not any more.
        """
        split = settings.split
        if split not in self._tasks:
            self._tasks[split] = self.player.workflow.tasks(split)
        tasks = self._tasks[split]
        async with self.served.pin:
            if version is not None:
                await self.served.load(version)
            async with self.lock:
                await self._head_start.call_back()
                look = partial(task_set, run=self.log.run_id, split=split, adopt=adopt_tasks)
                recorded_tasks = await asyncio.to_thread(look, self.log.state, tasks)
            sampling = dataclasses.replace(self._executor.sampling, temperature=settings.temperature)

            async def commit(shard_id: str, groups: list[RolloutGroup], seconds: float) -> None:
                async with self.lock:
                    self._check_open()
                    await self._write(shard_id, groups, sampling=sampling, wall_seconds=seconds, is_eval=True)

            evaluation = await evaluate_tasks(
                itertools.islice(tasks, settings.num_tasks),
                player=self.player,
                version=self.served.version,
                settings=settings,
                sampling=sampling,
                shard_id=f"eval{self.served.version}-{self.provenance.producer}-{uuid.uuid4().hex[:8]}",
                shard_bytes=self.config.rollout.shard_bytes,
                commit=commit,
            )
            evaluation = dataclasses.replace(evaluation, tasks=recorded_tasks)
            async with self.lock:
                self._check_open()
                await asyncio.to_thread(self.log.append, evaluation)
            return evaluation

    def _check_open(self) -> None:
        """An evaluation that outlives its engine has attempts that the end of the run failed: nothing of it counts."""
        if self._executor.is_closed:
            raise EngineError("this worker is closed: the evaluation is made again by the next start")

    async def close(self) -> None:
        """Stop producing, release the engine and the reward processes, commit what has finished. The workflow's own
        `close` comes last: it may never return, and nothing else must be lost by that."""
        finished = await self._executor.close()
        if "rollouts.endpoint.agent_endpoint" in sys.modules:  # nothing else can have started one
            from rollouts.endpoint.agent_endpoint import close_agent_endpoint

            await close_agent_endpoint()
        await self.player.rewards.close()
        await self.served.engine.stop()
        await self._commit_groups(finished, seconds=0.0)
        await self.leases.presence.leave()
        try:
            await self.player.workflow.close()
        except Exception as error:  # noqa: BLE001 - user code may raise anything, and all else is done
            logger.warning("the workflow's close() failed: %s", failure_text(error))

    def _is_committed(self, group: RolloutGroup) -> bool:
        """True if another worker has committed this prompt, or this very attempt at it that came to nothing."""
        state = self.log.state
        logged = state.groups.get(group.id)
        return group.position in state.positions or (logged is not None and logged.position == group.position)
