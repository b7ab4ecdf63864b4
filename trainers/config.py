"""What a user may set about training. Each field's text is its help, here and in the Prefect form.

rewards ─▶ advantage ─▶ loss (aggregation, importance) + kl + entropy ─▶ gradient ─▶ optimizer
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trainers.presets import Preset, conventions_for, under_preset, with_preset


class Block(BaseModel):
    """A table of the run file; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class GrpoAdvantage(Block):
    """(r − mean of the group) / standard deviation. Dr. GRPO: `scale = "none"`."""

    kind: Literal["grpo"] = "grpo"
    """Relative to the attempt's own group."""
    scale: Literal["std", "batch", "none"] = "std"
    """Divide by the group's standard deviation, by the batch's, or not at all (Dr. GRPO)."""
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
    """A function of yours: `(inputs: trainers.losses.LossInputs, **arguments) -> LossOutput`."""

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


class CriticSettings(Block):
    """The learned value function of `advantage.kind = "gae"`."""

    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate of the critic's own AdamW."""
    clip: float | None = Field(default=0.2, gt=0)
    """Values may move this far from those the step began with before their loss is clipped (PPO2); none: no clip."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps at the start that train the critic alone."""


class ReferenceSettings(Block):
    """The policy that `kl` stays near, and the teacher of `advantage.kind = "distill"`."""

    kind: Literal["none", "base", "model", "lora_off"] = "none"
    """`base`: a frozen copy of the run's base policy. `model`: of another. `lora_off`: the base under the adapters."""
    model: str = ""
    """Folder or Hugging Face id, of the same tokenizer, for `kind = "model"`."""


class LoraSettings(Block):
    """Train low-rank adapters instead of all weights (peft)."""

    rank: int = Field(default=16, ge=1, le=512)
    """Rank of the update of each adapted matrix; vLLM serves up to 512."""
    alpha: float = Field(default=32.0, gt=0)
    """The update is scaled by alpha / rank."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the adapted layers."""


