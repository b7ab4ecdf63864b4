"""One update of a trainer written down naively: one sequence at a time, in transformers' own model, without packs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.unit.trainers.builders import Row, gradients, largest_difference, load_causal_lm, weights
from trainers.critic import Critic
from trainers.model.distributed import full
from trainers.trainer import Trainer

PREFIX = "causal_lm."


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A row's sampled tokens; every tensor has the reply's length."""

    row: Row
    new: torch.Tensor
    """Log-probabilities under the policy, with gradient."""
    old: torch.Tensor
    """Log-probabilities as they were sampled."""
    advantage: float
    """GRPO's, from the row's rewards."""

    def clipped(self, advantage: Any = None, *, old: torch.Tensor | None = None) -> torch.Tensor:
        """PPO's surrogate with the default bounds, by default under the GRPO advantage and around the sampler."""
        advantage = self.advantage if advantage is None else advantage
        ratio = (self.new - (self.old if old is None else old)).exp()
        return torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)


Term = Callable[[Reply], torch.Tensor]


def policy_of(folder: Path, trainer: Trainer | None = None) -> torch.nn.Module:
    """The folder's model in transformers, with the weights the trainer has by now where one is given."""
    causal_lm = load_causal_lm(folder)
    if trainer is not None:
        with torch.no_grad():
            for name, parameter in causal_lm.named_parameters():
                parameter.copy_(weights(trainer)[PREFIX + name])
    return causal_lm


def replies_of(policy: torch.nn.Module, rows: Sequence[Row], *, rewards: Sequence[float] | None = None) -> list[Reply]:
    """The rows under a policy, with the GRPO advantages of `rewards`, by default their own."""
    rewards = [row.reward for row in rows] if rewards is None else rewards
    replies = []
    for row, reward in zip(rows, rewards, strict=True):
        log_p = _distributions(policy, row)
        group = [r for r, other in zip(rewards, rows, strict=True) if other.group == row.group]
        replies.append(
            Reply(
                row=row,
                new=log_p.gather(1, torch.tensor(row.reply)[:, None])[:, 0],
                old=torch.tensor(row.logprobs),
                advantage=float((reward - np.mean(group)) / (np.std(group, ddof=1) + 1e-4)),
            )
        )
    return replies


def fixed_logprobs(causal_lm: torch.nn.Module, row: Row) -> torch.Tensor:
    """Log-probabilities of the reply, without a gradient."""
    with torch.no_grad():
        return _distributions(causal_lm, row).gather(1, torch.tensor(row.reply)[:, None])[:, 0]


def _distributions(policy: torch.nn.Module, row: Row) -> torch.Tensor:
    ids = torch.tensor(row.prompt + row.reply)
    return policy(input_ids=ids[None]).logits[0].log_softmax(-1)[len(row.prompt) - 1 : -1]


def token_mean(replies: Sequence[Reply], term: Term) -> torch.Tensor:
    """The mean of a term over all sampled tokens."""
    return torch.cat([term(reply) for reply in replies]).sum() / num_tokens([reply.row for reply in replies])


def num_tokens(rows: Sequence[Row]) -> int:
    return sum(len(row.reply) for row in rows)


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
    """Weights, moments and counters of policy and critic, and the average, copied: what an update may change."""
    tensors = {}
    owners: list[Trainer | Critic] = [trainer] if trainer.critic is None else [trainer, trainer.critic]
    for owner in owners:
        for name, parameter in owner.model.named_parameters():
            values = {"weight": parameter, **owner.optimizer.state.get(parameter, {})}
            tensors |= {f"{type(owner)} {name} {key}": full(value).clone() for key, value in values.items()}
    average = {} if trainer.ema is None else trainer.ema.state_tensors()
    return tensors | {name: tensor.clone() for name, tensor in average.items()}
