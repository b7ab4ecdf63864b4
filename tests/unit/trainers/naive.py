"""One update of a trainer written down naively: one sequence at a time, in transformers' own model, without packs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tests.unit.trainers.builders import Row, gradients, largest_difference, load_causal_lm, weights
from trainers.model.distributed import full
from trainers.trainer import Trainer

PREFIX = "causal_lm."


def policy_of(folder: Path, trainer: Trainer | None = None) -> torch.nn.Module:
    """The folder's model in transformers, with the weights the trainer has by now where one is given."""
    causal_lm = load_causal_lm(folder)
    if trainer is not None:
        with torch.no_grad():
            for name, parameter in causal_lm.named_parameters():
                parameter.copy_(weights(trainer)[PREFIX + name])
    return causal_lm


def reply_logprobs(causal_lm: torch.nn.Module, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each token of the reply, and the policy's entropy there; both of the reply's length."""
    ids = torch.tensor(row.prompt + row.reply)
    log_p = causal_lm(input_ids=ids[None]).logits[0].log_softmax(-1)[len(row.prompt) - 1 : -1]
    return log_p.gather(1, torch.tensor(row.reply)[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def fixed_logprobs(causal_lm: torch.nn.Module, row: Row) -> torch.Tensor:
    """The same without a gradient."""
    with torch.no_grad():
        return reply_logprobs(causal_lm, row)[0]


def grpo_advantage(rewards: Sequence[float], index: int, rows: Sequence[Row]) -> float:
    """Of row `index`, whose reward is `rewards[index]`; null rewards are left out."""
    own = rewards[index]
    group = [r for r, row in zip(rewards, rows, strict=True) if row.group == rows[index].group and not np.isnan(r)]
    return 0.0 if np.isnan(own) else float((own - np.mean(group)) / (np.std(group, ddof=1) + 1e-4))


def surrogate(new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor | float) -> torch.Tensor:
    """PPO's clipped one, with the default bounds."""
    ratio = (new - old).exp()
    return torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)


def gradient_of(loss: torch.Tensor, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By parameter name, of those that have one."""
    loss.backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def assert_same_gradient(trainer: Trainer, expected: dict[str, torch.Tensor], *, atol: float = 5e-6) -> None:
    """The gradient of the trainer's last update is `expected`, which is not zero."""
    found = {name.removeprefix(PREFIX): gradient for name, gradient in gradients(trainer).items()}
    assert largest_difference(found, expected) < atol
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 100 * atol


def everything(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Weights, moments and counters of policy and critic, copied: what an update may change."""
    owners = [("policy", trainer.model, trainer.optimizer)]
    if trainer.critic is not None:
        owners.append(("critic", trainer.critic.model, trainer.critic.optimizer))
    found = {}
    for owner, model, optimizer in owners:
        for name, parameter in model.named_parameters():
            found[f"{owner}.{name}"] = full(parameter).clone()
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"{owner}.{name}.{key}"] = full(value).clone()
    if trainer.ema is not None:
        found |= {name: tensor.clone() for name, tensor in trainer.ema.state_tensors().items()}
    return found
