"""`[train.loss]`, `[train.decoupled]` and `[train.kl]`: what is minimised."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from settings.block import Block


class ClipLoss(Block):
    """PPO's clipped surrogate."""

    kind: Literal["clip"] = "clip"
    """Per token."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """Lower bound of the probability ratio: 1 − clip_low."""
    clip_high: float = Field(default=0.28, gt=0)
    """Upper bound of the probability ratio: 1 + clip_high (DAPO's clip-higher)."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bounds the loss of tokens with negative advantage at this ratio (dual clip, 3 in verl)."""


class GspoLoss(Block):
    """The clipped surrogate on the geometric mean ratio of the whole sequence."""

    kind: Literal["gspo"] = "gspo"
    """Per sequence; ratios are much closer to 1 than a token's, and so are the bounds."""
    clip_low: float = Field(default=3e-4, gt=0, le=1)
    """Lower bound of the sequence's ratio: 1 − clip_low."""
    clip_high: float = Field(default=4e-4, gt=0)
    """Upper bound of the sequence's ratio: 1 + clip_high."""


class CispoLoss(Block):
    """Clips the importance weight instead of the update, so that no token loses its gradient (MiniMax-M1)."""

    kind: Literal["cispo"] = "cispo"
    """Per token."""
    clip_low: float | None = Field(default=None, gt=0, le=1)
    """Lower bound of the weight: 1 − clip_low; none as in the paper's runs."""
    clip_high: float = Field(default=0.28, gt=0)
    """Upper bound of the weight: 1 + clip_high."""


class SapoLoss(Block):
    """A smooth gate of the ratio instead of a clip."""

    kind: Literal["sapo"] = "sapo"
    """Per token."""
    tau_positive: float = Field(default=1.0, gt=0)
    """Temperature of the gate where the advantage is positive."""
    tau_negative: float = Field(default=1.05, gt=0)
    """Temperature of the gate where it is negative."""


class SftLoss(Block):
    """Negative log-likelihood of the replies worth imitating."""

    kind: Literal["sft"] = "sft"
    """Rows with a reward of at least `min_reward`; advantages are not used."""
    min_reward: float = 1.0
    """Attempts below this are not trained."""


class CustomLoss(Block):
    """A function of yours: `(inputs: trainers.objective.losses.LossInputs, **arguments) -> LossOutput`."""

    kind: Literal["custom"] = "custom"
    """By import path."""
    path: str
    """`package.module:function` or `path/to/file.py:function`."""
    arguments: dict[str, Any] = {}
    """Handed to it by name."""


Loss = Annotated[ClipLoss | GspoLoss | CispoLoss | SapoLoss | SftLoss | CustomLoss, Field(discriminator="kind")]


class DecoupledSettings(Block):
    """The ratio is taken to a proximal policy; each token weighs by how far that is from the one that sampled it."""

    proximal: Literal["recompute", "loglinear"] = "recompute"
    """Log-probabilities of the policy as it was when the step began: `recompute` by one more forward pass, or
    `loglinear` between the sampling and the current policy, by version."""
    correction: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "token_truncate"
    """Importance weights π_proximal / π_sampled above `cap` are cut to it, or their token or sequence masked."""
    cap: float = Field(default=2.0, ge=1)
    """Largest importance weight."""
    floor: float | None = Field(default=None, gt=0, le=1)
    """Smallest importance weight; below it tokens are cut or masked likewise."""


class KlSettings(Block):
    """Keeps the policy near a reference."""

    coefficient: float = Field(default=0.0, ge=0)
    """β; above 0 it needs `train.reference`."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Of KL(policy ‖ reference) from the sampled tokens: log-ratio, half its square, or ρ − 1 − log ρ."""
    place: Literal["loss", "reward"] = "loss"
    """A term of the loss, or subtracted from the reward before advantages are taken."""
    clamp: float | None = Field(default=None, gt=0)
    """Each token's estimate is clamped to [−clamp, clamp] (10 in verl)."""
    weighted: bool = False
    """Multiply each token's estimate by the probability ratio, gradient and all: k1 and k3 then have the gradient of
    KL(policy ‖ reference), off policy too (DeepSeek-V3.2; TRL's default)."""
