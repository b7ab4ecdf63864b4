"""The gap between engine and trainer, before a step's first update, where no gradient shows it in passing.

In: a step's batch and what its forward passes have measured. Out: the gap, or `trainers.health.GapTooLarge`.

    shards without a measured row ─▶ forward passes of a few rows
    shards of the one earlier policy that is kept ─▶ the model with its weights ─▶ forward passes of a few rows

A step with stale rows keeps the policy it starts from; later claims have rows of that policy.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import nn

from infra.environment import give_back_beside_large
from trainers.data.samples import Samples
from trainers.health import MOST_UNLIKELY, GapMeter, Reduce, rows_to_probe
from trainers.model.batches import Pack
from trainers.model.distributed import local
from trainers.step_batch import StepBatch, Update

Forward = Callable[[StepBatch, np.ndarray], Iterator[tuple[Pack, torch.Tensor]]]
"""Packs of some rows of a batch, each with the trainer's log-probability of every token."""
_KEPT_ROWS = 4
"""Rows of a shard that are compared under the kept policy: a few are enough to see an engine with other weights."""


class KeptPolicy:
    """A copy of the trainable parameters in host memory, sharded as they are, in the type they are computed in."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, dtype: torch.dtype) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._dtype = dtype
        self._weights: list[torch.Tensor] = []
        self.version: int | None = None
        """The policy that is kept; None if none is."""

    def is_due(self, sampled_versions: np.ndarray, *, base_version: int) -> bool:
        """True if the policy being trained should be kept: tokens of earlier ones are coming in, and those of the kept
        one have come, or were passed over: claims take the oldest first."""
        behind = sampled_versions[sampled_versions != base_version]
        return len(behind) > 0 and (self.version is None or behind.max() >= self.version)

    @torch.no_grad()
    def keep(self, version: int) -> None:
        """Copy the weights as they are now, in the place of those of before."""
        now = [local(parameter) for parameter in self._parameters]
        if not self._weights:
            self._weights = [torch.empty_like(weights, device="cpu", dtype=self._dtype) for weights in now]
        for kept, weights in zip(self._weights, now, strict=True):
            kept.copy_(weights)
        self.version = version

    @property
    def num_bytes(self) -> int:
        """Of the weights that are kept."""
        return sum(weights.nbytes for weights in self._weights)

    def forget(self) -> None:
        """Keep nothing: the policy is not needed again, or the weights became others than its that the log names."""
        self._weights, self.version = [], None

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the kept weights inside, and its own again afterwards, bit for bit."""
        own = [local(parameter).to("cpu", copy=True) for parameter in self._parameters]
        self._put(self._weights)
        try:
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, weights: list[torch.Tensor]) -> None:
        for parameter, its in zip(self._parameters, weights, strict=True):
            local(parameter).copy_(its)


class GapProbes:
    """Forward passes for the gap alone."""

    def __init__(self, kept: KeptPolicy, forward: Forward, sum_over_ranks: Reduce) -> None:
        self._kept, self._forward, self._sum = kept, forward, sum_over_ranks
        self.seconds = 0.0
        """What the last step spent on them, and on copies of weights."""

    @torch.no_grad()
    def of_kept(self, update: Update, batch: StepBatch) -> GapMeter:
        """A few rows of each shard of which only the kept policy's tokens can be compared. Call it before there are
        gradients: the policy's own weights stand aside meanwhile.

        If the base policy will be kept after this batch, the kept one leaves its memory to gradients and activations. A
        batch that is refused then has those tokens of the next one compared as tokens of a policy that is not kept."""
        started, meter, nothing_B = time.perf_counter(), GapMeter(), np.zeros(batch.samples.num_rows, bool)
        if len(batch.samples.shards_B) and batch.values["kept_gap_weights"].any():
            with self._kept.in_place():
                self._probe(batch, nothing_B, meter, weights="kept_gap_weights", per_shard=_KEPT_ROWS)
        if self._is_due(batch.samples, base_version=batch.base_version):
            num_bytes = self._kept.num_bytes
            self._kept.forget()
            give_back_beside_large(num_bytes)  # and that of the weights that stood aside
        update.gap_seconds += time.perf_counter() - started
        return meter

    @torch.no_grad()
    def of_unmeasured(self, update: Update, batch: StepBatch, measured: np.ndarray) -> None:
        """Rows beside those that have been `measured` with their gradient: one of each shard that has none, and every
        row with a token that its engine finds very unlikely."""
        started, samples = time.perf_counter(), batch.samples
        if len(samples.shards_B):
            self._probe(batch, np.isin(np.arange(samples.num_rows), measured), update.meter, weights="gap_weights")
        update.gap_seconds += time.perf_counter() - started

    @torch.no_grad()
    def conclude(self, update: Update, samples: Samples, *, base_version: int, max_gap: float) -> dict[str, float]:
        """The gap's metrics over all ranks. The base policy is kept, to compare later shards with, once a shard of the
        kept one is met. Raises `trainers.health.GapTooLarge`."""
        started = time.perf_counter()
        gap = update.meter.result(self._sum, num_shards=max(1, len(samples.shard_ids)))
        gap.check(samples.shard_ids or ["these samples"], max_gap=max_gap)
        if self._is_due(samples, base_version=base_version):
            self._kept.keep(base_version)
        self.seconds = update.gap_seconds + time.perf_counter() - started
        return gap.metrics()

    def _is_due(self, samples: Samples, *, base_version: int) -> bool:
        return self._kept.is_due(samples.versions_T[samples.mask_T], base_version=base_version)

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
        for pack, logprobs in self._forward(batch, rows):
            if not pack.is_idle:
                meter.add(logprobs, *pack.gap_values(weights))
