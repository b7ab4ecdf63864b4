"""A step of ours and a real step of TRL's `GRPOTrainer` on the same completions: losses, gradients, weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.unit.trainers.builders import Row, gradients, logprobs_alone, recipe_of, samples_of, take_step, weights, NO_CLIPPING
from trainers.config import Recipe, TrainSettings
from trainers.distributed import shard
from trainers.model import PolicyModel, load_model
from trainers.samples import Samples
from trainers.trainer import Trainer

pytest.importorskip("trl")
from tests.unit.trainers.trl_trainer import Update, trl_updates

LEARNING_RATE = 3e-3


class _Recording(Trainer):
    def __init__(self, folder: Path, recipe: Recipe, *, reference: Path | None = None) -> None:
        self.updates: list[Update] = []
        super().__init__(folder, recipe, reference=reference)

    def _update(self, *arguments: Any, **named: Any) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        sums, norms, gap = super()._update(*arguments, **named)
        self.updates.append(Update(loss=sums["loss"], gradients=_plain(gradients(self))))
        return sums, norms, gap


class _InFloat64(_Recording):
    def _load(self, folder: Path, settings: TrainSettings) -> PolicyModel:
        model = load_model(folder, dtype=torch.float64)
        shard(model, model.layers, mesh=self._mesh, dtype=torch.float64)
        return model


def _plain(named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("causal_lm."): tensor for name, tensor in named.items()}


def _rows(folder: Path, *, temperature: float = 1.0) -> list[Row]:
    draw = np.random.default_rng(0)
    causal_lm = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float64)
    rows = []
    for group in range(4):
        prompt = draw.integers(4, 16, size=4).tolist()
        for attempt in range(4):
            reply = draw.integers(1, 16, size=draw.integers(1, 9)).tolist()
            with torch.no_grad():
                lp = logprobs_alone(causal_lm, prompt + reply, temperature=temperature)[len(prompt) - 1 :].tolist()
            rows.append(Row(prompt=prompt, reply=reply, logprobs=lp, versions=[0] * len(reply), reward=0.375 if group == 2 else float(draw.integers(0, 9)) / 8, group=group, attempt=attempt))
    return rows


def test_proto(tiny_folder, tmp_path):
    import time
    rows = _rows(tiny_folder)
    t = time.time()
    theirs, tw = trl_updates(tiny_folder, rows, dtype=torch.float64, learning_rate=LEARNING_RATE, output_dir=tmp_path, rewards={"reward": [r.reward for r in rows]})
    print("trl", time.time() - t)
    t = time.time()
    recipe = recipe_of(learning_rate=LEARNING_RATE, preset="trl", num_epochs=2, max_grad_norm=NO_CLIPPING, max_gap=1e9)
    trainer = _InFloat64(tiny_folder, recipe)
    samples = dataclasses.replace(samples_of(rows), logprobs_T=np.concatenate([[0.0] * len(r.prompt) + r.logprobs for r in rows]))
    metrics = take_step(trainer, samples)
    print("ours", time.time() - t)
    print(metrics)
    for a, b in zip(trainer.updates, theirs, strict=True):
        print(a.loss, b.loss)
        assert a.gradients.keys() == b.gradients.keys()
        for n in a.gradients:
            x, y = a.gradients[n], b.gradients[n]
            assert x.dtype == torch.float64, x.dtype
            print(n, x.abs().max().item(), (x - y).abs().max().item(), ((x - y).abs() / (y.abs() + 1e-30)).max().item())
    ow = _plain(weights(trainer))
    print({n: ((ow[n] - tw[n]).abs().max().item(), ((ow[n] - tw[n]).abs()/tw[n].abs()).max().item()) for n in tw})
    assert 0