class TrainSettings(Block):
    """Advantages, loss and optimizer."""

    preset: Preset = ""
    """Conventions of another system where it differs from ours: `trl`, `verl` or `openrlhf`. What is set here beside
    it counts more; docs/algorithms.md lists what each one means."""
    advantage: Advantage = GrpoAdvantage()
    """How much better an attempt was than expected; `"opo"` is short for {kind = "opo"}, with its defaults."""
    loss: Loss = ClipLoss()
    """What is minimised; `"cispo"` is short as above."""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] = "token_mean"
    """Over a mini-batch: mean over its trained tokens (DAPO), mean over sequences of token means (GRPO), mean over
    sequences of token sums, or that divided by `sampling.max_tokens` (Dr. GRPO)."""
    decoupled: DecoupledSettings | None = None
    """Decoupled PPO; with `stale_policy = "correct"` it is on."""
    kl: KlSettings = KlSettings()
    """Penalty for leaving the reference."""
    reference: ReferenceSettings = ReferenceSettings()
    """The reference policy."""
    critic: CriticSettings = CriticSettings()
    """The value function, where the advantage needs one."""
    entropy_bonus: float = Field(default=0.0, ge=0)
    """Weight of the policy's entropy in the objective."""
    top_entropy_fraction: float = Field(default=1.0, gt=0, le=1)
    """Train only this share of a step's tokens, those at which the policy was least certain."""
    lora: LoraSettings | None = None
    """Train adapters only; the engine serves them beside the base weights."""
    steps_per_update: int = Field(default=1, ge=1)
    """Optimizer steps between two weight updates of the engine; staleness is counted in updates."""
    num_minibatches: int = Field(default=1, ge=1)
    """Optimizer updates per pass over a step; the claimed groups are split between them."""
    num_epochs: int = Field(default=1, ge=1)
    """Passes over each step's groups (PPO's epochs)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: kept, or decayed to 0 at `decay_steps`."""
    warmup_steps: int = Field(default=0, ge=0)
    """Linear learning-rate warm-up over this many steps."""
    decay_steps: int = Field(default=0, ge=0)
    """Step at which a decaying schedule ends."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Clip the gradient's global norm to this."""
    ema: float | None = Field(default=None, gt=0, lt=1)
    """Decay of an exponential moving average of the weights, kept with the saved states; `millrace export --average`
    writes it. None: off."""
    stale_policy: Literal["strict", "mask", "correct"] = "mask"
    """Tokens over the staleness bound: `strict` drops their group, `mask` masks them, `correct` keeps them
    under capped importance weights."""
    max_gap: float = Field(default=1.0, gt=0)
    """Mean |log-probability by engine − by trainer| per token of a shard that this very policy sampled, in nats, above
    which the shard is quarantined before it trains anything."""
    tokens_per_microbatch: int = Field(default=4096, ge=16)
    """Tokens of the attempts in one forward pass; bounds memory, changes nothing else."""
    num_ranks: int = Field(default=1, ge=1)
    """Trainer processes the model is sharded over (FSDP2)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameter type during forward and backward; the optimizer keeps float32."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, a third more time."""
    offload_optimizer: bool = False
    """Keep the optimizer's moments in host memory; for GPUs."""
    compile: bool = False
    """torch.compile every layer; pays on GPUs for steps of the same shapes."""
    logits_gib: float = Field(default=0.5, gt=0)
    """Memory for the logits of a pack, GiB. Where all of them, of type `dtype`, fit into half of it, they are kept for
    the backward pass rather than computed again."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Save optimizer and random state every this many steps; a resume re-trains the steps since then
    from their recorded shards."""
    anchor_every: int = Field(default=10, ge=1)
    """Publish whole weights every this many policies and only the values that changed in between; 1: always whole."""
    num_threads: int = Field(default=0, ge=0)
    """Threads a rank computes with on CPUs; 0: as many as OMP_NUM_THREADS says. A small model takes no longer with one,
    and engines have the others. It decides in which order numbers are added up, so the last digits depend on it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes the GPU where there is one."""

    def under_preset(self, preset: str) -> dict[str, Any]:
        """These settings as a table, under another preset; see `trainers.presets.under_preset`."""
        return under_preset(self.model_dump(), preset)

    @model_validator(mode="before")
    @classmethod
    def _spelt_out(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kl = values.get("kl")
        if isinstance(kl, dict) and kl and "coefficient" not in kl and not values.get("reference"):
            raise ValueError("train.kl without a coefficient and without a train.reference does nothing; set both")
        blocks = {name: {"kind": values[name]} for name in ("advantage", "loss") if isinstance(values.get(name), str)}
        return with_preset({**values, **blocks})

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        problems = []
        if self.stale_policy == "correct" and self.decoupled is None:
            self.decoupled = DecoupledSettings()
        if self.kl.coefficient and self.reference.kind == "none":
            problems.append('kl.coefficient needs a reference: set train.reference.kind = "base"')
        if self.kl.weighted and self.kl.place == "reward":
            problems.append('kl.weighted is about a term of the loss; set kl.place = "loss" or leave it out')
        advantage, in_reward = self.advantage, self.kl.coefficient > 0 and self.kl.place == "reward"
        unused = self.loss.kind == "sft" or advantage.kind in ("distill", "pass_at_k") or _per_reward(advantage)
        if in_reward and unused:
            problems.append('kl.place = "reward" does nothing for this loss and advantage; set kl.place = "loss"')
        silent = [CriticSettings(), *(CriticSettings(**convention) for convention in conventions_for("critic"))]
        if self.critic not in silent and advantage.kind != "gae":
            problems.append('train.critic is for advantage.kind = "gae"; leave it out')
        if self.loss.kind == "sft" and advantage.kind in ("gae", "distill"):
            what = "a critic" if advantage.kind == "gae" else "a teacher"
            problems.append(f'loss.kind = "sft" has no use for {what}; leave train.advantage out, or train.loss')
        if self.advantage.kind == "distill" and self.reference.kind != "model":
            problems.append('advantage.kind = "distill" needs a teacher: set train.reference.kind = "model" and .model')
        if (self.reference.kind == "model") != bool(self.reference.model):
            problems.append('train.reference.model and train.reference.kind = "model" go together; set both or neither')
        if self.reference.kind == "lora_off" and self.lora is None:
            problems.append('train.reference.kind = "lora_off" needs train.lora; without adapters use "base"')
        if self.schedule != "constant" and self.decay_steps <= max(1, self.warmup_steps):
            least = max(1, self.warmup_steps)  # a decay over a single step would train it with 0
            problems.append(f'schedule = "{self.schedule}" needs decay_steps above {least}, the end of the warm-up')
        if self.schedule == "constant" and self.decay_steps:
            problems.append('decay_steps without a decay: set schedule = "linear" or "cosine"')
        if self.decoupled is not None and self.loss.kind in ("sft", "sapo"):
            what = 'train.decoupled and stale_policy = "correct"'
            problems.append(f"loss.kind = {self.loss.kind!r} has no proximal policy; leave {what} out")
        if problems:
            raise ValueError("\n".join(problems))
        return self


def _per_reward(advantage: Advantage) -> bool:
    return isinstance(advantage, GrpoAdvantage) and advantage.per_reward


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that decides what a step makes of its samples; with equal recipes, equal samples give equal weights."""

    settings: TrainSettings
    """Advantages, loss and optimizer."""
    learning_rate: float
    """Peak learning rate of AdamW."""
    temperature: float
    """At which the tokens were sampled."""
    max_tokens: int
    """Longest reply of one turn; `aggregation = "constant"` divides by it."""
    reward_weights: dict[str, float]
    """Weight of each named reward part, as in the run's `reward.weights`; parts that are not named count 1."""
    max_staleness: float
    """Weight updates a trained token may be behind; the bound is the next whole number."""
    seed: int
    """Shuffles groups into mini-batches."""


class WarmupSettings(Block):
    """The tiny base model made on the spot where no `model` is given."""

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
