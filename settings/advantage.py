"""`[train.advantage]`: how much better an attempt was than expected."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from settings.block import Block


class GrpoAdvantage(Block):
    """(r − mean of the group) / standard deviation. Dr. GRPO: `scale = "none"`, MaxRL: `scale = "mean"`."""

    kind: Literal["grpo"] = "grpo"
    """Relative to the attempt's own group."""
    scale: Literal["std", "batch", "mean", "none"] = "std"
    """Divide by the group's standard deviation, by the batch's, by the group's mean (MaxRL; rewards of at least 0), or
    not at all (Dr. GRPO)."""
    ddof: Literal[0, 1] = 1
    """1: unbiased standard deviation, 0: of the population."""
    eps: float = Field(default=1e-4, ge=0)
    """Added to the standard deviation."""
    singleton: Literal["zero", "reward"] = "zero"
    """Advantage of a group's only reward: 0, or the reward itself (mean 0 and deviation 1, as verl has it)."""
    per_reward: bool = False
    """GDPO: normalise each named reward within its group, add them up by weight, and whiten the sum over the batch."""


class LeaveOneOutAdvantage(Block):
    """(r − mean of the others) / their standard deviation."""

    kind: Literal["leave_one_out"] = "leave_one_out"
    """Relative to the other attempts of the group; with `scale = "none"` this is RLOO."""
    scale: Literal["std", "none"] = "none"
    """Divide by the standard deviation of the other attempts, or not (RLOO)."""
    eps: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation."""


class ReinforceAdvantage(Block):
    """REINFORCE++: rewards whitened over the whole batch."""

    kind: Literal["reinforce++"] = "reinforce++"
    """Relative to the batch."""
    baseline: bool = False
    """Subtract the group's mean first (REINFORCE++-baseline)."""
    eps: float = Field(default=1e-8, ge=0)
    """Added to the standard deviation."""


class RemaxAdvantage(Block):
    """r − a baseline from outside the group (ReMax: the greedy reply's reward)."""

    kind: Literal["remax"] = "remax"
    """Relative to the reward part `baseline_part`."""
    baseline_part: str = "baseline"
    """Named part of the score that holds the baseline; give it weight 0 in `reward.weights`."""


class OpoAdvantage(Block):
    """r − the length-weighted mean of the group."""

    kind: Literal["opo"] = "opo"
    """The baseline of least variance where gradients grow with length."""


class PassAtKAdvantage(Block):
    """The advantage whose maximum is pass@k instead of pass@1."""

    kind: Literal["pass_at_k"] = "pass_at_k"
    """Relative to the group; an attempt counts as right above `threshold`."""
    k: int = Field(default=4, ge=1)
    """Attempts of which one has to be right; below `n_samples`."""
    threshold: float = 0.5
    """Rewards above this are right."""
    eps: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation."""


class GaeAdvantage(Block):
    """Generalised advantage estimation with a critic (PPO)."""

    kind: Literal["gae"] = "gae"
    """Per token, from a learned value function."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """λ: 1 is the whole return, 0 one step."""
    whiten: bool = True
    """Whiten the advantages over all sampled tokens of the batch whose attempt has a reward."""


class DistillAdvantage(Block):
    """log π_teacher − log π_sampled per token: on-policy distillation by the reverse KL of the sampled tokens."""

    kind: Literal["distill"] = "distill"
    """From the teacher in `train.reference`; rewards are not used."""
    scale: float = Field(default=1.0, gt=0)
    """Multiplies the difference."""
    clip: float | None = Field(default=None, gt=0)
    """The difference is clipped to [−clip, clip] nats."""


Advantage = Annotated[
    GrpoAdvantage
    | LeaveOneOutAdvantage
    | ReinforceAdvantage
    | RemaxAdvantage
    | OpoAdvantage
    | PassAtKAdvantage
    | GaeAdvantage
    | DistillAdvantage,
    Field(discriminator="kind"),
]
