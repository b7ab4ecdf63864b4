"""The critic of PPO: a value function beside the policy, with an optimizer of its own.

In: a policy folder, whose transformer it starts from, then packs. Out: one value per position that predicts: what
reward to expect before the next token is sampled.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from settings.train import TrainSettings
from trainers.model.batches import Pack
from trainers.model.distributed import shard
from trainers.model.layout import Layout
from trainers.model.model import PolicyModel, load_model
from trainers.model.teams import on_all
from trainers.objective.losses import value_loss
from trainers.optimizer import make_optimizer


class CriticModel(nn.Module):
    """A transformer with one number per position in place of logits; 0 everywhere at first."""

    def __init__(self, policy: PolicyModel) -> None:
        super().__init__()
        width = policy.causal_lm.get_output_embeddings().weight.shape[1]
        policy.causal_lm.set_output_embeddings(nn.Identity())
        self.policy = policy
        self.value_head = nn.Linear(width, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, input_ids_T: torch.Tensor, position_ids_T: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Values, float32 of shape [T]."""
        hidden_TD = self.policy.hidden(input_ids_T, position_ids_T, layout)
        values: torch.Tensor = self.value_head(hidden_TD).sum(1)  # its only column; FSDP2 warns of views
        values = values.float()
        if layout.team is None:
            return values
        own_N = layout.own_positions
        return on_all(values.new_zeros(len(input_ids_T)).index_copy(0, own_N, values), layout.team)


class Critic:
    """Holds the value function and its optimizer of one rank."""

    def __init__(self, folder: Path, settings: TrainSettings, *, mesh: DeviceMesh) -> None:
        self._clip = settings.critic.clip
        policy = load_model(
            folder,
            activation_checkpointing=settings.activation_checkpointing,
            offload_activations=settings.offload_activations,
            compile=settings.compile,
        )
        self.model = CriticModel(policy)
        dtype, offload = getattr(torch, settings.computes_in), settings.offload_optimizer
        shard(self.model, policy.layers, mesh=mesh, dtype=dtype, offload=offload)
        self.optimizer = make_optimizer(
            self.model.parameters(),
            learning_rate=settings.critic.learning_rate,
            weight_decay=settings.weight_decay,
            fused=mesh.device_type == "cuda",
        )

    def __call__(self, pack: Pack) -> torch.Tensor:
        """Values at predicting positions, shape [T]."""
        values: torch.Tensor = self.model(pack.input_ids, pack.position_ids, pack.layout)
        return values

    def backward(self, pack: Pack) -> dict[str, float]:
        """Add a pack's gradient of the value loss; returns its sums over trained tokens."""
        old_values, returns, weights = (pack.values[name] for name in ("old_values", "returns", "weights"))
        output = value_loss(self(pack), old_values, returns, pack.mask, weights, clip=self._clip)
        output.loss.backward()
        return output.sums
