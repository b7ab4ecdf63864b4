"""`[train.loss]`, `[train.decoupled]` and `[train.kl]`: what is minimised."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from settings.block import Block


class ClipLoss(Block):
    """PPO's clipped surrogate."""

    kind: Literal["clip"] = "clip"
    """Per token."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """Lower bound of the probability ratio: 1 − clip_low."""
    clip_high: float = Field(default=0.28, gt=0, allow_inf_nan=True)
    """Upper bound of the probability ratio: 1 + clip_high (DAPO's clip-higher)."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bounds the loss of tokens with negative advantage at this ratio (dual clip, 3 in verl)."""


class GspoLoss(Block):
    """The clipped surrogate on the geometric mean ratio of the whole sequence."""

    kind: Literal["gspo"] = "gspo"
    """Per sequence; ratios are much closer to 1 than a token's, and so are the bounds."""
    clip_low: float = Field(default=3e-4, gt=0, le=1)
    """Lower bound of the sequence's ratio: 1 − clip_low."""
    clip_high: float = Field(default=4e-4, gt=0, allow_inf_nan=True)
    """Upper bound of the sequence's ratio: 1 + clip_high."""


class CispoLoss(Block):
    """Clips the importance weight instead of the update, so that no token loses its gradient (MiniMax-M1)."""

    kind: Literal["cispo"] = "cispo"
    """Per token."""
    clip_low: float | None = Field(default=None, gt=0, le=1)
    """Lower bound of the weight: 1 − clip_low; none as in the paper's runs."""
    clip_high: float = Field(default=0.28, gt=0, allow_inf_nan=True)
    """Upper bound of the weight: 1 + clip_high."""


class SapoLoss(Block):
    """A smooth gate of the ratio instead of a clip."""

    kind: Literal["sapo"] = "sapo"
    """Per token."""
    tau_positive: float = Field(default=1.0, gt=0)
    """Temperature of the gate where the advantage is positive."""
    tau_negative: float = Field(default=1.05, gt=0)
    """Temperature of the gate where it is negative."""


class DppoLoss(Block):
    """A trust region by how far the token's probability has moved, instead of a clip of its ratio."""

    kind: Literal["dppo"] = "dppo"
    """Per token."""
    divergence: Literal["tv", "binary_kl"] = "tv"
    """|π − π_old| of the sampled token, or KL(π_old ‖ π) of "this token or another"."""
    clip_low: float = Field(default=0.15, gt=0, allow_inf_nan=True)
    """A token with a negative advantage that has fallen by more has no gradient; 0.05 is usual for `binary_kl`."""
    clip_high: float = Field(default=0.15, gt=0, allow_inf_nan=True)
    """A token with a positive advantage that has risen by more has none."""
    cap: float = Field(default=20.0, ge=1, allow_inf_nan=True)
    """Largest importance weight."""


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


Loss = Annotated[
    ClipLoss | GspoLoss | CispoLoss | SapoLoss | DppoLoss | SftLoss | CustomLoss, Field(discriminator="kind")
]


Statistic = Literal["ratio", "k1", "k2", "k3", "tv", "binary_kl"]
Over = Literal["token", "sequence_sum", "sequence_mean", "sequence_max"]


class RejectSettings(Block):
    """Tokens or sequences out of bounds have no part in the policy's term; denominators count them still."""

    statistic: Statistic = "ratio"
    """Of a token, r = π / π_sampled: r itself; −ln r (`k1`); ln² r / 2 (`k2`); r − 1 − ln r (`k3`); |π − π_sampled|
    (`tv`); KL(π_sampled ‖ π) of "this token or another" (`binary_kl`)."""
    over: Over = "token"
    """Each token by its own, or all of a sequence by the sum, mean or maximum over it; of ratios `sequence_sum` is the
    product and `sequence_mean` the geometric mean."""
    low: float | None = None
    """Rejected below this."""
    high: float | None = None
    """Rejected above this; at least one of the two is needed."""
    policy: Literal["current", "proximal"] = "current"
    """Whose π: the policy being trained, or that of `train.decoupled`, as the step began."""
    advantage: Literal["any", "negative"] = "any"
    """`negative`: tokens with an advantage of at least 0 are never rejected."""

    @model_validator(mode="after")
    def _has_bounds(self) -> Self:
        if self.low is None and self.high is None:
            raise ValueError("it rejects nothing without a bound; set low or high")
        unmoved = 1 if self.statistic == "ratio" else 0
        if (self.low is not None and unmoved < self.low) or (self.high is not None and unmoved > self.high):
            raise ValueError(f"{self.statistic} is {unmoved} where no probability has moved, which this would reject")
        return self


class DecoupledSettings(Block):
    """The ratio is taken to a proximal policy; each token weighs by how far that is from the one that sampled it."""

    proximal: Literal["recompute", "loglinear"] = "recompute"
    """Log-probabilities of the policy as it was when the step began: `recompute` by one more forward pass, or
    `loglinear` between the sampling and the current policy, by version."""
    correction: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "token_truncate"
    """Importance weights π_proximal / π_sampled above `cap` are cut to it, or their token or sequence masked."""
    cap: float = Field(default=2.0, ge=1, allow_inf_nan=True)
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
    gradient: Literal["estimator", "k2"] = "estimator"
    """In the loss: the estimator's own, or that of k2 under the estimator's value, whose mean is that of KL(policy ‖
    reference) on policy (verl's `k3+`, OpenRLHF's unbiased gradient)."""
