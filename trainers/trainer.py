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
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from infra.environment import FEW_PRIMITIVES, KEEPS_FREED_MEMORY, adopt_malloc
from settings.errors import InvalidInput
from settings.run_file import RunConfig
from settings.train import TrainSettings
from trainers.critic import Critic
from trainers.data.operations import Operations
from trainers.data.samples import Samples
from trainers.data.staleness import staleness_metrics
from trainers.gap_probes import GapProbes, KeptPolicy
from trainers.health import FiniteCheck, GapMeter, NonFinite
from trainers.model.batches import Pack, Spread, packs_of
from trainers.model.distributed import (
    choose_device,
    give_back_device_memory,
    move,
    shard,
    start_process_group,
    sum_over_ranks,
)
from trainers.model.experts import ROUTER_TERMS
from trainers.model.kinds import refuse_team
from trainers.model.lora import without_adapters
from trainers.model.model import PolicyModel, load_model
from trainers.model.teams import join_team
from trainers.objective.credit import Looked, assign_credit
from trainers.objective.objective import loss_inputs, needs_entropy_grad, objective, off_policy_sums, with_routers
from trainers.optimizer import Ema, clip_gradient, learning_rate, make_optimizer, scale_gradients, zero_gradients
from trainers.refusals import refuse_options
from trainers.step_batch import StepBatch, Update, UpdateSums, lag_and_in_time, minibatches, step_batch, step_metrics


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
            for name, value in FEW_PRIMITIVES.items():  # read at the first product
                os.environ.setdefault(name, value)
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
        self.begun: Update | None = None
        """The update of the next step, as far as its parts are in."""
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
        self._operations = Operations.of(self.model.causal_lm)
        self._done = 0.0  # operations of this rank's passes for the step that is to come
        by_work = {"attention_length": self._operations.attention_length} if settings.balance == "flops" else {}
        number, num_teams = dist.get_rank() // size, dist.get_world_size() // size
        self._spread = Spread(rank=number, world_size=num_teams, **by_work, team=team)
        self.probes = GapProbes(self.kept, self._logprobs, self._sum)

    def step(
        self, samples: Samples, *, step: int, base_version: int, max_staleness: float, max_gap: float = math.inf
    ) -> dict[str, float]:
        """Train on one claim's samples; returns the step's metrics, means over trained tokens or attempts.

        `step` counts from 1 and sets the learning rate and the mini-batch shuffle. `max_gap` is for steps that the log
        does not know yet. What `accumulate` has been given before is of this step, and all of it.

        Raises `trainers.health.GapTooLarge` and `ValueError` with weights and optimizer as they were;
        `trainers.health.NonFinite` before the update it would have spoilt.
        """
        settings, begun = self._settings, self.begun
        self._set_learning_rate(step)
        self.begun = None
        lag_T, in_time_T = lag_and_in_time(samples, settings, base_version=base_version, max_staleness=max_staleness)
        batch = None if begun else self._batch(samples, in_time_T, base_version=base_version)
        rows_of_updates = [np.arange(samples.num_rows)]
        if batch is not None:
            rows_of_updates = list(minibatches(samples, settings, seed=self._config.seed, step=step))
        updates: list[UpdateSums] = []
        trains = self._trains_policy(step)
        for number, rows in enumerate(rows_of_updates):
            update = begun or Update(number=number)
            if batch is not None:
                self._accumulate(update, batch, rows, progress=number / len(rows_of_updates), trains_policy=trains)
            updates.append(
                self._conclude(update, samples, rows, base_version=base_version, trains_policy=trains, max_gap=max_gap)
            )
        counts = begun or batch
        assert counts is not None
        replayed = {"routes_replayed": counts.num_routed / max(1, counts.num_trained)}
        flops, self._done = float(self._sum(np.array([self._done]))[0]), 0.0
        return {
            **step_metrics(samples, updates),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "trained_tokens": float(counts.num_trained),
            "measured_groups": float(counts.num_measured),
            "train_flops": flops,
            **(replayed if samples.routed_T is not None else {}),
            **staleness_metrics(lag_T, samples.mask_T, in_time_T, max_staleness=max_staleness),
        }

    def accumulate(self, samples: Samples, *, step: int, base_version: int) -> None:
        """Add the gradients of a part of a step's groups, whose other groups follow, to those of the parts before it.
        Only for settings that `storage.log.claims.waits_for_batch` has nothing against."""
        if self.begun is None:
            self.begun = Update()
        _, in_time_T = lag_and_in_time(samples, self._settings, base_version=base_version, max_staleness=0)
        batch = self._batch(samples, in_time_T, base_version=base_version)
        update, rows = self.begun, np.arange(samples.num_rows)
        self._accumulate(update, batch, rows, progress=0.0, trains_policy=self._trains_policy(step), is_part=True)
        update.num_parts += 1
        update.denominator += batch.denominator(rows, self._settings.aggregation)
        update.num_trained += batch.num_trained
        update.num_measured += batch.num_measured
        update.num_routed += batch.num_routed

    def _batch(self, samples: Samples, in_time_T: np.ndarray, *, base_version: int) -> StepBatch:
        """Everything that the losses of these samples need, of the weights as they are now."""
        settings = self._settings
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
        return batch

    def step_without_gradient(self, *, step: int) -> dict[str, float]:
        """What `step` does to the optimizer if every token is masked: its gradient is zero, so nothing is computed, but
        the schedule goes on, and AdamW's momentum and weight decay move the weights."""
        self._set_learning_rate(step)
        zero_gradients(optimizer for optimizer, _ in self._optimizers)
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
        wholes = [self.model, self._reference, None if self.critic is None else self.critic.model]
        modules = [module for module in wholes if module is not None]
        held = [] if self._settings.offload_optimizer else modules
        move(held, [optimizer for optimizer, _ in self._optimizers] if held else [], device)
        if self.ema is not None and held:
            self.ema.move(device)
        if device.type == "cpu":
            for policy in (part for module in modules for part in module.modules() if isinstance(part, PolicyModel)):
                policy.routers.seen = []
            give_back_device_memory()

    def free_gradients(self) -> None:
        """Give back the memory of the last update's gradients: the next one makes its own."""
        for optimizer, _ in self._optimizers:
            optimizer.zero_grad()

    def _accumulate(
        self,
        update: Update,
        batch: StepBatch,
        rows: np.ndarray,
        *,
        progress: float,
        trains_policy: bool,
        is_part: bool = False,
    ) -> None:
        """Add gradients, and sums over trained tokens, of whole groups to an update. Groups whose gradient is 0 count
        in the weights of tokens, and are not computed. `progress` is the share of the step's updates before this."""
        samples, settings = batch.samples, self._settings
        if not update.checks:
            self.free_gradients()
        kept = self.probes.of_kept(update, batch) if update.number == 0 else GapMeter()
        max_tokens = self._config.sampling.max_tokens
        weights_T = batch.weights_T(rows, settings.aggregation, max_tokens=max_tokens, is_part=is_part)
        values = {**batch.values, "weights": weights_T}
        finite = FiniteCheck()
        moving = rows[batch.moving_B[rows]]
        for pack in self._packs(samples, moving, mask_T=batch.trained_T, values=values):
            with torch.set_grad_enabled(trains_policy):
                logprobs, entropy = self._forward(self.model, pack, entropy_grad=needs_entropy_grad(settings))
            base = batch.base_version
            inputs, sums = loss_inputs(pack, logprobs, entropy, settings, base_version=base, version=base + progress)
            output = objective(inputs, settings)
            loss, router_sums = with_routers(output.loss, self.model.routers.seen, pack, settings.router)
            if trains_policy:
                loss.backward()
            if update.number == 0 and not pack.is_idle:
                update.meter.add(logprobs, *pack.gap_values())
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
                self._count(pack, num_predicted=0, passes=3)
            update.add(sums)
            update.num_packs += 1
        update.checks.append((finite, samples))
        if update.number == 0:
            self.probes.of_unmeasured(update, batch, moving)
            update.meter.join(kept)

    def _conclude(
        self,
        update: Update,
        samples: Samples,
        rows: np.ndarray,
        *,
        base_version: int,
        trains_policy: bool,
        max_gap: float,
    ) -> UpdateSums:
        """Take the update, whose gradients are there."""
        if not update.num_packs:
            zero_gradients(optimizer for optimizer, _ in self._optimizers)
        bad = [
            name
            for finite, of in update.checks
            for name in of.names(finite.bad_rows(of.offsets, sum_over_ranks=self._sum))
        ]
        gap: dict[str, float] = {}
        if update.number == 0:
            try:
                # Before anything else: what an engine reports wrongly makes a loss infinite too.
                gap = self.probes.conclude(update, samples, base_version=base_version, max_gap=max_gap)
            except NonFinite:
                if not bad:  # else its rows are named, below
                    raise
        if bad:
            raise NonFinite("the loss or a log-probability", bad, update.number)
        if update.num_parts:
            self._divide(update)
        norms = self._apply(samples.names(rows), number=update.number, trains_policy=trains_policy)
        keys = sorted(update.sums)
        of_all_ranks = self._sum(np.array([update.sums[key] for key in keys])).tolist()
        return UpdateSums(dict(zip(keys, of_all_ranks, strict=True)), norms, gap)

    def _divide(self, update: Update) -> None:
        """Gradients, and the losses that made them, by what the weights of parts were not divided by."""
        scale_gradients(self.model.parameters(), scale := 1 / max(1, update.denominator))
        update.sums |= {name: update.sums[name] * scale for name in ("loss", *ROUTER_TERMS) if name in update.sums}

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
                self._count(pack, num_predicted=0)
            for name in arrays.keys() & values.keys() if not pack.is_idle else ():
                pack.to_tokens(values[name], arrays[name])
        # Each rank has filled in its own rows.
        return Looked(**{f"{name}_T": np.where(samples.mask_T, self._sum(a), 0) for name, a in arrays.items()})

    def _logprobs(self, batch: StepBatch, rows: np.ndarray) -> Iterator[tuple[Pack, torch.Tensor]]:
        """Packs of some rows, each with the log-probability of every token."""
        for pack in self._packs(batch.samples, rows, mask_T=batch.trained_T, values=batch.values):
            yield pack, self._forward(self.model, pack)[0]

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
        backward = 2 if self._settings.lora is None else 1  # frozen weights need no gradient
        self._count(pack, num_predicted=pack.num_predicted, passes=1 + backward * torch.is_grad_enabled())
        return logprobs, entropy

    def _count(self, pack: Pack, *, num_predicted: int, passes: int = 1) -> None:
        if not pack.is_idle:
            sizes = {"computed": pack.layout.num_computed, "predicted": num_predicted, "pairs": pack.layout.num_pairs}
            self._done += passes * self._operations.forward(**sizes)

    def _packs(
        self, samples: Samples, rows: np.ndarray, *, mask_T: np.ndarray, values: Mapping[str, np.ndarray]
    ) -> Iterator[Pack]:
        """This rank's; none of no rows."""
        settings = {"budget": self._settings.longest_pack, "spread": self._spread, "device": self.device}
        return packs_of(samples, rows, mask_T=mask_T, values=values, **settings) if len(rows) else iter(())
