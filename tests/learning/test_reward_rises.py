"""GRPO, PPO with a critic, imitation of what was accepted, and distillation learn; from recorded shards alone too.

policy folder ─▶ sampling in torch ─▶ shard ─▶ claim ─▶ TrainerWorker.train_step ─▶ the next policy folder
                                        └─▶ ReplayWorker: the same shards under another objective
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from settings.run_file import RunConfig
from storage.log.claims import next_claim
from storage.log.entries import Step
from storage.log.run_log import RunLog
from storage.log.runs import model_key
from storage.objects.digests import DIGEST_FILE
from storage.policies.policies import PolicyReader
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
    replayed,
    tiny_model,
)

_PROMPTS = ["1+1=", "23+4=", "5=", "9+9+9="]
_ATTEMPTS = 16
_LENGTH = 3

Judge = Callable[[str], float]


def _sevens(text: str) -> float:
    """Share of the reply that is a 7: every token has its own part in the reward."""
    return text.count("7") / _LENGTH


def _begins_with_seven(text: str) -> float:
    return float(text.startswith("7"))


def _chats(folder: Path) -> tuple[Any, list[list[int]]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [[{"role": "user", "content": prompt}] for prompt in _PROMPTS]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    return tokenizer, [tokenizer.apply_chat_template(chat, **options) for chat in chats]


def _rollouts(folder: Path, *, version: int, judge: Judge) -> list[RolloutGroup]:
    """One group per prompt; an attempt is `_LENGTH` sampled characters."""
    tokenizer, prompts = _chats(folder)
    causal_lm, draw = load_causal_lm(folder), torch.Generator().manual_seed(version)
    groups = []
    for index, prompt in enumerate(prompts):
        ids, logprobs = torch.tensor([prompt] * _ATTEMPTS), []
        for _ in range(_LENGTH):
            with torch.no_grad():
                log_p = causal_lm(input_ids=ids).logits[:, -1].log_softmax(-1)
            token = torch.multinomial(log_p.exp(), 1, generator=draw)
            ids, logprobs = torch.cat([ids, token], 1), [*logprobs, log_p.gather(1, token)]
        replies, chosen = ids[:, len(prompt) :].tolist(), torch.cat(logprobs, 1).tolist()
        rows = [
            Row(
                prompt=prompt,
                reply=reply,
                logprobs=sampled,
                versions=[version] * _LENGTH,
                reward=judge(tokenizer.decode(reply)),
                group=index,
                attempt=attempt,
            )
            for attempt, (reply, sampled) in enumerate(zip(replies, chosen, strict=True))
        ]
        groups.append(group_of(rows, position=version * len(_PROMPTS) + index))
    return groups


def _train(log: RunLog, config: RunConfig, cache: Path, *, steps: int, judge: Judge) -> list[Step]:
    """Sample from the live policy, commit, claim, train; again and again."""
    worker = open_trainer(log, config, cache=cache)
    policies = PolicyReader(log, cache)
    rules = a_config(
        batch_size=len(_PROMPTS), n_samples=_ATTEMPTS, max_staleness=0, stale_policy="strict", min_usable=_ATTEMPTS
    )
    done = []
    for _ in range(steps):
        policy = log.refresh().live
        assert policy is not None
        groups = _rollouts(policies.fetch(policy), version=policy.version, judge=judge)
        commit(log, f"shard-{policy.version}", groups)
        claim = next_claim(log.refresh(), rules)
        assert claim is not None
        done.append(worker.train_step(claim, extra_metrics={}, round_seconds=0.0, session_id="learning"))
    return done


def _first_logprobs(folder: Path) -> torch.Tensor:
    """Of the first character of a reply to each prompt, shape [prompts, vocabulary]."""
    causal_lm = load_causal_lm(folder)
    with torch.no_grad():
        logits = [causal_lm(input_ids=torch.tensor([ids])).logits[0, -1] for ids in _chats(folder)[1]]
    return torch.stack(logits).log_softmax(-1)


def _probability_of_seven(folder: Path) -> float:
    """That the first character of a reply is a 7, mean over prompts."""
    seven = _chats(folder)[0].convert_tokens_to_ids("7")
    return float(_first_logprobs(folder)[:, seven].exp().mean())


def _kl_to(teacher: Path, folder: Path) -> float:
    """KL(policy ‖ teacher) over the first character of a reply, mean over prompts, in nats."""
    log_p, log_q = (_first_logprobs(each) for each in (folder, teacher))
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


def _last(log: RunLog, cache: Path, folder: Path) -> Path:
    """A copy of the newest policy."""
    live = log.refresh().live
    assert live is not None
    shutil.copytree(PolicyReader(log, cache).fetch(live), folder)
    return folder


def _rewards(steps: list[Step]) -> list[float]:
    return [step.metrics["reward"] for step in steps]


_SETTINGS: dict[str, Any] = {
    "ppo": {"advantage": {"kind": "gae", "lam": 0.9}, "critic": {"learning_rate": 1e-2, "warmup_steps": 2}},
    "sft": {"loss": {"kind": "sft"}},
}


@pytest.mark.parametrize("kind", _SETTINGS)
def test_reward_rises(tmp_path: Path, kind: str) -> None:
    """By PPO, whose critic also comes to expect it; and by imitating every attempt that began with a 7."""
    log = new_run(tmp_path, tiny_model(tmp_path / "model", init_range=0.02))
    config = config_of(learning_rate=1e-2, num_minibatches=2, **_SETTINGS[kind])
    judge = _sevens if kind == "ppo" else _begins_with_seven
    steps = _train(log, config, tmp_path / "cache", steps=30, judge=judge)
    rewards = _rewards(steps)
    assert np.mean(rewards[:3]) < 0.3
    assert np.mean(rewards[-3:]) > 0.8
    if kind == "ppo":
        # A critic that still says 0 would be off by the whole return.
        assert steps[0].metrics["value_error"] == pytest.approx(rewards[0], rel=0.3)
        assert steps[-1].metrics["value_error"] < 0.3 * rewards[-1]
    # Sampled from the very weights that are trained: the trainer's log-probabilities are the sampler's.
    assert max(step.metrics["engine_gap"] for step in steps) < 1e-5
    assert log.refresh().counters()["trained"] == 30 * len(_PROMPTS)


def test_a_teacher_is_copied_and_recorded_shards_train_every_objective(tmp_path: Path) -> None:
    """GRPO makes the teacher. On-policy distillation comes near it without a reward. What GRPO was recorded on then
    trains the base model by imitation and by the teacher, and nothing is sampled for that."""
    cache, base = tmp_path / "cache", tiny_model(tmp_path / "model", init_range=0.02)
    taught = new_run(tmp_path / "teacher", base)
    grpo = config_of(learning_rate=1e-2)
    assert np.mean(_rewards(_train(taught, grpo, cache, steps=25, judge=_begins_with_seven))[-3:]) > 0.8
    teacher = _last(taught, cache, tmp_path / "taught")

    log = new_run(tmp_path / "student", base)
    log.store.put_folder(teacher, model_key(str(teacher)), last=DIGEST_FILE)  # as the flow does
    reference = {"kind": "model", "model": str(teacher)}
    distill = config_of(learning_rate=1e-2, advantage="distill", reference=reference)
    steps = _train(log, distill, cache, steps=12, judge=lambda text: float("nan"))
    assert steps[-1].metrics["reference_kl"] < 0.3 * steps[0].metrics["reference_kl"]
    student = _last(log, cache, tmp_path / "learnt")
    assert _kl_to(teacher, student) < 0.3 * _kl_to(teacher, base)
    assert _probability_of_seven(student) > 0.7 > 0.2 > _probability_of_seven(base)

    taught.store.put_folder(teacher, model_key(str(teacher)), last=DIGEST_FILE)
    for name, objective in (("imitation", {"loss": "sft"}), ("distillation", {"advantage": "distill"})):
        changed = config_of(learning_rate=1e-2, reference=reference, **objective)
        options = {"recorded": grpo, "changed": changed, "resumed_from": 0, "save": tmp_path / name}
        again = replayed(taught, cache, 1, taught.refresh().step, **options)
        assert not any(step.identical for step in again)
        assert _probability_of_seven(tmp_path / name) > 0.7
