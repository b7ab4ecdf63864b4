"""Tiny inputs for trainer tests: a random 2-layer model, rows of tokens, and a run whose shards are made by hand."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from settings.run_file import RunConfig
from storage.log.entries import Policy, Shard
from storage.log.replay_plan import ReplayedStep, plan_replay
from storage.log.run_log import RunLog
from storage.log.runs import create_run
from storage.objects.digests import DIGEST_FILE, seal_folder, verify_folder
from storage.objects.object_store import LocalStore
from storage.records import RolloutGroup, Sampling
from storage.shards.shards import commit_shard
from tests.builders import a_group, a_trajectory, a_turn, provenance
from trainers.critic import Critic
from trainers.data.samples import Samples
from trainers.model.distributed import full
from trainers.model.warmup import character_tokenizer
from trainers.replay import ReplayWorker
from trainers.trainer import Trainer
from trainers.worker import TrainerWorker

CHARACTERS = "0123456789+="
NO_CLIPPING = 1e9
"""A gradient norm no test reaches, so that `gradients` are those of the loss."""


def tiny_model(folder: Path, *, seed: int = 0, tied: bool = True, init_range: float = 0.2) -> Path:
    """A sealed folder with a random model of 2 layers and the character tokenizer.

    `init_range` is ten times the usual one: next to a nearly uniform model, a wrong mask would go unseen.
    """
    torch.manual_seed(seed)
    tokenizer = character_tokenizer(set(CHARACTERS))
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=init_range,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    seal_folder(folder)
    return folder


def full_model(folder: Path) -> dict[str, torch.Tensor]:
    """A model in two files whose index names more than the trainer computes with, in more than one type, beside a file
    that it does not name; returns what it names."""
    tensors = load_file(tiny_model(folder, tied=True) / "model.safetensors")
    tensors = {name: tensor if "norm" in name else tensor.bfloat16() for name, tensor in tensors.items()}
    tensors["model.norm.weight"] = 1 + torch.arange(32) / 1e5  # bfloat16 would make it 1
    tensors |= {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),  # tied, and stored all the same
        "mtp.layers.0.proj.weight": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "visual.blocks.0.counts": torch.arange(5),
        "visual.scale": torch.tensor([float("nan")], dtype=torch.float16),
    }
    for file in (folder / "model.safetensors", folder / DIGEST_FILE):
        file.unlink()
    save_file({"a": torch.zeros(3, dtype=torch.float64)}, folder / "consolidated.safetensors")
    names = sorted(tensors)
    files = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file_name, its in files.items():
        save_file({name: tensors[name] for name in its}, folder / file_name, metadata={"format": "pt"})
    weight_map = {name: file_name for file_name, its in files.items() for name in its}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    seal_folder(folder)
    return tensors


def load_causal_lm(folder: Path, *, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The model as transformers alone loads it: the reference for everything packed, chunked and sharded."""
    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype)


