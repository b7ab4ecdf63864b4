"""Without staleness, executor, claims and trainer together are synchronous training, bit for bit.

    executor ─▶ shards ─▶ claim ─▶ train ─▶ publish, all at once     ==     play B prompts, train, again

What the scripted engine says depends on the weights it serves, so one token of an older policy would change everything
after it.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path

import torch

from rollouts.chat.chat import Chat
from rollouts.chat.chat_tokens import ChatTokens
from rollouts.engines.scripted_engine import ScriptedEngine
from rollouts.production.attempts import Player
from rollouts.production.executor import Executor
from rollouts.production.prompts import Prompt, PromptOrder
from rollouts.production.quota import Quota
from rollouts.rewards.scoring import RewardPool
from rollouts.workflow import Score, Workflow
from storage.log.claims import next_claim
from storage.log.entries import ClaimedGroup, Lease
from storage.log.run_log import RunLog
from storage.records import RolloutGroup, Sampling, Task
from storage.shards.shards import read_shard
from tests.builders import a_config, wait_for_work
from tests.unit.trainers.builders import commit, config_of, new_run, open_trainer, tiny_model
from trainers.checkpoint import save_policy
from trainers.data.samples import COLUMNS, gather_samples
from trainers.trainer import Trainer

_BATCH, _STEPS, _ATTEMPTS = 4, 5, 4
_TASKS = [Task(id=f"task{n}", prompt=f"{n}+{n}=") for n in range(10)]
_CONFIG = config_of(learning_rate=1e-2, num_minibatches=2, max_gap=1e9)  # the scripted engine draws at random
_SAMPLING = Sampling(max_tokens=8)


class _Workflow(Workflow):
    async def run(self, task: Task, chat: Chat) -> Score:
        reply = await chat.ask(task.prompt)
        return Score(reward=float(sum(map(ord, reply)) % 7))


class _Engine(ScriptedEngine):
    """Replies, and how long they take, are a function of the weights it serves."""

    def __init__(self, tokens: ChatTokens) -> None:
        super().__init__(self._answer, seconds_per_token=0.0005)
        self._alphabet, self._end_id = tokens.alphabet(), tokens.end_id
        self.weights = ""

    def _answer(self, prompt_ids: list[int], request_id: str) -> list[int]:
        digest = hashlib.sha256(f"{self.weights}/{request_id}/{prompt_ids}".encode()).digest()
        length = 1 + digest[0] % 6
        return [self._alphabet[digest[1 + n] % len(self._alphabet)] for n in range(length)] + [self._end_id]


def _player(engine: ScriptedEngine, tokens: ChatTokens) -> Player:
    return Player(
        workflow=_Workflow(),
        engine=engine,
        tokens=tokens,
        rewards=RewardPool(num_processes=1, timeout=5),
        config=a_config(max_model_len=64),
    )


async def _plain_loop(log: RunLog, model: Path, scratch: Path) -> str:
    """Collect exactly a batch, train on it, serve what came out, again. Returns the last weights' digest."""
    tokens = ChatTokens.load(model)
    engine, prompts = _Engine(tokens), PromptOrder(_TASKS, seed=0)
    player = _player(engine, tokens)
    trainer = Trainer(model, _CONFIG)
    engine.weights = log.state.policies[0].weights_sha256
    for step in range(1, _STEPS + 1):
        engine.version = step - 1
        groups = []
        for position in range((step - 1) * _BATCH, step * _BATCH):
            prompt = prompts.at(position)
            groups.append(
                await player.group(
                    prompt.task,
                    group_id=prompt.group_id,
                    position=position,
                    epoch=prompt.epoch,
                    n_samples=_ATTEMPTS,
                    sampling=_SAMPLING,
                    is_eval=False,
                )
            )
        shard = commit(log, f"batch{step}", groups)
        claimed = [ClaimedGroup(shard_id=shard.id, group_id=group.id) for group in groups]
        samples = gather_samples(claimed, {shard.id: read_shard(log, shard, columns=COLUMNS)})
        trainer.step(samples, step=step, base_version=step - 1, max_staleness=0)
        engine.weights = save_policy(trainer.model, model, scratch / str(step), dtype=torch.float32)
    return engine.weights


