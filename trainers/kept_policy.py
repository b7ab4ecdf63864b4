"""The weights of one earlier policy, so that what it sampled is compared with its own probabilities.

In: the model's parameters. Out: the model with the earlier weights in it, for as long as they are asked for.

    step with stale rows ─▶ keep(base policy) ─▶ later a claim has rows of that policy ─▶ in_place: forward, compare
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import nn

from trainers.model.distributed import local


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

    def forget(self) -> None:
        """Keep nothing: the weights became others than the policy's that the log names."""
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