def logprobs_alone(causal_lm: torch.nn.Module, input_ids: Sequence[int], *, temperature: float = 1.0) -> torch.Tensor:
    """Log-probability of every token after the first, from one sequence in one plain forward pass; shape [T − 1]."""
    ids = torch.tensor(list(input_ids))
    log_p = (causal_lm(input_ids=ids[None]).logits[0] / temperature).log_softmax(-1)
    return log_p[:-1].gather(1, ids[1:, None])[:, 0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One attempt of one turn."""

    prompt: list[int]
    reply: list[int]
    logprobs: list[float]
    versions: list[int]
    reward: float
    group: int
    attempt: int


def row_of(
    reply: list[int], *, prompt: Sequence[int] = (1,), logprob: float = -0.5, version: int = 0, **changes: Any
) -> Row:
    """A row whose tokens were all sampled alike."""
    sampled = {"logprobs": [logprob] * len(reply), "versions": [version] * len(reply)}
    return Row(
        **{"prompt": list(prompt), "reply": reply, **sampled, "reward": 0.0, "group": 0, "attempt": 0, **changes}
    )


def random_rows(
    folder: Path,
    *,
    num_groups: int = 4,
    attempts: int = 3,
    seed: int = 0,
    noise: float = 0.3,
    temperature: float = 1.0,
    prompt_tokens: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
) -> list[Row]:
    """Attempts of uneven length, as if sampled by a policy that differs from the folder's by `noise` per token.

    Prompts are of random length, unless `prompt_tokens` has one for each group.
    """
    draw = np.random.default_rng(seed)
    causal_lm = load_causal_lm(folder, dtype=dtype)
    rows = []
    for group in range(num_groups):
        prompt = draw.integers(4, 16, size=prompt_tokens[group] if prompt_tokens else draw.integers(2, 6)).tolist()
        for attempt in range(attempts):
            reply = draw.integers(1, 16, size=draw.integers(1, 9)).tolist()
            with torch.no_grad():
                exact = logprobs_alone(causal_lm, prompt + reply, temperature=temperature)[len(prompt) - 1 :].numpy()
            rows.append(
                Row(
                    prompt=prompt,
                    reply=reply,
                    logprobs=np.minimum(exact + noise * draw.standard_normal(len(reply)), -1e-4).tolist(),
                    versions=[0] * len(reply),
                    reward=float(draw.random()),
                    group=group,
                    attempt=attempt,
                )
            )
    return rows


def samples_of(rows: Sequence[Row]) -> Samples:
    """The flat arrays `gather_samples` would make of these rows."""
    lengths = [len(row.prompt) + len(row.reply) for row in rows]
    _, attempts_B = np.unique([(row.group, row.attempt) for row in rows], axis=0, return_inverse=True)
    return Samples(
        input_ids_T=np.concatenate([row.prompt + row.reply for row in rows]).astype(np.int64),
        mask_T=np.concatenate([[False] * len(row.prompt) + [True] * len(row.reply) for row in rows]),
        logprobs_T=np.concatenate([[0.0] * len(row.prompt) + row.logprobs for row in rows]).astype(np.float32),
        versions_T=np.concatenate([[-1] * len(row.prompt) + row.versions for row in rows]).astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        attempts_B=attempts_B.reshape(-1),
        groups_B=np.array([row.group for row in rows], dtype=np.int32),
        rewards_B=np.array([row.reward for row in rows], dtype=np.float32),
    )


def routed(samples: Samples, *, layers: int, experts: int = 4) -> Samples:
    """Samples with 2 experts in every layer for all tokens but each row's last. What begins alike has the same."""
    place_T = np.concatenate([np.arange(length) for length in np.diff(samples.offsets)])
    first = (7 * samples.input_ids_T + 3 * place_T)[:, None, None] + np.arange(layers)[:, None]
    routed_T = np.ones(len(place_T), bool)
    routed_T[samples.offsets[1:] - 1] = False
    routes_T = np.concatenate([first % experts, (first + 1) % experts], -1).astype(np.uint8)
    return dataclasses.replace(samples, routes_T=routes_T, routed_T=routed_T)


def named_samples_of(rows: Sequence[Row], *, shards: int = 1) -> Samples:
    """Samples with names for groups and shards; groups go to the shards in turn."""
    samples = samples_of(rows)
    return dataclasses.replace(
        samples,
        group_ids=[f"0.prompt-{group}" for group in range(int(samples.groups_B.max()) + 1)],
        attempt_numbers_B=np.array([row.attempt for row in rows], dtype=np.int64),
        shards_B=(samples.groups_B % shards).astype(np.int64),
        shard_ids=[f"shard-{shard}" for shard in range(shards)],
    )


def config_of(
    *,
    learning_rate: float = 1e-3,
    temperature: float = 1.0,
    max_staleness: float = 0,
    seed: int = 0,
    reward_weights: dict[str, float] | None = None,
    **train: object,
) -> RunConfig:
    """A run's settings on the CPU, with replies of up to 8 tokens; `train` are those of its `[train]`."""
    return RunConfig.model_validate(
        {
            "workflow": "",
            "learning_rate": learning_rate,
            "sampling": {"temperature": temperature, "max_tokens": 8},
            "engine": {"max_model_len": 16},
            "reward": {"weights": reward_weights or {}},
            "max_staleness": max_staleness,
            "seed": seed,
            "steps": train.get("decay_steps", 1000),
            "train": {"device": "cpu", **train},
        }
    )


def trainer_of(
    folder: Path, *, learning_rate: float = 1e-3, temperature: float = 1.0, seed: int = 0, **settings: object
) -> Trainer:
    """A trainer that does not clip gradients unless told to."""
    chosen = {"max_grad_norm": NO_CLIPPING, **settings}
    config = config_of(learning_rate=learning_rate, temperature=temperature, seed=seed, **chosen)
    reference = folder if config.train.reference.kind == "base" else None
    return Trainer(folder, config, reference=reference)


def take_step(
    trainer: Trainer, samples: Samples, *, step: int = 1, max_staleness: int = 0, max_gap: float = math.inf
) -> dict[str, float]:
    """One optimizer step on a policy whose version is the number of steps before."""
    return trainer.step(samples, step=step, base_version=step - 1, max_staleness=max_staleness, max_gap=max_gap)


def weights(trainer: Trainer | Critic | None) -> dict[str, torch.Tensor]:
    """Whole parameters by name, copied; of the policy, or of the critic."""
    assert trainer is not None
    return {name: full(parameter).clone() for name, parameter in trainer.model.named_parameters()}


def gradients(trainer: Trainer | Critic | None) -> dict[str, torch.Tensor]:
    """Whole gradients of the last mini-batch by parameter name, copied."""
    assert trainer is not None
    return {name: full(p.grad).clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest absolute difference of any two elements; keys must agree."""
    assert a.keys() == b.keys() and a
    return max(float((a[name].detach() - b[name].detach()).abs().max()) for name in a)


def new_run(root: Path, model: Path, *, reference: str = "") -> RunLog:
    """A run in a fresh store under `root` whose base policy is a copy of the folder `model`."""
    store = LocalStore(root / "store")
    log = create_run(store, "run", {})
    store.put_folder(model, "models/tiny", last=DIGEST_FILE)
    digest = verify_folder(model)
    log.append(Policy(version=0, path="models/tiny", weights_sha256=digest, parent=None, reference=reference))
    return log


def group_of(rows: Sequence[Row], *, position: int) -> RolloutGroup:
    """The rows as the attempts of one group."""
    trajectories = []
    for row in rows:
        turn = a_turn(row.reply, context=row.prompt, versions=row.versions)
        turns = [dataclasses.replace(turn, logprobs=row.logprobs)]
        trajectories.append(a_trajectory(row.reward, attempt=row.attempt, turns=turns))
    return a_group(position, trajectories=trajectories)


def groups_of(rows: Sequence[Row]) -> list[RolloutGroup]:
    """The rows as groups, whose numbers are their positions."""
    numbers = dict.fromkeys(row.group for row in rows)
    return [group_of([row for row in rows if row.group == number], position=number) for number in numbers]


def commit(log: RunLog, shard_id: str, groups: Sequence[RolloutGroup]) -> Shard:
    """Write the groups as one shard of the run, by a producer that does not say which tokenizer it has."""
    made_by = dataclasses.replace(provenance(shard_id, run_id=log.run_id), tokenizer_sha256="")
    return commit_shard(log, groups, provenance=made_by, sampling=Sampling())


def open_trainer(log: RunLog, config: RunConfig, *, cache: Path, sends: bool = False) -> TrainerWorker:
    """The run's trainer, ready for its next step."""
    opening = TrainerWorker.open(
        store_uri=log.store.uri, run_id=log.run_id, config=config, cache=str(cache), sends=sends
    )
    return asyncio.run(opening)


def replayed(
    log: RunLog,
    cache: Path,
    first: int,
    last: int,
    *,
    recorded: RunConfig,
    changed: RunConfig,
    rewards: str = "",
    resumed_from: int | None = None,
    save: Path | None = None,
) -> list[ReplayedStep]:
    """Steps trained again as the flow does with a worker; the policy that comes out is kept in `save`."""
    plan = plan_replay(log.refresh(), run=log.run_id, first=first, last=last, rewards=rewards)
    opening = ReplayWorker.open(
        store_uri=log.store.uri,
        run_id=log.run_id,
        plan=plan,
        recorded=recorded,
        changed=changed,
        rewards=rewards,
        cache=str(cache),
    )
    worker = asyncio.run(opening)
    try:
        assert worker.opened == (plan.resumed_from if resumed_from is None else resumed_from)
        assert all([worker.lead_up(step) for step in range(worker.opened + 1, first)])
        steps = [worker.retrain(step) for step in range(first, last + 1)]
        if save is not None:
            worker.save_policy(str(save))
        return steps
    finally:
        worker.close()
        assert not worker._scratch.exists()
