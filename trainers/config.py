"""What a user may set about training. Each field's text is its help, here and in the Prefect form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TrainSettings(BaseModel):
    """Advantages, loss and optimizer."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    scale: Literal["std", "none"] = "std"
    """Divide a group's centred rewards by their standard deviation (GRPO), or do not (Dr. GRPO)."""
    loss: Literal["clip", "cispo"] = "clip"
    """`clip`: PPO's clipped surrogate. `cispo`: clips the importance weight instead, so no token loses its gradient
    (MiniMax-M1)."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Lower clip bound of the probability ratio: 1 − clip_low. `cispo` has none."""
    clip_high: float = Field(default=0.28, gt=0)
    """Upper clip bound of the probability ratio: 1 + clip_high (DAPO's clip-higher)."""
    steps_per_update: int = Field(default=1, ge=1)
    """Optimizer steps between two weight updates of the engine; staleness is counted in updates."""
    num_minibatches: int = Field(default=1, ge=1)
    """Optimizer updates per step; the claimed groups are split between them."""
    warmup_steps: int = Field(default=0, ge=0)
    """Linear learning-rate warm-up over this many steps."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Clip the gradient's global norm to this."""
    stale_policy: Literal["strict", "mask", "correct"] = "mask"
    """Tokens over the staleness bound: `strict` drops their group, `mask` masks them, `correct` keeps them
    under capped importance weights."""
    importance_cap: float = Field(default=2.0, ge=1)
    """Largest importance weight under `correct`."""
    tokens_per_microbatch: int = Field(default=4096, ge=16)
    """Packed tokens per forward pass; bounds memory, changes nothing else."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameter type during forward and backward; the optimizer keeps float32."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Save optimizer and random state every this many steps; a resume re-trains the steps since then
    from their recorded shards."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes the GPU where there is one."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that decides what a step makes of its samples; with equal recipes, equal samples give equal weights."""

    settings: TrainSettings
    """Advantages, loss and optimizer."""
    learning_rate: float
    """Peak learning rate of AdamW."""
    temperature: float
    """At which the tokens were sampled."""
    max_staleness: float
    """Weight updates a trained token may be behind; the bound is the next whole number."""
    seed: int
    """Shuffles groups into mini-batches."""


class WarmupSettings(BaseModel):
    """The tiny base model made on the spot where no `model` is given."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    hidden_size: int = Field(default=128, ge=32, multiple_of=32)
    """Width of the model: attention heads of 32."""
    num_layers: int = Field(default=2, ge=1)
    """Depth of the model."""
    target_loss: float = Field(default=0.23, gt=0)
    """Stop when the mean loss of the last 20 updates is below this (nats per token)."""
    num_steps: int = Field(default=2000, ge=1)
    """Stop after this many supervised updates in any case."""
    batch_size: int = Field(default=128, ge=1)
    """Demonstrations per update."""
    learning_rate: float = Field(default=2e-3, gt=0)
    """Peak learning rate of the supervised updates."""
