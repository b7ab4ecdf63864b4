"""One optimizer step from samples: advantages, packs, loss, gradient, update.

In: a policy folder, then `Samples` step by step. Out: metrics; and the weights, when asked.

    Samples ─▶ advantages (by group id) ─▶ mini-batches of whole groups ─▶ packs ─▶ logprobs ─▶ loss
                                                                                        └─▶ backward ─▶ AdamW

The result is a function of policy, samples, settings, seed and step alone: replaying a step gives the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from trainers.advantages import group_advantages
from trainers.config import TrainSettings
from trainers.distributed import choose_device, shard, start_process_group, sum_over_ranks
from trainers.losses import cispo_loss, clip_loss
from trainers.model import load_model
from trainers.packing import block_causal_mask, pack_rows, position_ids
from trainers.samples import Samples
from trainers.staleness import lag_of_tokens, staleness_metrics, tokens_to_train


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Several sequences end to end, on the device; every tensor but the mask has shape [T]."""

    input_ids: torch.Tensor
    targets: torch.Tensor
    """The next token of the same sequence; 0 behind its last one, where the mask is 0 too."""
    trained: torch.Tensor
    """1 where the target was sampled by the policy and may be trained."""
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor
    tokens: np.ndarray
    """Where each token stands in the samples' flat arrays."""
    is_last: np.ndarray
    """True on the last token of each sequence."""

    def next_token(self, values_T: np.ndarray) -> torch.Tensor:
        """What belongs to the token each position predicts; 0 behind the end of a sequence."""
        return _next_token(values_T, self.tokens, self.is_last).to(self.input_ids.device)


