"""Synthetic trajectories of 1,000 tokens for measurements of storage.

In: a number of rows. Out: the groups a rollout worker would hold, and the same as plain rows for JSON or pickle.

A trajectory has two turns, 800 of its tokens are sampled. Token ids follow Zipf's law over 150,000 words, logprobs are
float32 as an engine returns them, messages are the words of the ids. The same number gives the same rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from storage.log.history import to_json
from storage.records import Message, RolloutGroup, Sampling, Task, Trajectory, Turn
from storage.shards.codec import Provenance

ATTEMPTS = 8
VOCABULARY = 150_000


def provenance_of(shard_id: str, *, run_id: str = "benchmark") -> Provenance:
    """Where a benchmark's shard comes from."""
    return Provenance(
        run_id=run_id,
        shard_id=shard_id,
        producer="rollout-0",
        tokenizer_sha256="",
        chat_template_sha256="",
        config_sha256="",
        code_version="",
    )


def make_groups(num_rows: int) -> list[RolloutGroup]:
    """Groups of 8 attempts as the rollout worker holds them; always the same ones."""
    draw = np.random.default_rng(0)
    likely = np.cumsum(1.0 / (np.arange(VOCABULARY) + 2.7))
    letters = draw.integers(97, 123, size=(VOCABULARY, 8), dtype=np.uint8).tobytes().decode()
    words = [letters[8 * i : 8 * i + 1 + min(7, i.bit_length() // 2)] for i in range(VOCABULARY)]

    def ids(count: int) -> list[int]:
        return np.searchsorted(likely, draw.random(count) * likely[-1]).tolist()

    def text(tokens: list[int]) -> str:
        return " ".join([words[token] for token in tokens])

    def turn(context: list[int], count: int, versions: list[int]) -> Turn:
        return Turn(
            context_ids=context,
            sampled_ids=ids(count),
            logprobs=(-(np.abs(draw.standard_normal(count)) ** 3)).astype(np.float32).tolist(),
            weight_versions=versions,
            finish_reason="stop",
            generate_seconds=1.5,
        )

    def attempt(number: int, prompt: list[int]) -> Trajectory:
        swapped = 150 if number == 0 else 0  # a new policy arrives in the middle of one attempt in eight
        turns = [turn(list(prompt), 500, [5] * 500), turn(ids(50), 300, [5] * swapped + [6] * (300 - swapped))]
        chat = [
            Message(role=role, content=text(tokens), is_completion=role == "assistant")
            for one in turns
            for role, tokens in (("user", one.context_ids), ("assistant", one.sampled_ids))
        ]
        return Trajectory(
            attempt=number,
            turns=turns,
            messages=chat,
            status="ok",
            reward=float(draw.random()),
            reward_parts={"exact": 1.0, "format": 0.5},
            started_at=1.7e9 + float(draw.random()),
            finished_at=1.7e9 + 10,
        )

    groups = []
    for position in range(num_rows // ATTEMPTS):
        prompt = ids(150)
        task = Task(id=f"task{position}", prompt=text(prompt))
        groups.append(
            RolloutGroup(
                id=f"0.{task.id}",
                task=task,
                position=position,
                epoch=0,
                expected=ATTEMPTS,
                trajectories=[attempt(number, prompt) for number in range(ATTEMPTS)],
                queued_at=1.7e9,
            )
        )
    return groups


def moved(groups: list[RolloutGroup], shard: int) -> list[RolloutGroup]:
    """The same attempts at other places of the prompt order, so that each shard may be committed to one log."""
    offset = shard * len(groups)
    return [dataclasses.replace(g, id=f"{shard}.{g.task.id}", position=g.position + offset) for g in groups]


def plain_rows(groups: list[RolloutGroup]) -> Iterator[dict[str, Any]]:
    """The columns of a shard as the rows of plain values one would write to JSON or pickle."""
    sampling = to_json(Sampling())
    for group in groups:
        for sample_idx, t in enumerate(group.trajectories):
            row: dict[str, Any] = {"input_ids": [], "loss_mask": [], "logprobs": [], "weight_versions": []}
            for turn in t.turns:
                before, sampled = len(turn.context_ids), len(turn.sampled_ids)
                row["input_ids"] += turn.context_ids + turn.sampled_ids
                row["loss_mask"] += [False] * before + [True] * sampled
                row["logprobs"] += [0.0] * before + turn.logprobs
                row["weight_versions"] += [-1] * before + turn.weight_versions
            yield row | {
                "group_id": group.id,
                "prompt_id": group.task.id,
                "epoch": group.epoch,
                "attempt": t.attempt,
                "sample_idx": sample_idx,
                "sequence_idx": 0,
                "group_expected": group.expected,
                "group_usable": ATTEMPTS,
                "head_version": 5,
                "tail_version": 6,
                "prompt_len": 150,
                "reward": t.reward,
                "reward_parts": t.reward_parts,
                "accepted": group.accepted,
                "reject_reason": group.reject_reason,
                "status": t.status,
                "turns": [
                    {
                        "context_len": len(turn.context_ids),
                        "sampled_len": len(turn.sampled_ids),
                        "finish_reason": turn.finish_reason,
                        "generate_seconds": turn.generate_seconds,
                        "tool_calls": [],
                    }
                    for turn in t.turns
                ],
                "messages": [vars(message) for message in t.messages],
                "sampling": sampling,
                "is_eval": False,
                "worker_id": "rollout-0",
                "queued_at": group.queued_at,
                "started_at": t.started_at,
                "finished_at": t.finished_at,
            }
