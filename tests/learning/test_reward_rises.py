"""The loop of shards, claims and steps learns: a policy that hardly ever says 7 comes to say it nearly always.

policy folder ─▶ sampling in torch ─▶ shard ─▶ claim ─▶ TrainerWorker.train_step ─▶ the next policy folder
"""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from storage.log.claims import next_claim
from storage.log.entries import Step
from storage.log.run_log import RunLog
from storage.records import RolloutGroup
from tests.builders import a_config
from tests.unit.trainers.builders import (
    Row,
    commit,
    config_of,
    group_of,
    load_causal_lm,
    new_run,
    open_trainer,
    tiny_model,
)
from trainers.worker import TrainerWorker

_PROMPTS = ["1+1=", "23+4=", "5=", "9+9+9="]
_ATTEMPTS = 16
_STEPS = 30


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _rollouts(folder: Path, *, version: int, seed: int) -> list[RolloutGroup]:
    """One group per prompt; an attempt is one sampled character, its reward 1 for a `7`."""
    tokenizer, causal_lm = AutoTokenizer.from_pretrained(folder), load_causal_lm(folder)
    draw = torch.Generator().manual_seed(seed)
    groups = []
    for index, prompt in enumerate(_PROMPTS):
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        with torch.no_grad():
            log_p = causal_lm(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        sampled = torch.multinomial(log_p.exp(), _ATTEMPTS, replacement=True, generator=draw).tolist()
        rows = [
            Row(
                prompt=ids,
                reply=[token],
                logprobs=[float(log_p[token])],
                versions=[version],
                reward=float(tokenizer.decode([token]) == "7"),
                group=index,
                attempt=attempt,
            )
            for attempt, token in enumerate(sampled)
        ]
        groups.append(group_of(rows, position=version * len(_PROMPTS) + index))
    return groups


def _round(log: RunLog, worker: TrainerWorker, cache: Path) -> Step:
    """Sample from the live policy, commit, claim, train."""
    policy = log.refresh().live
    assert policy is not None
    groups = _rollouts(log.store.fetch_folder(policy.path, cache), version=policy.version, seed=policy.version)
    commit(log, f"shard-{policy.version}", groups)
    rules = a_config(
        batch_size=len(_PROMPTS), n_samples=_ATTEMPTS, max_staleness=0, stale_policy="strict", min_usable=_ATTEMPTS
    )
    claim = next_claim(log.refresh(), rules)
    assert claim is not None
    return worker.train_step(claim, extra_metrics={}, round_started=time.time(), session_id="learning")


@pytest.mark.parametrize("scale", ["std", "none"])
def test_reward_rises(tmp_path: Path, scale: str) -> None:
    log = new_run(tmp_path, tiny_model(tmp_path / "model", init_range=0.02))
    config = config_of(learning_rate=1e-2, advantage={"kind": "grpo", "scale": scale})
    worker = open_trainer(log, config, cache=tmp_path / "cache")
    steps = [_round(log, worker, tmp_path / "cache") for _ in range(_STEPS)]
    rewards = [step.metrics["reward"] for step in steps]
    assert np.mean(rewards[:3]) < 0.3
    assert np.mean(rewards[-3:]) > 0.8
    # Sampled from the very weights that are trained: the trainer's log-probabilities are the sampler's.
    assert max(step.metrics["engine_gap"] for step in steps) < 1e-5
    assert log.refresh().counters()["trained"] == _STEPS * len(_PROMPTS)
