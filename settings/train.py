"""`[train]`: advantages, loss and optimizer; `[retention]`: what of its results stays.

rewards ─▶ advantage ─▶ loss (aggregation, importance) + kl + entropy ─▶ gradient ─▶ optimizer
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, NonNegativeInt, model_validator

from settings.advantage import Advantage, GrpoAdvantage
from settings.block import Block
from settings.loss import ClipLoss, DecoupledSettings, KlSettings, Loss, RejectSettings
from settings.presets import Preset, conventions_for, with_preset

StalePolicy = Literal["strict", "mask", "correct"]

SUSPICIOUS_GAPS = {"float32": 0.05, "bfloat16": 0.15}
"""Gap between engine and trainer of which a run warns, in nats per token, by `TrainSettings.computes_in`. Rounding
makes 0.03 to 0.06 of SmolLM2-135M in bfloat16, and 1e-5 of it in float32."""


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


class RouterSettings(Block):
    """Terms that keep the experts of a model in use; for models that have experts."""

    balance: float = Field(default=0.0, ge=0)
    """Weight of the load-balance loss: 1 if every sequence spreads evenly over the experts, more if it does not."""
    z: float = Field(default=0.0, ge=0)
    """Weight of the router z-loss, the mean square of the log-sum of the router's exponentials."""


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
    """Over a mini-batch: mean over its trained tokens (DAPO), mean over attempts of token means (GRPO), mean over
    attempts of token sums, or that divided by `sampling.max_tokens` (Dr. GRPO)."""
    decoupled: DecoupledSettings | None = None
    """Decoupled PPO; with `stale_policy = "correct"` it is on."""
    reject: list[RejectSettings] = []
    """Bounds that all have to be kept, `[[train.reject]]` for each, or one `[train.reject]`: tokens or sequences too
    far from the policy that sampled them are left out."""
    kl: KlSettings = KlSettings()
    """Penalty for leaving the reference."""
    reference: ReferenceSettings = ReferenceSettings()
    """The reference policy."""
    critic: CriticSettings = CriticSettings()
    """The value function, where the advantage needs one."""
    entropy_bonus: float = Field(default=0.0, ge=0)
    """Weight of the policy's entropy in the objective."""
    router: RouterSettings = RouterSettings()
    """Losses of the routers, for models with experts."""
    router_replay: bool = False
    """For models with experts: each token is trained through the experts that the engine gave it, recorded in its
    shard, so that rounding changes no choice (https://arxiv.org/abs/2510.11370). docs/shard_format.md says what it
    adds to a shard."""
    top_entropy_fraction: float = Field(default=1.0, gt=0, le=1)
    """Train only this share of a step's tokens, those at which the policy was least certain."""
    lora: LoraSettings | None = None
    """Train adapters only; the engine serves them beside the base weights."""
    stream: bool = False
    """At `max_staleness = 0`, add up gradients of groups that have finished while the last ones of the batch are still
    sampled. In which order is recorded, so a replay gives the same bits; another run of the same file may not."""
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
    max_grad_norm: float = Field(default=1.0, gt=0, allow_inf_nan=True)
    """Clip the gradient's global norm to this."""
    ema: float | None = Field(default=None, gt=0, lt=1)
    """Decay of an exponential moving average of the weights, kept with the saved states; the option
    `--average` of `millrace export` writes it. None: off."""
    stale_policy: StalePolicy = "mask"
    """Tokens over the staleness bound: `strict` drops their group, `mask` masks them, `correct` keeps them
    under capped importance weights."""
    max_gap: float = Field(default=1.0, gt=0, allow_inf_nan=True)
    """Mean |log-probability by engine − by trainer| per token of a shard that this very policy sampled, in nats, above
    which the shard is quarantined before it trains anything."""
    tokens_per_microbatch: int = Field(default=4096, ge=16)
    """Tokens of the attempts in one forward pass of a rank, of which those that an attempt shares with the one before
    it in its group count a quarter; bounds memory, changes nothing else. If it is not set, on CPUs half of the default
    or a quarter, down to the longest sequence, as long as activations take more than half of what weights, gradients
    and moments do."""
    balance: Literal["tokens", "flops"] = "tokens"
    """What ranks get evenly: tokens, or arithmetic, in which a token of a long row counts more for its attention, and
    packs of about as much of it then run at the same time. The last digits depend on it."""
    num_ranks: int = Field(default=1, ge=1, le=16384)
    """Trainer processes the model is sharded over (FSDP2)."""
    sequence_parallel: int = Field(default=1, ge=1)
    """Ranks that compute a pack together, each a part of its tokens (Ulysses), so that rows may be that many times as
    long as `tokens_per_microbatch`. It divides `num_ranks` and the model's attention heads."""
    num_replicas: int = Field(default=1, ge=1)
    """Copies of the sharded model (HSDP), for many nodes: layers are gathered within a copy, and only gradients are
    added up over all. It divides `num_ranks`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Parameter type during forward and backward; the optimizer keeps float32 weights and moments. `auto`: bfloat16 on
    CPUs that multiply in it faster, for a model that is stored in it, else float32; a run keeps what it began with."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, a third more time."""
    offload_optimizer: bool = False
    """Keep the optimizer's moments in host memory; for GPUs."""
    offload_activations: bool = False
    """Keep in host memory what the backward pass needs of the layers, with `activation_checkpointing` their inputs; for
    GPUs."""
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

    @model_validator(mode="before")
    @classmethod
    def _spelt_out(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kl = values.get("kl")
        has_only_keys = isinstance(kl, dict) and kl.keys() <= KlSettings.model_fields.keys()
        if kl and has_only_keys and "coefficient" not in kl and not values.get("reference"):
            raise ValueError("train.kl without a coefficient and without a train.reference does nothing; set both")
        blocks = {name: {"kind": values[name]} for name in ("advantage", "loss") if isinstance(values.get(name), str)}
        filled = with_preset({**values, **blocks})
        if isinstance(filled.get("reject"), dict):  # one table of its own, as `train.reject.high=2.0` makes it
            filled["reject"] = [filled["reject"]]
        for name in ("advantage", "loss"):
            if isinstance(filled.get(name), dict):
                filled[name] = {"kind": cls.model_fields[name].default.kind, **filled[name]}
        return filled

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.stale_policy == "correct" and self.decoupled is None:
            self.decoupled = DecoupledSettings()
        problems = []
        advantage, kl, loss, reference = self.advantage, self.kl, self.loss, self.reference
        if kl.coefficient and reference.kind == "none":
            problems.append('kl.coefficient needs a reference: set train.reference.kind = "base"')
        for name in ("weighted",) * kl.weighted + ("gradient",) * (kl.gradient == "k2"):
            if kl.place == "reward":
                problems.append(f'kl.{name} is about a term of the loss; set kl.place = "loss" or leave it out')
        unused = advantage.kind in ("distill", "pass_at_k") or getattr(advantage, "per_reward", False)
        if kl.coefficient and kl.place == "reward" and (unused or loss.kind == "sft"):
            problems.append('kl.place = "reward" does nothing for this loss and advantage; set kl.place = "loss"')
        if kl.coefficient and kl.place == "reward" and getattr(advantage, "scale", "") == "mean":
            problems.append('advantage.scale = "mean" is for rewards of at least 0; set kl.place = "loss"')
        if self.decoupled is None and any(rule.policy == "proximal" for rule in self.reject):
            problems.append('train.reject with policy = "proximal" needs train.decoupled; set it, or "current"')
        unset_critics = [CriticSettings(), *(CriticSettings(**convention) for convention in conventions_for("critic"))]
        if self.critic not in unset_critics and advantage.kind != "gae":
            problems.append('train.critic is for advantage.kind = "gae"; leave it out')
        if loss.kind == "sft" and advantage.kind in ("gae", "distill"):
            model = "a critic" if advantage.kind == "gae" else "a teacher"
            problems.append(f'loss.kind = "sft" has no use for {model}; leave train.advantage out, or train.loss')
        if advantage.kind == "distill" and reference.kind != "model":
            problems.append('advantage.kind = "distill" needs a teacher: set train.reference.kind = "model" and .model')
        if (reference.kind == "model") != bool(reference.model):
            problems.append('train.reference.model and train.reference.kind = "model" go together; set both or neither')
        if reference.kind == "lora_off" and self.lora is None:
            problems.append('train.reference.kind = "lora_off" needs train.lora; without adapters use "base"')
        least = max(1, self.warmup_steps)  # a decay over a single step would train it with 0
        if self.schedule != "constant" and self.decay_steps <= least:
            problems.append(f'schedule = "{self.schedule}" needs decay_steps above {least}, the end of the warm-up')
        if self.schedule == "constant" and self.decay_steps:
            problems.append('decay_steps without a decay: set schedule = "linear" or "cosine"')
        if self.decoupled is not None and loss.kind in ("sft", "sapo"):
            keys = 'train.decoupled and stale_policy = "correct"'
            problems.append(f"loss.kind = {loss.kind!r} has no proximal policy; leave {keys} out")
        for name, unit in (("sequence_parallel", "the ranks of a pack"), ("num_replicas", "the copies of the model")):
            if self.num_ranks % (number := getattr(self, name)):
                problems.append(
                    f"train.num_ranks = {self.num_ranks} is no multiple of train.{name} = {number}, {unit}; raise the "
                    "one or lower the other"
                )
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def computes_in(self) -> Literal["float32", "bfloat16"]:
        """`dtype`; float32 if nothing has decided, as for a run from before there was `auto`."""
        return "float32" if self.dtype == "auto" else self.dtype

    @property
    def longest_pack(self) -> int:
        """Tokens of the attempts in one forward pass of all ranks that compute it together."""
        return self.tokens_per_microbatch * self.sequence_parallel


class RetentionSettings(Block):
    """What a run removes while it trains. The base model, the live policy, those with an alias, the best on each split,
    what a resume needs and what waits to be trained on always stay."""

    every: int = Field(default=10, ge=0)
    """Steps from one removal to the next. 0: keep everything, until `millrace gc`. A run that began before this table
    existed keeps everything unless the table sets something."""
    keep_last: int = Field(default=10, ge=2)
    """Newest policies that stay, with the anchors of their deltas."""
    keep_evaluated: Literal["all"] | NonNegativeInt = "all"
    """Policies with a held-out score that stay: `all`, or the newest so many."""
    replay_steps: int = Field(default=100, ge=0)
    """The last so many steps can be replayed: their shards stay, and a saved state before them. Older shards go, those
    of kept evaluations excepted."""
