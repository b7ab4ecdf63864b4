"""A real step of TRL's `GRPOTrainer` on completions, log-probabilities and rewards that were made before.

In: a model folder, rows, TRL's options. Out: the optimizer updates it took, each with its loss and gradient.

Nothing of TRL's step is replaced but what the comparison needs: replies come from `rollout_func`, and in float64
the two places where TRL computes in float32 whatever the model's type is — its output layer and its rewards — are
written out in the model's own type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.unit.trainers.builders import NO_CLIPPING, Row

MAX_TOKENS = 8


class Update(NamedTuple):
    """One optimizer update."""

    loss: float
    gradients: dict[str, torch.Tensor]
    """By parameter name, as the optimizer sees them."""


class _Recorder(TrainerCallback):
    """Keeps the gradient of every optimizer update, after it was clipped."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.updates: list[Update] = []

    def on_pre_optimizer_step(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        found = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
        self.updates.append(Update(loss=sum(self.losses), gradients=found))
        self.losses.clear()


class _Recorded(GRPOTrainer):
    """As it is; writes down the loss of each micro-batch."""

    recorder: _Recorder

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        loss: torch.Tensor = super()._compute_loss(model, inputs)
        self.recorder.losses.append(float(loss.detach()))
        return loss


class _InFloat64(_Recorded):
    def _calculate_rewards(self, *arguments: Any) -> torch.Tensor:
        return super()._calculate_rewards(*arguments).double()

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *_: Any,
        **__: Any,
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
    dtype: torch.dtype,
    learning_rate: float,
    output_dir: Path,
    rewards: Mapping[str, Sequence[float]],
    **options: Any,
) -> tuple[list[Update], dict[str, torch.Tensor]]:
    """Two optimizer updates on the same rows, which are whole groups of equal size; and the weights after them.

    `rewards` holds one reward per row for each reward function.
    """
    attempts = sum(row.group == 0 for row in rows)
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype)
    config = GRPOConfig(
        output_dir=str(output_dir),
        **{
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "report_to": "none",
            "save_strategy": "no",
            "logging_strategy": "no",
            "disable_tqdm": True,
            "shuffle_dataset": False,
            "per_device_train_batch_size": len(rows),
            "num_generations": attempts,
            "num_iterations": 2,
            "max_steps": 2,
            "max_completion_length": MAX_TOKENS,
            "learning_rate": learning_rate,
            "lr_scheduler_type": "constant",
            "optim": "adamw_torch",
            "adam_beta1": 0.9,
            "adam_beta2": 0.99,
            "adam_epsilon": 1e-8,
            "weight_decay": 0.0,
            "max_grad_norm": NO_CLIPPING,
            **options,
        },
    )
    recorder = _Recorder()

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        assert prompts == [str(row.group) for row in rows]
        return {
            "prompt_ids": [row.prompt for row in rows],
            "completion_ids": [row.reply for row in rows],
            "logprobs": [row.logprobs for row in rows],
            **{name: list(values) for name, values in rewards.items()},
        }

    chosen = _InFloat64 if dtype == torch.float64 else _Recorded
    trainer = chosen(
        model=model,
        reward_funcs=[_given(name) for name in rewards],
        args=config,
        train_dataset=datasets.Dataset.from_dict({"prompt": [str(g) for g in range(len(rows) // attempts)]}),
        processing_class=AutoTokenizer.from_pretrained(str(folder)),
        callbacks=[recorder],
        rollout_func=rollout,
    )
    trainer.recorder = recorder
    trainer.train()
    return recorder.updates, {name: p.detach().clone() for name, p in model.named_parameters()}


def _given(name: str) -> Callable[..., list[float]]:
    """A reward function that returns what the rollout said."""

    def reward(**columns: Any) -> list[float]:
        found: list[float] = columns[name]
        return found

    reward.__name__ = name
    return reward