class Trainer:
    """Holds the policy and the optimizer of one rank."""

    def __init__(
        self, folder: Path, settings: TrainSettings, *, learning_rate: float, temperature: float, seed: int
    ) -> None:
        self._settings = settings
        self._learning_rate = learning_rate
        self._temperature = temperature
        self._seed = seed
        self.device = choose_device(settings.device)
        mesh = start_process_group(self.device)
        self.model = load_model(folder)
        shard(self.model, self.model.layers, mesh=mesh, dtype=getattr(torch, settings.dtype))
        self.model.to(self.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=learning_rate, weight_decay=settings.weight_decay, betas=(0.9, 0.99)
        )

    def step(self, samples: Samples, *, step: int, base_version: int, max_staleness: float) -> dict[str, float]:
        """Train on one claim's samples; returns the step's metrics, means over trained tokens or attempts.

        `step` counts from 1 and sets the learning rate and the mini-batch shuffle. Fewer groups than mini-batches make
        as many mini-batches as there are groups.
        """
        settings = self._settings
        self._set_learning_rate(step)
        advantages_B, reward_metrics = self._advantages(samples)
        mask_T, bound = samples.mask_T, {"max_staleness": max_staleness}
        lag_T = lag_of_tokens(
            samples.versions_T, mask_T, base_version=base_version, steps_per_update=settings.steps_per_update
        )
        trained_T = tokens_to_train(lag_T, mask_T, stale_policy=settings.stale_policy, **bound)
        proximal_T = self._current_logprobs(samples) if settings.stale_policy == "correct" else None
        totals: dict[str, float] = {}
        grad_norms: list[float] = []
        at_start: dict[str, float] = {}
        order = np.random.Generator(np.random.PCG64([self._seed, step])).permutation(np.unique(samples.groups_B))
        num_minibatches = min(settings.num_minibatches, len(order))
        for groups in np.array_split(order, num_minibatches):
            rows = np.flatnonzero(np.isin(samples.groups_B, groups))
            sums, grad_norm = self._update(samples, rows, advantages_B, trained_T, proximal_T)
            off_policy = {name: sums.pop(name) for name in _OFF_POLICY}
            # Before the first update the trainer holds the step's base policy: staleness and the engine make the rest.
            at_start = at_start or {"tokens": max(1.0, sums["tokens"]), **off_policy}
            grad_norms.append(grad_norm)
            totals = {key: totals.get(key, 0.0) + value for key, value in sums.items()}
        num_trained = max(1.0, totals.pop("tokens"))
        return {
            "loss": totals.pop("loss") / num_minibatches,
            **{key: value / num_trained for key, value in totals.items()},
            **reward_metrics,
            "engine_gap": at_start["log_ratio_size"] / at_start["tokens"],
            "off_policy_kl": at_start["off_policy_kl"] / at_start["tokens"],
            "effective_sample_size": at_start["ratio"] ** 2
            / max(1e-30, at_start["tokens"] * at_start["ratio_squared"]),
            "grad_norm": float(np.mean(grad_norms)),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "trained_tokens": num_trained,
            "trained_rows": float(samples.num_rows),
            "trained_groups": float(len(order)),
            **staleness_metrics(lag_T, mask_T, trained_T, **bound),
        }

    def step_without_gradient(self, *, step: int) -> dict[str, float]:
        """What `step` does to the optimizer where every token is masked: schedule and moments go on.

        The gradient is zero, so nothing is computed; AdamW's momentum and weight decay still move the weights.
        """
        self._set_learning_rate(step)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for _ in range(self._settings.num_minibatches):
            self.optimizer.step()
        return {"learning_rate": self.optimizer.param_groups[0]["lr"]}

    def _set_learning_rate(self, step: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate * min(1.0, step / max(1, self._settings.warmup_steps))

    def _advantages(self, samples: Samples) -> tuple[np.ndarray, dict[str, float]]:
        """Advantage per row (a forked attempt's rows share one), and reward metrics over attempts."""
        _, first_row = np.unique(samples.attempts_B, return_index=True)
        rewards = torch.from_numpy(samples.rewards_B[first_row])
        groups = torch.from_numpy(samples.groups_B[first_row].astype(np.int64))
        advantages = group_advantages(rewards, groups, scale=self._settings.scale)
        num_groups = len(groups.unique())
        undecided = sum(1 for group in groups.unique() if not advantages[groups == group].any())
        return advantages.numpy()[samples.attempts_B], {
            "reward": float(rewards.nanmean()),
            "fraction_groups_without_signal": undecided / num_groups,
        }

    def _update(
        self,
        samples: Samples,
        rows: np.ndarray,
        advantages_B: np.ndarray,
        trained_T: np.ndarray,
        proximal_T: np.ndarray | None,
    ) -> tuple[dict[str, float], float]:
        """One optimizer update on whole groups. Sums over trained tokens of all ranks, and the gradient norm.

        With `proximal_T`, decoupled PPO (https://arxiv.org/abs/2505.24298 eq. 5): clip around the policy as it was
        when the step began, and weigh each token by how far that had moved from the policy that sampled it.
        """
        settings = self._settings
        # Counted before stale tokens are masked: masking must not make the remaining tokens louder.
        denominator = max(1.0, float(samples.mask_T[_tokens_of(samples, rows)].sum()))
        packs = self._packs(samples, rows, advantages_B, trained_T)
        totals = {"loss": 0.0, "tokens": 0.0, "entropy": 0.0}
        self.optimizer.zero_grad(set_to_none=True)
        for pack in packs:
            weights, old_logprobs = None, pack.old_logprobs
            if proximal_T is not None:
                old_logprobs = pack.next_token(proximal_T)
                weights = (old_logprobs - pack.old_logprobs).exp().clamp(max=settings.importance_cap)
            logprobs, entropy = self._logprobs(pack)
            shared: dict[str, Any] = {"denominator": denominator, "clip_high": settings.clip_high, "weights_T": weights}
            tokens = (logprobs, old_logprobs, pack.advantages, pack.trained)
            match settings.loss:
                case "clip":
                    output = clip_loss(*tokens, clip_low=settings.clip_low, **shared)
                case "cispo":
                    output = cispo_loss(*tokens, **shared)
            output.loss.backward()
            sums = {
                "loss": float(output.loss.detach()),
                "tokens": float(pack.trained.sum()),
                "entropy": float((entropy * pack.trained).sum()),
                **_off_policy_sums(logprobs.detach(), pack),
                **output.sums,
            }
            totals = {key: totals.get(key, 0.0) + value for key, value in sums.items()}
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.max_grad_norm)
        self.optimizer.step()
        norm = grad_norm.full_tensor() if hasattr(grad_norm, "full_tensor") else grad_norm
        return sum_over_ranks(totals, self.device), float(norm)

    def _current_logprobs(self, samples: Samples) -> np.ndarray:
        """Every token's log-probability under the weights as they are now, 0 where nothing was sampled; shape [T]."""
        nothing_B, logprobs_T = (
            np.zeros(samples.num_rows, np.float32),
            np.zeros(len(samples.mask_T), np.float32),
        )
        with torch.no_grad():
            for pack in self._packs(samples, np.arange(samples.num_rows), nothing_B, samples.mask_T):
                predicted, _ = self._logprobs(pack)
                inner = ~pack.is_last
                logprobs_T[pack.tokens[inner] + 1] = predicted.cpu().numpy()[inner]
        gathered = torch.from_numpy(logprobs_T).to(self.device)
        # Each rank has filled its own rows only; an idle rank's extra pack repeats the first one's values.
        dist.all_reduce(gathered, op=dist.ReduceOp.MIN)
        return np.where(samples.mask_T, gathered.cpu().numpy(), 0.0).astype(np.float32)

    def _logprobs(self, pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropy = self.model(
            pack.input_ids, pack.targets, pack.position_ids, pack.attention_mask, self._temperature
        )
        return logprobs, entropy

    def _packs(self, samples: Samples, rows: np.ndarray, advantages_B: np.ndarray, trained_T: np.ndarray) -> list[Pack]:
        """This rank's packs. All ranks get equally many, so that their collectives stay in step."""
        lengths = np.diff(samples.offsets)[rows]
        packs = pack_rows(lengths, budget=self._settings.tokens_per_microbatch)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        mine = packs[rank::world_size]
        idle_rounds = -(-len(packs) // world_size) - len(mine)
        built = [self._pack(samples, rows[pack], advantages_B, trained_T) for pack in mine]
        silent = np.zeros_like(trained_T)
        return built + [self._pack(samples, rows[packs[0]], advantages_B, silent) for _ in range(idle_rounds)]

    def _pack(self, samples: Samples, rows: np.ndarray, advantages_B: np.ndarray, trained_T: np.ndarray) -> Pack:
        tokens = _tokens_of(samples, rows)
        lengths = np.diff(samples.offsets)[rows]
        is_last = np.zeros(len(tokens), dtype=bool)
        is_last[np.cumsum(lengths) - 1] = True

        def next_token(values_T: np.ndarray) -> torch.Tensor:
            return _next_token(values_T, tokens, is_last).to(self.device)

        return Pack(
            input_ids=torch.from_numpy(samples.input_ids_T[tokens]).to(self.device).long(),
            targets=next_token(samples.input_ids_T).long(),
            trained=next_token(trained_T.astype(np.float32)),
            old_logprobs=next_token(samples.logprobs_T),
            advantages=torch.from_numpy(np.repeat(advantages_B[rows], lengths)).to(self.device),
            position_ids=position_ids(lengths).to(self.device),
            attention_mask=block_causal_mask(lengths).to(self.device),
            tokens=tokens,
            is_last=is_last,
        )


_OFF_POLICY = ("log_ratio_size", "off_policy_kl", "ratio", "ratio_squared")


def _off_policy_sums(logprobs_T: torch.Tensor, pack: Pack) -> dict[str, float]:
    """How far the policy has moved from the ones that sampled, summed over trained tokens; ρ = now / when sampled.

    k3 = ρ − 1 − ln ρ, http://joschu.net/blog/kl-approx.html
    """
    log_ratio_T = (logprobs_T - pack.old_logprobs) * pack.trained
    ratio_T = log_ratio_T.exp() * pack.trained
    sums = (log_ratio_T.abs(), ratio_T - pack.trained - log_ratio_T, ratio_T, ratio_T.square())
    return {name: float(values_T.sum()) for name, values_T in zip(_OFF_POLICY, sums, strict=True)}


def _next_token(values_T: np.ndarray, tokens: np.ndarray, is_last: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.where(is_last, 0, np.roll(values_T[tokens], -1)))


def _tokens_of(samples: Samples, rows: np.ndarray) -> np.ndarray:
    return np.concatenate([np.arange(samples.offsets[row], samples.offsets[row + 1]) for row in rows])
