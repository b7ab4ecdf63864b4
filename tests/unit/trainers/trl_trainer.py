"""Optimizer updates of TRL's own `GRPOTrainer` on replies and rewards that were made before.

In: a model folder, rows, rewards, TRL's options. Out: loss and gradient of each update, and the weights after them.

`GRPOTrainer` itself runs, from its sampler to its optimizer; replies come through its `rollout_func`. In float64 one
thing is replaced: its output layer computes in float32 whatever the model's type is. Its intermediate numbers of no
stated type follow torch's default type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.unit.trainers.builders import NO_CLIPPING, Row


class Updates(NamedTuple):
    """What two optimizer updates did, by TRL or by us."""

    losses: list[float]
    gradients: list[dict[str, torch.Tensor]]
    """That each update saw, by parameter name."""
    weights: dict[str, torch.Tensor]
    """After both."""
    metrics: dict[str, float]
    """Ours; of TRL's those that we have too, by our names."""


class _Recorder(TrainerCallback):
    def __init__(self) -> None:
        self.losses: list[float] = [0.0]
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.shares: list[tuple[float, float]] = []

    def on_pre_optimizer_step(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        self.gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        self.losses.append(0.0)


class _Recorded(GRPOTrainer):
    """As it is; losses of micro-batches are added up, and the shares of their tokens that are clipped are kept."""

    recorder: _Recorder

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        loss: torch.Tensor = super()._compute_loss(model, inputs)
        self.recorder.losses[-1] += float(loss.detach())
        metrics = self._metrics["train"]
        self.recorder.shares.append((metrics.get("clip_ratio/region_mean", [0.0])[-1], metrics["entropy"][-1]))
        return loss


class _InFloat64(_Recorded):
    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
        log_p = (logits / self.temperature).log_softmax(-1)
        assert log_p.dtype == torch.float64
        logprobs = log_p.gather(-1, input_ids[:, -logits_to_keep:, None])[..., 0]
        return logprobs, -(log_p.exp() * log_p).sum(-1), None


def trl_updates(
    folder: Path,
    rows: Sequence[Row],
    *,
    rewards: Mapping[str, Sequence[float | None]],
    dtype: torch.dtype,
    output_dir: Path,
    reference: Path | None = None,
    **options: Any,
) -> Updates:
    """Two updates on the same rows, which are groups of equal size, in order; then the weights.

    `rewards` has an entry for each reward function, with one number per row. `options` are fields of `GRPOConfig`.
    """
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype)
    if reference is not None:
        model.config._name_or_path = str(reference)  # from where TRL loads it
    recorder = _Recorder()
    defaults = {
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "shuffle_dataset": False,
        "per_device_train_batch_size": len(rows),
        "num_generations": sum(row.group == rows[0].group for row in rows),
        "num_iterations": 2,
        "max_steps": 2,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "adam_beta1": 0.9,
        "adam_beta2": 0.99,
        "max_grad_norm": NO_CLIPPING,
    }

    def rollout(prompts: list[str], _: GRPOTrainer) -> dict[str, list[Any]]:
        assert prompts == [str(row.group) for row in rows]
        return {
            "prompt_ids": [row.prompt for row in rows],
            "completion_ids": [row.reply for row in rows],
            "logprobs": [row.logprobs for row in rows],
            **{name: list(values) for name, values in rewards.items()},
        }

    with _default_dtype(dtype):
        trainer = (_InFloat64 if dtype == torch.float64 else _Recorded)(
            model=model,
            reward_funcs=[_reward_function(name) for name in rewards],
            args=GRPOConfig(output_dir=str(output_dir), **{**defaults, **options}),
            train_dataset=datasets.Dataset.from_dict({"prompt": sorted({str(row.group) for row in rows})}),
            processing_class=AutoTokenizer.from_pretrained(str(folder)),
            callbacks=[recorder],
            rollout_func=rollout,
        )
        trainer.recorder = recorder
        trainer.train()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    clip_fraction, entropy = np.mean(recorder.shares, axis=0).tolist()
    norms = [float(sum(g.square().sum() for g in gradient.values())) ** 0.5 for gradient in recorder.gradients]
    metrics = {"clip_fraction": clip_fraction, "entropy": entropy, "grad_norm": float(np.mean(norms))}
    return Updates(recorder.losses[:-1], recorder.gradients, weights, metrics)


def _reward_function(name: str) -> Callable[..., list[float | None]]:
    """It returns what the rollout came with."""

    def reward(**columns: Any) -> list[float | None]:
        return list(columns[name])

    reward.__name__ = name
    return reward


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
