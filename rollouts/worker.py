"""The rollout worker: an engine, an executor and the run's log in one process.

    collect():  executor ─▶ groups ─▶ shard file ─▶ log entry ─▶ Shard
    publish():  policy folder (digest checked) ─▶ engine swaps weights ─▶ admission re-based ─▶ engine checksum
    evaluate(): held-out tasks on the version that is loaded; a swap waits for it, training does not

A plain class: `infra/` may host it in another process, tests call it directly.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from pathlib import Path

from rollouts.attempts import AttemptLimits, Player
from rollouts.chat_tokens import ChatTokens
from rollouts.config import EngineSettings, RewardSettings
from rollouts.engine import Engine
from rollouts.executor import Executor, Limits
from rollouts.loading import load_object
from rollouts.prompts import PromptStream
from rollouts.scoring import RewardPool
from rollouts.workflow import RolloutWorkflow
from storage.digests import verify_folder
from storage.log_entries import Evaluation, Policy, Shard
from storage.object_store import open_store
from storage.records import RolloutGroup, Sampling
from storage.run_log import RunLog
from storage.run_state import Conflict
from storage.runs import open_run
from storage.shard_codec import Provenance
from storage.shards import commit_shard


def make_engine(settings: EngineSettings, tokens: ChatTokens, *, seed: int, version: int) -> Engine:
    """The engine a run file asks for, about to serve policy `version`."""
    match settings.kind:
        case "vllm":
            from rollouts.vllm_engine import VllmEngine

            return VllmEngine(
                max_model_len=settings.max_model_len,
                seed=seed + version,  # an engine that starts again must not draw the same numbers again
                clear_cache_on_reload=settings.clear_cache_on_reload,
                arguments=settings.vllm,
            )
        case "scripted":
            from rollouts.scripted_engine import ScriptedEngine, random_reply

            alphabet = tokens.alphabet()
            reply = random_reply(seed=seed, alphabet=alphabet, end_id=tokens.end_id, longest=3)
            return ScriptedEngine(reply, num_choices=len(alphabet))


class RolloutWorker:
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
        sampling: Sampling,
        attempt_limits: AttemptLimits,
        reward: RewardSettings,
        seed: int,
        code_version: str,
        config_sha256: str,
        cache: str,
    ) -> None:
        self._store_uri = store_uri
        self._run_id = run_id
        self._name = name
        self._workflow_path = workflow
        self._dataset = dataset
        self._engine_settings = engine
        self._limits = limits
        self._sampling = sampling
        self._attempt_limits = attempt_limits
        self._reward = reward
        self._seed = seed
        self._code_version = code_version
        self._config_sha256 = config_sha256
        self._cache = Path(cache)
        self._log_lock = asyncio.Lock()
        self._version_pin = asyncio.Lock()

    async def start(self, version: int | None = None) -> str:
        """Load a policy version, the live one by default; returns the engine's weight checksum.

        Raises `ValueError` for a version the run does not have, or not any more.
        """
        self._log: RunLog = open_run(open_store(self._store_uri), self._run_id)
        policies = self._log.state.policies
        wanted = max(policies) if version is None else version
        if wanted not in policies:
            raise ValueError(f"run {self._run_id!r} has no policy version {wanted}; it has 0 to {max(policies)}")
        if wanted in self._log.state.retired_policies:
            raise ValueError(f"policy version {wanted} of run {self._run_id!r} was retired: its weights are gone")
        policy = policies[wanted]
        folder = self._policy_folder(policy)
        self._tokens = ChatTokens.load(folder)
        self._workflow: RolloutWorkflow = load_object(self._workflow_path)(self._dataset)
        self._engine = make_engine(self._engine_settings, self._tokens, seed=self._seed, version=policy.version)
        checksum = await self._engine.start(folder, policy.version)
        self._version = policy.version
        self._rewards = RewardPool(num_processes=self._reward.processes, timeout=self._reward.timeout)
        self._player = Player(
            workflow=self._workflow,
            engine=self._engine,
            tokens=self._tokens,
            rewards=self._rewards,
            limits=self._attempt_limits,
            max_model_len=self._engine_settings.max_model_len,
        )
        self._executor = Executor(
            player=self._player,
            prompts=PromptStream(self._workflow.tasks("train"), seed=self._seed, committed=self._log.state.positions),
            limits=self._limits,
            sampling=self._sampling,
        )
        return checksum

    async def refresh(self) -> None:
        """Look at the log again: let prompts start that it now leaves room for."""
        async with self._log_lock:
            await asyncio.to_thread(self._log.refresh)
            self._rebase()

    async def wait_for_work(self) -> None:
        """Return once `collect` would have something to do."""
        await self._executor.wait_for_work()

    async def collect(self) -> Shard | None:
        """Produce and commit the next shard; null when nothing more can run before the next policy."""
        started = time.time()
        groups = await self._executor.prepare_batch()
        finished = time.time()
        shard, num_prepared = None, len(groups)
        async with self._log_lock:
            while groups and shard is None:
                shard_id = f"{self._log.state.step:06d}-{self._name}-{uuid.uuid4().hex[:8]}"
                try:
                    shard = await asyncio.to_thread(
                        self._commit, shard_id, groups, self._sampling, finished - started, False
                    )
                except Conflict:
                    # A producer that was given up for dead came back and committed some of these prompts first.
                    taken = self._log.state.positions
                    left = [group for group in groups if group.position not in taken]
                    if len(left) == len(groups) and shard_id not in self._log.state.retired_shards:
                        raise
                    groups = left
            self._executor.mark_committed()
            if len(groups) < num_prepared:
                self._rebase()  # the room of what was dropped is free again
        return shard

    async def publish(self, policy: Policy) -> str:
        """Serve `policy` from the next token on; returns the engine's checksum of the loaded weights.

        Raises `storage.digests.DigestMismatch` before touching the engine, `EngineError` with the old version
        still serving.
        """
        folder = await asyncio.to_thread(self._policy_folder, policy)
        async with self._version_pin:
            checksum = await self._engine.load_policy(folder, policy.version)
            self._version = policy.version
        await self.refresh()
        return checksum

    async def evaluate(self, *, split: str, num_tasks: int, n_samples: int, temperature: float) -> Evaluation:
        """Score held-out tasks with the loaded version only, store the trajectories and log the result."""
        started = time.time()
        sampling = dataclasses.replace(self._sampling, temperature=temperature)
        tasks = list(self._workflow.tasks(split))[:num_tasks]
        if not tasks:
            raise ValueError(f"the workflow's {split!r} split is empty; name another in [evaluation] split")
        async with self._version_pin:
            version = self._version
            groups = await self._executor.evaluate(
                tasks, version=version, n_samples=n_samples, sampling=sampling, position=-1
            )
        versions = {v for g in groups for t in g.trajectories for turn in t.turns for v in turn.weight_versions}
        assert versions <= {version}, f"evaluation of policy {version} has tokens of {versions}"
        attempts = [trajectory for group in groups for trajectory in group.trajectories]
        usable = [trajectory for group in groups for trajectory in group.usable]
        async with self._log_lock:
            shard_id = f"eval{version}-{self._name}-{uuid.uuid4().hex[:8]}"
            shard = await asyncio.to_thread(self._commit, shard_id, groups, sampling, time.time() - started, True)
            evaluation = Evaluation(
                version=version,
                split=split,
                score=sum(t.reward or 0.0 for t in usable) / len(attempts),
                num_tasks=len(tasks),
                num_failed=len(attempts) - len(usable),
                shard_id=shard.id,
                seconds=time.time() - started,
            )
            await asyncio.to_thread(self._log.append, evaluation)
        return evaluation

    async def close(self) -> None:
        """Stop producing and release the engine and the reward processes."""
        await self._executor.close()
        await self._rewards.close()
        await self._engine.stop()

    def _rebase(self) -> None:
        state = self._log.state
        # Steps, not the version served here: between a step and its `publish` the step's groups stay accepted.
        accepted = state.step * self._limits.batch_size + state.pending_accepted
        # A lost position that was committed again since, perhaps before this worker started, is done.
        retries = {position: count for position, count in state.retries.items() if position not in state.positions}
        self._executor.set_version(self._version, accepted=accepted, retries=retries)

    def _policy_folder(self, policy: Policy) -> Path:
        folder = self._log.store.fetch_folder(policy.path, self._cache)
        verify_folder(folder)
        return folder

    def _commit(
        self,
        shard_id: str,
        groups: list[RolloutGroup],
        sampling: Sampling,
        wall_seconds: float,
        is_eval: bool,
    ) -> Shard:
        provenance = Provenance(
            run_id=self._run_id,
            shard_id=shard_id,
            producer=self._name,
            tokenizer_sha256=self._tokens.tokenizer_sha256,
            chat_template_sha256=self._tokens.chat_template_sha256,
            config_sha256=self._config_sha256,
            code_version=self._code_version,
        )
        attempts = [trajectory for group in groups for trajectory in group.trajectories]
        rewarding = sum(trajectory.reward_seconds for trajectory in attempts)
        generating = sum(turn.generate_seconds for trajectory in attempts for turn in trajectory.turns)
        # Attempts overlap, so their seconds only say in which proportion the wall-clock is to be split.
        share = rewarding / (rewarding + generating) if attempts and rewarding + generating else 0.0
        seconds = {"generate": wall_seconds * (1 - share), "reward": wall_seconds * share}
        return commit_shard(
            self._log, groups, provenance=provenance, sampling=sampling, is_eval=is_eval, seconds=seconds
        )
