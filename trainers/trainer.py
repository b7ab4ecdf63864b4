"""One optimizer step from samples: advantages, packs, loss, gradient, update.

In: a policy folder, then `Samples` step by step. Out: metrics; and the weights, when asked.

    Samples ─▶ look: log-probabilities, reference, values, where they are needed ─▶ advantages
                 └─▶ mini-batches of whole groups, each ─▶ packs of this rank ─▶ objective ─▶ backward
                        └─▶ every number finite? engine and trainer agree? ─▶ clip ─▶ AdamW

The result is a function of policy, samples, settings and step alone: replaying a step gives the same weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from infra.environment import KEEPS_FREED_MEMORY, adopt_malloc
from settings.errors import InvalidInput
from settings.run_file import RunConfig
from settings.train import TrainSettings
from trainers.critic import Critic
from trainers.data.samples import Samples
from trainers.data.staleness import lag_of_tokens, staleness_metrics, tokens_to_train
from trainers.health import MOST_UNLIKELY, FiniteCheck, GapMeter, NonFinite, rows_to_probe
from trainers.kept_policy import KeptPolicy
from trainers.model.batches import Pack, Spread, attention_length, packs_of
from trainers.model.distributed import choose_device, move, shard, start_process_group, sum_over_ranks
from trainers.model.experts import ROUTER_TERMS, load_metrics, router_terms
from trainers.model.kinds import refuse_team
from trainers.model.lora import without_adapters
from trainers.model.model import PolicyModel, load_model
from trainers.model.teams import join_team
from trainers.objective.credit import Looked, assign_credit
from trainers.objective.objective import (
    OFF_POLICY,
    loss_inputs,
    mean_metrics,
    needs_entropy_grad,
    objective,
    off_policy_sums,
)
from trainers.optimizer import Ema, clip_gradient, learning_rate, make_optimizer
from trainers.refusals import refuse_options
from trainers.step_batch import StepBatch, minibatches, step_batch

_KEPT_ROWS = 4
"""Rows of a shard that are compared under the kept policy: a few are enough to see an engine with other weights."""


class Trainer:
    """Holds the policy and the optimizer of one rank."""

    def __init__(self, folder: Path, config: RunConfig, *, reference: Path | None = None) -> None:
        """`reference` is the policy folder that `train.reference` names, if it names one."""
        settings = config.train
        self._config, self._settings = config, settings
        has_cuda = torch.cuda.is_available()
        refuse_options(settings, has_cuda=has_cuda, has_bfloat16=has_cuda and torch.cuda.is_bf16_supported())
        self.device = choose_device(settings.device)
        if self.device.type == "cpu":
            adopt_malloc(KEEPS_FREED_MEMORY)
        self._mesh = start_process_group(self.device, num_replicas=settings.num_replicas)
        size = settings.sequence_parallel
        team = join_team(size)
        self.model = self._load(folder, settings)
        if (settings.router.balance or settings.router.z) and not self.model.routers.number:
            raise InvalidInput("train.router weighs losses of experts, and this model has none; leave it out")
        self.optimizer = make_optimizer(
            (parameter for parameter in self.model.parameters() if parameter.requires_grad),
            learning_rate=config.learning_rate,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.ema = Ema(self.model.named_parameters(), decay=settings.ema) if settings.ema else None
        self.kept = KeptPolicy(self.model.parameters(), dtype=getattr(torch, settings.computes_in))
        self.gap_seconds = 0.0
        """What the last step spent on the gap beside its own forward passes: probes, and copies of weights."""
        self._reference = None
        if reference is not None:
            alone = {"lora": None, "activation_checkpointing": False, "router_replay": False}
            frozen = settings.model_copy(update=alone)
            self._reference = self._load(reference, frozen).requires_grad_(False)
        self._optimizers = [(self.optimizer, config.learning_rate)]  # each with its peak
        self.critic: Critic | None = None
        if settings.advantage.kind == "gae":
            self.critic = Critic(folder, settings, mesh=self._mesh)
            self._optimizers.append((self.critic.optimizer, settings.critic.learning_rate))
        self._sum_shards = functools.partial(sum_over_ranks, device=self.device)
        # What the ranks of a team have is the same: the first one's counts.
        self._sum = functools.partial(self._sum_shards, counts=team is None or team.rank == 0)
        by_work = {"attention_length": attention_length(self.model.causal_lm)} if settings.balance == "flops" else {}
        number, num_teams = dist.get_rank() // size, dist.get_world_size() // size
        self._spread = Spread(rank=number, world_size=num_teams, **by_work, team=team)

    def step(
        self, samples: Samples, *, step: int, base_version: int, max_staleness: float, max_gap: float = math.inf
    ) -> dict[str, float]:
        """Train on one claim's samples; returns the step's metrics, means over trained tokens or attempts.

        `step` counts from 1 and sets the learning rate and the mini-batch shuffle. `max_gap` is for steps that the log
        does not know yet.

        Raises `trainers.health.GapTooLarge` and `ValueError` with weights and optimizer as they were;
        `trainers.health.NonFinite` before the update it would have spoilt.
        """
        settings = self._settings
        self._set_learning_rate(step)
        lag_T = lag_of_tokens(
            samples.versions_T, samples.mask_T, base_version=base_version, steps_per_update=settings.steps_per_update
        )
        in_time_T = tokens_to_train(
            lag_T, samples.mask_T, stale_policy=settings.stale_policy, max_staleness=max_staleness
        )
        wanted = self._wanted()
        # Of all rows only where they decide which tokens are trained, and how much.
        later = {"logprobs"} & wanted if samples.arithmetic >= 2 and "entropy" not in wanted else set()
        looked = self._look(samples, np.arange(samples.num_rows), wanted - later)
        credit = assign_credit(samples, settings, looked, reward_weights=self._config.reward.weights)
        kept = self.kept.version
        batch = step_batch(
            samples, settings, credit, looked, in_time_T=in_time_T, base_version=base_version, kept_version=kept
        )
        if later:
            moving = self._look(samples, np.flatnonzero(batch.moving_B), later)
            batch = dataclasses.replace(batch, values={**batch.values, "proximal": moving.logprobs_T})
        totals: dict[str, float] = {}
        norms: list[dict[str, float]] = []
        start: dict[str, float] = {}
        updates = list(minibatches(samples, settings, seed=self._config.seed, step=step))
        for number, rows in enumerate(updates):
            trains = self._trains_policy(step)
            sums, group_norms, gap = self._update(
                batch, rows, number=number, num_updates=len(updates), trains_policy=trains, max_gap=max_gap
            )
            off_policy = {name: sums.pop(name, 0.0) for name in OFF_POLICY}
            # Before the first update the trainer holds the step's base policy: staleness and the engine make the rest.
            start = start or {"tokens": sums["tokens"], **off_policy, **gap}
            norms.append(group_norms)
            totals = {key: totals.get(key, 0.0) + value for key, value in sums.items()}
        num_measured = totals.pop("tokens")
        means = {name: totals.pop(name) / len(norms) for name in ("loss", *ROUTER_TERMS) if name in totals}
        loads = load_metrics(totals)
        first_tokens, k3, ratio, squared = (start.pop(name) for name in ("tokens", *OFF_POLICY))
        if first_tokens:
            start["off_policy_kl"] = k3 / first_tokens
            start["effective_sample_size"] = ratio**2 / max(1e-30, first_tokens * squared)
        return {
            **means,
            **loads,
            **mean_metrics(totals, num_tokens=num_measured),
            **credit.metrics,
            **start,
            **{name: float(np.mean([n[name] for n in norms])) for name in norms[0]},
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "trained_tokens": float(batch.num_trained),
            "trained_rows": float(samples.num_rows),
            "trained_groups": float(len(np.unique(samples.groups_B))),
            "measured_groups": float(len(np.unique(samples.groups_B[batch.moving_B]))),
            **batch.route_metrics,
            **staleness_metrics(lag_T, samples.mask_T, in_time_T, max_staleness=max_staleness),
        }

    def step_without_gradient(self, *, step: int) -> dict[str, float]:
        """What `step` does to the optimizer if every token is masked: its gradient is zero, so nothing is computed, but
        the schedule goes on, and AdamW's momentum and weight decay move the weights."""
        self._set_learning_rate(step)
        self._zero_gradients()
        for _ in range(self._settings.num_minibatches * self._settings.num_epochs):
            self._apply([], number=0, trains_policy=self._trains_policy(step))
        return {"learning_rate": self.optimizer.param_groups[0]["lr"]}

    def _load(self, folder: Path, settings: TrainSettings) -> PolicyModel:
        model = load_model(
            folder,
            lora=settings.lora,
            activation_checkpointing=settings.activation_checkpointing,
            offload_activations=settings.offload_activations,
            compile=settings.compile,
            logits_gib=settings.logits_gib,
            seed=self._config.seed,
        )
        if settings.router_replay:
            model.routers.replay(model.causal_lm)
        refuse_team(model.causal_lm, settings.sequence_parallel)
        dtype, offload = getattr(torch, settings.computes_in), settings.offload_optimizer
        shard(model, model.layers, mesh=self._mesh, dtype=dtype, offload=offload)
        return model

    def _trains_policy(self, step: int) -> bool:
        """False while the critic is warmed up alone."""
        return self.critic is None or step > self._settings.critic.warmup_steps

    def _set_learning_rate(self, step: int) -> None:
        shape = {name: getattr(self._settings, name) for name in ("warmup_steps", "schedule", "decay_steps")}
        for optimizer, peak in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, peak=peak, **shape)

    def move(self, device: torch.device) -> None:
        """Move what is kept between steps; with `offload_optimizer` the host has it in any case."""
        modules = [self.model, self._reference, None if self.critic is None else self.critic.model]
        held = [] if self._settings.offload_optimizer else [module for module in modules if module is not None]
        move(held, [optimizer for optimizer, _ in self._optimizers] if held else [], device)
        if self.ema is not None and held:
            self.ema.move(device)

    def free_gradients(self) -> None:
        """Give back the memory of the last update's gradients: the next one makes its own."""
        for optimizer, _ in self._optimizers:
            optimizer.zero_grad()

    def _zero_gradients(self) -> None:
        """A gradient of 0, which the optimizer takes as it takes others, unlike none."""
        for optimizer, _ in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)

    def _update(
        self, batch: StepBatch, rows: np.ndarray, *, number: int, num_updates: int, trains_policy: bool, max_gap: float
    ) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        """One optimizer update on whole groups, of the step's `num_updates` the `number`-th from 0. Returns sums over
        trained tokens of all ranks, gradient norms, and, at the first update, the gap to the engine. Groups whose
        gradient is 0 count in the weights of tokens, and are not computed."""
        samples, settings = batch.samples, self._settings
        weights_T = batch.weights_T(rows, settings.aggregation, max_tokens=self._config.sampling.max_tokens)
        values = {**batch.values, "weights": weights_T}
        totals: dict[str, float] = {"loss": 0.0, "tokens": 0.0, "entropy": 0.0}
        finite, meter = FiniteCheck(), GapMeter(max(1, len(samples.shard_ids)))
        self.free_gradients()
        moving = rows[batch.moving_B[rows]]
        if not len(moving):
            self._zero_gradients()
        for pack in self._packs(samples, moving, mask_T=batch.trained_T, values=values):
            with torch.set_grad_enabled(trains_policy):
                logprobs, entropy = self._forward(self.model, pack, entropy_grad=needs_entropy_grad(settings))
            base = batch.base_version
            inputs, sums = loss_inputs(
                pack, logprobs, entropy, settings, base_version=base, version=base + number / num_updates
            )
            output = objective(inputs, settings)
            loss, router_sums = self._with_routers(output.loss, pack)
            if trains_policy:
                loss.backward()
            if number == 0 and not pack.is_idle:
                meter.add(logprobs, *_gap_values(pack))
            finite.add(
                pack.tokens,
                mask_T=pack.mask,
                loss=loss,
                logprobs=logprobs,
                sampled=inputs.sampled_logprobs,
                ratio=(logprobs.detach() - inputs.sampled_logprobs).exp(),
                advantages=inputs.advantages,
            )
            sums |= {"loss": float(loss.detach()), "tokens": float(pack.mask.sum())}
            sums |= {**off_policy_sums(inputs), **output.sums, **router_sums}
            if self.critic is not None:
                sums |= self.critic.backward(pack)
            totals = {key: totals.get(key, 0.0) + value for key, value in sums.items()}
        bad = finite.bad_rows(samples.offsets, sum_over_ranks=self._sum)
        gap: dict[str, float] = {}
        if number == 0:
            try:
                # Before anything else: what an engine reports wrongly makes a loss infinite too.
                gap = self._gap(batch, moving, meter, max_gap=max_gap)
            except NonFinite:
                if not len(bad):  # else its rows are named, below
                    raise
        if len(bad):
            raise NonFinite("the loss or a log-probability", samples.names(bad), number)
        norms = self._apply(samples.names(rows), number=number, trains_policy=trains_policy)
        keys = sorted(totals)
        of_all_ranks = self._sum(np.array([totals[key] for key in keys])).tolist()
        return dict(zip(keys, of_all_ranks, strict=True)), norms, gap

    def _with_routers(self, loss: torch.Tensor, pack: Pack) -> tuple[torch.Tensor, dict[str, float]]:
        """The loss with the terms of `train.router`, and sums of them, of a model with experts."""
        weights, seen = self._settings.router, self.model.routers.seen
        if not seen:
            return loss, {}
        balance, router_z, counts = router_terms(
            seen, pack.layout, mask_T=pack.mask, weights_T=pack.values["weights"], sequences_T=pack.sequences
        )
        if weights.balance:
            loss = loss + weights.balance * balance
        if weights.z:
            loss = loss + weights.z * router_z
        terms = (float(term.detach()) for term in (balance, router_z))
        return loss, {**dict(zip(ROUTER_TERMS, terms, strict=True)), **counts}

    def _apply(self, rows: Sequence[str], *, number: int, trains_policy: bool) -> dict[str, float]:
        """Clip the gradients and take one optimizer update; returns the norms before the clip."""
        norms, max_norm = {}, self._settings.max_grad_norm
        clip = functools.partial(
            clip_gradient, max_norm=max_norm, sum_over_ranks=self._sum_shards, rows=rows, num_updates=number
        )
        if trains_policy:
            norms["grad_norm"], by_group = clip(self.model.named_parameters())
            norms |= {f"grad_norm/{group}": norm for group, norm in by_group.items()}
        if self.critic is not None:
            named = self.critic.model.named_parameters()
            norms["critic_grad_norm"], _ = clip(named, what="the critic's gradient")
            self.critic.optimizer.step()
        if trains_policy:
            self.optimizer.step()
        if self.ema is not None:
            self.ema.update()
        return norms

    def _wanted(self) -> set[str]:
        """What must be known of tokens before the first update: fields of `Looked`."""
        settings = self._settings
        wanted = {
            "logprobs": settings.decoupled is not None and settings.decoupled.proximal == "recompute",
            "entropy": settings.top_entropy_fraction < 1,
            "reference": settings.reference.kind != "none",
            "values": self.critic is not None,
        }
        return {name for name, is_wanted in wanted.items() if is_wanted}

    @torch.no_grad()
    def _look(self, samples: Samples, rows: np.ndarray, wanted: set[str]) -> Looked:
        """It, of the tokens of these rows."""
        arrays = {name: np.zeros_like(samples.logprobs_T) for name in wanted}
        for pack in self._packs(samples, rows, mask_T=samples.mask_T, values={}) if wanted else ():
            values = {}
            if wanted & {"logprobs", "entropy"}:
                values["logprobs"], values["entropy"] = self._forward(self.model, pack)
            if "reference" in wanted:
                off = without_adapters(self.model) if self._reference is None else contextlib.nullcontext()
                with off, self.model.routers.by_themselves():
                    values["reference"], _ = self._forward(self._reference or self.model, pack)
            if self.critic is not None and "values" in wanted:
                values["values"] = self.critic(pack)
            for name in arrays.keys() & values.keys() if not pack.is_idle else ():
                pack.to_tokens(values[name], arrays[name])
        # Each rank has filled in its own rows.
        return Looked(**{f"{name}_T": np.where(samples.mask_T, self._sum(a), 0) for name, a in arrays.items()})

    @torch.no_grad()
    def _gap(self, batch: StepBatch, measured: np.ndarray, meter: GapMeter, *, max_gap: float) -> dict[str, float]:
        """The gap to the engine, before the first update; `meter` has the rows `measured` of the first mini-batch.

        A shard that it has no row of gets one here, and every row with a token that its engine finds very unlikely:
        what is wrong must show before the first update. A shard of which only an earlier policy's tokens can be
        compared gets a few under that policy, if it is the kept one. In their place the base policy is kept when such a
        shard is met."""
        started, samples = time.perf_counter(), batch.samples
        if len(samples.shards_B):
            self._probe(batch, np.isin(np.arange(samples.num_rows), measured), meter, weights="gap_weights")
            if batch.values["kept_gap_weights"].any():
                nothing_B, kept = np.zeros(samples.num_rows, bool), "kept_gap_weights"
                with self.kept.in_place():
                    self._probe(batch, nothing_B, meter, weights=kept, per_shard=_KEPT_ROWS)
        gap = meter.result(self._sum)
        gap.check(samples.shard_ids or ["these samples"], max_gap=max_gap)
        if self.kept.is_due(samples.versions_T[samples.mask_T], base_version=batch.base_version):
            self.kept.keep(batch.base_version)
        self.gap_seconds = time.perf_counter() - started
        return gap.metrics()

    def _probe(
        self, batch: StepBatch, measured_B: np.ndarray, meter: GapMeter, *, weights: str, per_shard: int = 1
    ) -> None:
        """Measure the gap of shards without a measured row, on their first rows with a token of `weights`."""
        samples = batch.samples
        counted_B = np.maximum.reduceat(batch.values[weights], samples.offsets[:-1]) > 0
        rows = rows_to_probe(samples.shards_B, counted_B, measured_B, per_shard=per_shard)
        if weights == "gap_weights":
            odd_B = np.minimum.reduceat(np.where(samples.mask_T, samples.logprobs_T, 0), samples.offsets[:-1])
            rows = np.union1d(rows, np.flatnonzero((odd_B < -MOST_UNLIKELY) & ~measured_B))
        for pack in self._packs(samples, rows, mask_T=batch.trained_T, values=batch.values):
            logprobs, _ = self._forward(self.model, pack)
            if not pack.is_idle:
                meter.add(logprobs, *_gap_values(pack, weights))

    def _forward(
        self, model: PolicyModel, pack: Pack, *, entropy_grad: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropy = model(
            pack.input_ids,
            pack.targets,
            pack.position_ids,
            pack.layout,
            self._config.sampling.temperature,
            entropy_grad=entropy_grad,
            positions_N=pack.positions,
        )
        return logprobs, entropy

    def _packs(
        self, samples: Samples, rows: np.ndarray, *, mask_T: np.ndarray, values: Mapping[str, np.ndarray]
    ) -> Iterator[Pack]:
        """This rank's; none of no rows."""
        settings = {"budget": self._settings.longest_pack, "spread": self._spread, "device": self.device}
        return packs_of(samples, rows, mask_T=mask_T, values=values, **settings) if len(rows) else iter(())


def _gap_values(pack: Pack, weights: str = "gap_weights") -> list[torch.Tensor]:
    """What `GapMeter.add` wants of a pack beside the trainer's log-probabilities."""
    return [pack.values[name] for name in ("sampled_logprobs", weights, "shards")]
