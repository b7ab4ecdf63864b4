"""Sequence parallelism: several ranks compute one pack, each a stretch of its tokens (DeepSpeed Ulysses,
https://arxiv.org/abs/2309.14509).

    tokens of a pack ─▶ a stretch for each rank ─▶ layers, token by token ─▶ output matrix ─▶ numbers of all tokens
                               └ attention: to_heads ─▶ all tokens, some heads ─▶ to_tokens ┘

In: what a rank has of its stretch, or of its heads. Out: the same of its heads, of its stretch, or of all tokens on all
ranks of the team. A team's ranks then compute the same loss, and each goes backward through its own stretch alone: the
sum of gradients over all ranks is that of one rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from settings.errors import InvalidInput


@dataclass(frozen=True, kw_only=True)
class Team:
    """The ranks that compute a pack together, at least two, and which of them this one is."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def length(self, num_tokens: int) -> int:
        """Tokens of a stretch; those of all ranks are equally long."""
        return -(-num_tokens // self.size)

    def stretch(self, num_tokens: int) -> torch.Tensor:
        """The tokens of this rank, on the host. What a stretch is too long by is the last token again."""
        length = self.length(num_tokens)
        return torch.arange(self.rank * length, (self.rank + 1) * length).clamp(max=num_tokens - 1)


def join_team(size: int) -> Team | None:
    """Neighbouring ranks as teams of this size; None for 1. Every rank must call it."""
    if size == 1:
        return None
    group, _ = dist.new_subgroups(size)
    return Team(group=group, rank=dist.get_rank(group), size=size)


def to_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, team: Team, num_tokens: int
) -> list[torch.Tensor]:
    """From all heads of a stretch, [S, heads, width], to this rank's heads of all tokens, [T, heads / ranks, width], in
    one all-to-all. Keys and values of fewer heads are repeated as far as every rank needs some.

    Raises `InvalidInput` for a number of heads that the team cannot divide among its ranks.
    """
    if query.shape[1] % team.size:
        what = f"a layer with {query.shape[1]} heads cannot be divided among {team.size} ranks"
        raise InvalidInput(f"{what}; lower train.sequence_parallel to a divisor")
    repeats = team.size // math.gcd(team.size, key.shape[1])
    key, value = (part.repeat_interleave(repeats, 1) if repeats > 1 else part for part in (key, value))
    by_rank = [part.unflatten(1, (team.size, -1)) for part in (query, key, value)]
    sent_RSW = torch.cat([part.flatten(2).transpose(0, 1) for part in by_rank], -1)
    received_TW = _Exchange.apply(sent_RSW, team.group).flatten(0, 1)[:num_tokens]
    shapes = [part.shape[2:] for part in by_rank]
    parts = received_TW.split([math.prod(shape) for shape in shapes], -1)
    return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]


def to_tokens(output_THd: torch.Tensor, team: Team) -> torch.Tensor:
    """Back from this rank's heads of all tokens, [T, heads / ranks, width], to all heads of its stretch, in one
    all-to-all."""
    num_tokens, *shape = output_THd.shape
    length = team.length(num_tokens)
    sent_RSW = pad(output_THd.flatten(1), (0, 0, 0, team.size * length - num_tokens)).unflatten(0, (-1, length))
    received_SRW = _Exchange.apply(sent_RSW, team.group).transpose(0, 1)
    return received_SRW.reshape(length, team.size * shape[0], shape[1])


def own_heads(values_H: torch.Tensor, team: Team) -> torch.Tensor:
    """What this rank's heads have of values of all heads."""
    return values_H.chunk(team.size)[team.rank]


def on_all(values: torch.Tensor, team: Team | None) -> torch.Tensor:
    """The sum over the team, where at most one rank has another number than 0. All of them must go on to compute the
    same loss: then the gradient of each rank's own part is what it is on any of them."""
    return values if team is None else _OnAll.apply(values, team.group)


def of_all_tokens(values_S: torch.Tensor, team: Team, *, num_tokens: int) -> torch.Tensor:
    """Values of a stretch, [S, W], as those of all tokens, [T, W], on all ranks of the team; see `on_all`."""
    before, after = team.rank * len(values_S), (team.size - 1 - team.rank) * len(values_S)
    return on_all(pad(values_S, (0, 0, before, after)), team)[:num_tokens]


class _Exchange(torch.autograd.Function):
    """All-to-all: the part [i] of rank j becomes the part [j] of rank i."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Exchange.apply(gradient, ctx.group), None


class _OnAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None
