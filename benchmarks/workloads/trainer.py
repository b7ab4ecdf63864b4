"""What the trainer's benchmarks train on: models with random weights, and groups as a rollout worker records them.

In: sizes. Out: a model folder, shard tables, and a run's settings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.workloads.trajectories import provenance_of
from settings.run_file import RunConfig
from storage.log.entries import ClaimedGroup
from storage.records import Message, RolloutGroup, Sampling, Task, Trajectory, Turn
from storage.shards.codec import shard_table
from trainers.data.samples import COLUMNS, Samples, gather_samples

VOCABULARY = 64
LEARNING_RATE = 1e-6
NOISE = 0.05
"""Deviation of the recorded log-probabilities from those of a uniform choice, in nats: ratios are near 1, not at it."""

Length = Callable[[np.random.Generator], int]


def model_folder(folder: Path, *, hidden_size: int, num_layers: int, seed: int = 0) -> Path:
    """A random Qwen2 in HF layout without a tokenizer: the trainer needs none."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def random_groups(
    *, num_groups: int, attempts: int, prompt_length: Length, reply_length: Length, seed: int = 0
) -> list[RolloutGroup]:
    """Groups of attempts at random tokens with random rewards."""
    draw = np.random.default_rng(seed)

    def attempt(number: int, prompt: list[int]) -> Trajectory:
        reply = draw.integers(1, VOCABULARY, size=reply_length(draw)).tolist()
        logprobs = np.minimum(NOISE * draw.standard_normal(len(reply)) - np.log(VOCABULARY), -1e-4)
        turn = Turn(
            context_ids=prompt,
            sampled_ids=reply,
            logprobs=logprobs.tolist(),
            weight_versions=[0] * len(reply),
            finish_reason="stop",
        )
        message = Message(role="user", content="")
        return Trajectory(attempt=number, turns=[turn], messages=[message], status="ok", reward=float(draw.random()))

    groups = []
    for position in range(num_groups):
        prompt = draw.integers(1, VOCABULARY, size=prompt_length(draw)).tolist()
        groups.append(
            RolloutGroup(
                id=f"0.{position}",
                task=Task(id=str(position), prompt=""),
                position=position,
                epoch=0,
                expected=attempts,
                trajectories=[attempt(number, prompt) for number in range(attempts)],
            )
        )
    return groups


def shard_tables(groups: Sequence[RolloutGroup], *, num_shards: int) -> tuple[list[ClaimedGroup], dict[str, pa.Table]]:
    """The groups in equal runs over shards, as storage makes their tables; and the claim of all of them."""
    claimed: list[ClaimedGroup] = []
    tables: dict[str, pa.Table] = {}
    for number, part in enumerate(np.array_split(np.arange(len(groups)), num_shards)):
        shard_id = f"shard{number}"
        mine = [groups[index] for index in part]
        tables[shard_id] = shard_table(mine, provenance=provenance_of(shard_id), sampling=Sampling()).select(
            list(COLUMNS)
        )
        claimed += [ClaimedGroup(shard_id=shard_id, group_id=group.id) for group in mine]
    return claimed, tables


def samples_of(groups: Sequence[RolloutGroup], *, num_shards: int = 1) -> Samples:
    """What a step trains on, read from tables."""
    return gather_samples(*shard_tables(groups, num_shards=num_shards))


def config_of(*, max_tokens: int, **train: object) -> RunConfig:
    """Defaults on the CPU but for what is given; no gap to the made-up engine is too large."""
    return RunConfig.model_validate(
        {
            "workflow": "",
            "learning_rate": LEARNING_RATE,
            "sampling": {"max_tokens": max_tokens},
            "engine": {"max_model_len": max_tokens + 1},
            "train": {"device": "cpu", "max_gap": 1e9, **train},
        }
    )


def groups_of_w(*, num_groups: int = 32, attempts: int = 8) -> list[RolloutGroup]:
    """Workload W's lengths: prompts of 16 to 32 tokens, replies geometric with mean 64, cut at 256."""
    return random_groups(
        num_groups=num_groups,
        attempts=attempts,
        prompt_length=lambda draw: int(draw.integers(16, 33)),
        reply_length=lambda draw: min(256, int(draw.geometric(1 / 64))),
    )
