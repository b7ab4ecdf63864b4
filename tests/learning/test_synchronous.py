"""Without staleness, rollout worker, claims and trainer together are synchronous training, bit for bit.

    worker ─▶ shards ─▶ claim ─▶ train ─▶ publish, all at once     ==     play B prompts, train, again

What the scripted engine says depends on the weights it serves, so one token of an older policy would change everything
after it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from infra.user_code import path_of
from rollouts.chat.chat import Chat
from rollouts.chat.chat_tokens import ChatTokens
from rollouts.engines.draws import seed_of
from rollouts.engines.engine import Generation, WeightUpdate
from rollouts.engines.scripted_engine import ScriptedEngine
from rollouts.production import worker as worker_module
from rollouts.production.attempts import Player
from rollouts.production.prompts import PromptOrder
from rollouts.production.worker import RolloutWorker
from rollouts.rewards.scoring import RewardPool
from rollouts.workflow import Score, Workflow
from settings.run_file import RunConfig
from storage.log.claims import next_claim
from storage.log.entries import ClaimedGroup
from storage.log.run_log import RunLog
from storage.records import Sampling, Task
from storage.shards.shards import read_shard
from tests.builders import a_config
from tests.unit.trainers.builders import commit, config_of, new_run, open_trainer, tiny_model
from trainers.checkpoint import save_policy
from trainers.data.samples import COLUMNS, gather_samples
from trainers.trainer import Trainer
from trainers.worker import TrainerWorker

_BATCH, _STEPS, _ATTEMPTS = 4, 5, 4
_TASKS = [Task(id=f"task{n}", prompt=f"{n}+{n}=") for n in range(10)]
_CONFIG = config_of(learning_rate=1e-2, num_minibatches=2, max_gap=1e9)  # the scripted engine draws at random
_SAMPLING = Sampling(max_tokens=8)


class Sums(Workflow):
    def tasks(self, split: str) -> Sequence[Task]:
        return _TASKS

    async def run(self, task: Task, chat: Chat) -> Score:
        reply = await chat.ask(task.prompt)
        return Score(reward=float(sum(map(ord, reply)) % 7))


class _Engine(ScriptedEngine):
    """Replies, and how long they take, are a function of the weights it serves and of the request's seed."""

    def __init__(self, tokens: ChatTokens) -> None:
        super().__init__(self._answer, seconds_per_token=0.0005)
        self._alphabet, self._end_id = tokens.alphabet(), tokens.end_id
        self.weights = ""

    async def load_policy(self, folder: Path, version: int) -> WeightUpdate:
        update = await super().load_policy(folder, version)
        self.weights = update.checksum
        return update

    async def generate(self, *arguments: Any, **options: Any) -> Generation:
        await self._open.wait()  # a reply that began ahead of a policy is that policy's
        return await super().generate(*arguments, **options)

    def _answer(self, prompt_ids: list[int], draw: str) -> list[int]:
        digest = hashlib.sha256(f"{self.weights}/{draw}/{prompt_ids}".encode()).digest()
        length = 1 + digest[0] % 6
        return [self._alphabet[digest[1 + n] % len(self._alphabet)] for n in range(length)] + [self._end_id]


async def _plain_loop(log: RunLog, model: Path, scratch: Path) -> str:
    """Collect exactly a batch, train on it, serve what came out, again. Returns the last weights' digest."""
    tokens = ChatTokens.load(model)
    engine, prompts = _Engine(tokens), PromptOrder(_TASKS, seed=0)
    rewards = RewardPool(num_processes=1, timeout=5)
    player = Player(workflow=Sums(), engine=engine, tokens=tokens, rewards=rewards, config=a_config(max_model_len=64))
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
                    sampling=dataclasses.replace(_SAMPLING, seed=seed_of(_CONFIG.seed, position, prompt.retry)),
                    is_eval=False,
                )
            )
        shard = commit(log, f"batch{step}", groups)
        claimed = [ClaimedGroup(shard_id=shard.id, group_id=group.id) for group in groups]
        samples = gather_samples(claimed, {shard.id: read_shard(log, shard, columns=COLUMNS)})
        trainer.step(samples, step=step, base_version=step - 1, max_staleness=0)
        engine.weights = save_policy(trainer.model, model, scratch / str(step))
    return engine.weights


async def _pipeline(log: RunLog, config: RunConfig, trainer: TrainerWorker, cache: Path) -> str:
    """Production and training beside each other, as in the flow. Returns the last weights' digest."""
    worker = await RolloutWorker.open(
        config, store_uri=log.store.uri, name="rollout-0", cache=str(cache), code_version="c0de"
    )

    async def produce() -> None:
        await worker.refresh()
        while True:
            await worker.wait_for_work()
            await worker.collect()

    async with asyncio.timeout(60):
        producing = asyncio.create_task(produce())
        while log.refresh().step < _STEPS:
            claim = next_claim(log.state, config)
            if claim is None:
                assert not producing.done() or producing.result() is None
                await asyncio.sleep(0.001)
                continue
            step = await asyncio.to_thread(
                trainer.train_step, claim, extra_metrics={}, round_seconds=0.0, session_id="session"
            )
            await worker.publish(step.policy)
        producing.cancel()
        await worker.close()
    return log.state.steps[-1].policy.weights_sha256


def test_without_staleness_the_pipeline_is_synchronous_training_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(tmp_path / "model")
    monkeypatch.setattr(worker_module, "make_engine", lambda *_, **__: _Engine(ChatTokens.load(model)))

    def pipeline(name: str, *, max_staleness: float) -> tuple[str, RunLog]:
        log, cache = new_run(tmp_path / name, model), tmp_path / "cache"
        config = a_config(
            run=log.run_id,
            workflow=path_of(Sums),
            n_samples=_ATTEMPTS,
            batch_size=_BATCH,
            steps=_STEPS,
            max_staleness=max_staleness,
            stale_policy="strict",
            max_concurrent=3 * _BATCH,
            retries=0,
            max_tokens=_SAMPLING.max_tokens,
            attempt_timeout=600.0,
        )
        trainer = open_trainer(log, _CONFIG.model_copy(update={"max_staleness": max_staleness}), cache=cache)
        return asyncio.run(_pipeline(log, config, trainer, cache)), log

    plain = new_run(tmp_path / "plain", model)
    expected = asyncio.run(_plain_loop(plain, model, tmp_path / "scratch"))
    weights, log = pipeline("synchronous", max_staleness=0)
    assert weights == expected
    assert all(step.metrics["staleness_max"] == 0 for step in log.state.steps)
    assert log.state.counters()["trained"] == _STEPS * _BATCH == log.state.counters()["submitted"]

    overlapped, log = pipeline("overlapped", max_staleness=1)
    assert overlapped != expected and max(step.metrics["staleness_max"] for step in log.refresh().steps) == 1