class _Pipeline:
    """Production and training beside each other, as in the flow."""

    def __init__(self, log: RunLog, model: Path, cache: Path, *, max_staleness: float) -> None:
        self._log = log
        self._cache = cache
        tokens = ChatTokens.load(model)
        self._engine, self._prompts = _Engine(tokens), PromptOrder(_TASKS, seed=0)
        self._engine.weights = log.state.policies[0].weights_sha256
        self._config = a_config(
            n_samples=_ATTEMPTS,
            batch_size=_BATCH,
            steps=_STEPS,
            max_staleness=max_staleness,
            stale_policy="strict",
            max_concurrent=3 * _BATCH,
            retries=0,
            max_tokens=_SAMPLING.max_tokens,
        )
        self._quota = Quota(self._config)
        self._executor = Executor(
            player=_player(self._engine, tokens), lease=self._lease, quota=self._quota, config=self._config
        )
        self._trainer = open_trainer(log, _CONFIG.model_copy(update={"max_staleness": max_staleness}), cache=cache)

    async def run(self) -> str:
        producing = asyncio.create_task(self._produce())
        while self._log.refresh().step < _STEPS:
            claim = next_claim(self._log.state, self._config)
            if claim is None:
                assert not producing.done() or producing.result() is None
                await asyncio.sleep(0.001)
                continue
            step = await asyncio.to_thread(
                self._trainer.train_step,
                claim,
                extra_metrics={},
                round_started=time.time(),
                session_id="session",
            )
            folder = self._log.store.fetch_folder(step.policy.path, self._cache)
            await self._engine.load_policy(folder, step.policy.version)
            self._engine.weights = step.policy.weights_sha256
            self._rebase()
        producing.cancel()
        await self._executor.close()
        return self._engine.weights

    async def _produce(self) -> None:
        self._rebase()
        number = 0
        while True:
            await wait_for_work(self._executor)
            groups: list[RolloutGroup] = await self._executor.prepare_batch()
            if groups:
                number += 1
                commit(self._log, f"shard{number}", groups)
                self._executor.mark_committed(groups)

    async def _lease(self) -> list[Prompt]:
        self._rebase()
        state = self._log.state
        positions = state.free_positions(self._quota.wanted)
        self._log.append(Lease(holder="rollout-0", positions=positions, number=state.num_leases))
        return [self._prompts.at(position) for position in positions]

    def _rebase(self) -> None:
        state = self._log.refresh()
        committed = state.step * _BATCH + state.pending_accepted
        self._quota.rebase(version=self._engine.version, committed=committed)
        self._executor.admit()


def test_without_staleness_the_pipeline_is_synchronous_training_bit_for_bit(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")

    def pipeline(name: str, *, max_staleness: float) -> tuple[str, RunLog]:
        log = new_run(tmp_path / name, model)
        run = _Pipeline(log, model, tmp_path / "cache", max_staleness=max_staleness).run()
        return asyncio.run(asyncio.wait_for(run, 60)), log

    plain = new_run(tmp_path / "plain", model)
    expected = asyncio.run(_plain_loop(plain, model, tmp_path / "scratch"))
    weights, log = pipeline("synchronous", max_staleness=0)
    assert weights == expected == log.refresh().steps[-1].policy.weights_sha256
    assert all(step.metrics["staleness_max"] == 0 for step in log.state.steps)
    assert log.state.counters()["trained"] == _STEPS * _BATCH == log.state.counters()["submitted"]

    overlapped, log = pipeline("overlapped", max_staleness=1)
    assert overlapped != expected and max(step.metrics["staleness_max"] for step in log.refresh().steps) == 1
