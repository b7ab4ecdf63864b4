"""Where the tokens of a pack stand, and how values of tokens are moved to where a layer needs them.

In: the lengths of a pack's sequences, and which of their tokens are the same. Out: a `Layout`, made once per pack, and
values of tokens end to end, or with sequences of similar length side by side, padded to the longest.

Tokens that stand after the same tokens have the same states: the model computes them once, as one row of its inputs,
and only layers that mix tokens get a copy for each sequence they belong to (Prefix Grouper,
https://arxiv.org/abs/2506.05433).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import embedding_bag
from torch.utils.checkpoint import checkpoint

from settings.errors import InvalidInput
from trainers.data.packing import new_tokens, position_ids
from trainers.data.samples import ARITHMETIC
from trainers.model.teams import Team

_SHORTEST_TO_LONGEST = 0.75
"""Sequences of at least this share of the longest stand in one batch with it: padding wastes at most a quarter."""
_LONG, _GRAIN = 8192, 512
"""From this mean length on, sequences on a GPU stand one by one, rounded up to multiples: cuDNN needs a tenth of a
second for each length it has not had. On an H200, a forward and a backward pass of sequences of 16k, 4k and 2k tokens
with it takes 0.60, 0.88 and 1.40 of flash attention's time."""


class Batch(NamedTuple):
    """Sequences that are padded to one length, of each of which the last tokens ask, padded to one number too."""

    num_sequences: int
    length: int
    num_asking: int
    asked_SQ: torch.Tensor | None = None
    """Each asking token's place in its sequence, on the device; None if all tokens of all sequences ask."""


class Attending(NamedTuple):
    """Where attention wants queries, and where keys and values, to stand."""

    queries: Places
    keys: Places
    batches: list[Batch]


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where a kernel wants the computed tokens to stand, and where its results are read. On the device."""

    take_P: torch.Tensor  # the computed token at each place; any at an empty place
    place_U: torch.Tensor  # the place at which each computed token's result is read: its first
    unread_E: torch.Tensor  # the other places
    copies_P: torch.Tensor  # the places that hold a token, those of one token after the other
    first_copy_U: torch.Tensor
    """Where the places of each computed token start in `copies_P`, and the last ones end, [U + 1]."""
    is_identity: bool  # every place holds the token of its number: there is nothing to move


class Layout:
    """Where a pack's tokens stand: end to end, or with sequences of similar length side by side.

    One object, because FSDP moves tensors among a model's arguments to the GPU, and some are needed on the host.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        *,
        device: torch.device,
        computed_T: torch.Tensor | None = None,
        arithmetic: int = ARITHMETIC,
        team: Team | None = None,
    ) -> None:
        """`lengths` are those of the sequences. With `computed_T` (`trainers.data.packing.shared_tokens`, on the host)
        what sequences begin with in common is computed once. With a `team` each of its ranks computes a stretch of the
        pack. Raises `ValueError` without a sequence, or for an empty one."""
        self._device = device
        self.team = team
        self.routes_SLC: torch.Tensor | None = None
        """The experts to replay for each state of this rank."""
        self.arithmetic = arithmetic
        self.lengths_S = torch.as_tensor(lengths, dtype=torch.int64)  # on the host
        if not len(self.lengths_S) or int(self.lengths_S.min()) < 1:
            raise InvalidInput(f"lengths {self.lengths_S.tolist()}: a pack has a sequence, and a sequence a token")
        ends_S = self.lengths_S.cumsum(0)
        self._starts_S = ends_S - self.lengths_S
        self._computed_T = torch.arange(int(ends_S[-1])) if computed_T is None else computed_T
        self.computed_T = None if computed_T is None else computed_T.to(device, non_blocking=True)
        """The computed token that each token is, on the device; None where no two are the same."""
        self.offsets_S = torch.cat([ends_S.new_zeros(1), ends_S]).to(device, torch.int32, non_blocking=True)
        """Where each sequence starts and the last one ends, int32 on the device: flash attention's cu_seqlens."""
        self.longest = int(self.lengths_S.max())
        self._order = torch.argsort(self.lengths_S, descending=True, stable=True)
        by_length = self.lengths_S[self._order].tolist()
        self.is_one_by_one = device.type == "cuda" and int(ends_S[-1]) >= _LONG * len(by_length)
        self.batches: list[Batch] = []
        """The sequences by falling length: those of similar length padded to the longest of them, or each by itself."""
        for length in by_length:
            if self.is_one_by_one:
                self.batches.append(Batch(1, *[-(-length // _GRAIN) * _GRAIN] * 2))
            elif self.batches and length >= self.batches[-1].length * _SHORTEST_TO_LONGEST:
                self.batches[-1] = self.batches[-1]._replace(num_sequences=self.batches[-1].num_sequences + 1)
            else:
                self.batches.append(Batch(1, length, length))

    def replay(self, routes_TLC: torch.Tensor) -> None:
        """Let a model that replays routes choose these experts for the pack's tokens, by layer and choice, int64; its
        own where they are −1."""
        self.routes_SLC = routes_TLC if self.taken_S is None else routes_TLC.index_select(0, self.taken_S)

    @functools.cached_property
    def num_computed(self) -> int:
        """How many tokens the model computes, on all ranks of the team."""
        return int(self._computed_T.max()) + 1

    @functools.cached_property
    def num_pairs(self) -> int:
        """How often a computed token sees another one or itself, if it sees all before it in its sequence."""
        places_T = torch.arange(len(self._computed_T)) - self._starts_S.repeat_interleave(self.lengths_S)
        places_U = places_T.new_zeros(self.num_computed).index_copy(0, self._computed_T, places_T)
        return int((places_U + 1).sum())

    @functools.cached_property
    def taken_S(self) -> torch.Tensor | None:
        """The token of the pack that each state of this rank is of, on the device; None: a state for each token."""
        if self.computed_T is None and self.team is None:
            return None
        first_U = self.end_to_end.place_U
        if self.team is None:
            return first_U
        return first_U.index_select(0, self.team.stretch(self.num_computed).to(self._device))

    @functools.cached_property
    def is_own_T(self) -> torch.Tensor:
        """True for the tokens whose states this rank computes; on the host."""
        if self.team is None:
            return torch.ones(len(self._computed_T), dtype=torch.bool)
        return self._computed_T // self.team.length(self.num_computed) == self.team.rank

    @functools.cached_property
    def own_positions(self) -> torch.Tensor | None:
        """The numbers of these tokens, on the device; None without a team: all."""
        return None if self.team is None else self.is_own_T.nonzero()[:, 0].to(self._device)

    def states_at(self, positions_N: torch.Tensor | None) -> torch.Tensor | None:
        """The row of this rank's states that each position's state is in; None: one for each token, in order. With a
        team the positions are this rank's own."""
        rows_N = positions_N
        if self.computed_T is not None:
            rows_N = self.computed_T if positions_N is None else self.computed_T.index_select(0, positions_N)
        if self.team is None or rows_N is None:
            return rows_N
        return rows_N - self.team.rank * self.team.length(self.num_computed)

    @functools.cached_property
    def end_to_end(self) -> Places:
        """Sequence after sequence."""
        return _places(self._computed_T, torch.arange(len(self._computed_T)), len(self._computed_T), self._device)

    @functools.cached_property
    def side_by_side(self) -> Places:
        """Batch after batch, each sequence padded behind its end."""
        padded = [batch.length for batch in self.batches for _ in range(batch.num_sequences)]
        return self._last_tokens(self._order, self.lengths_S[self._order], torch.tensor(padded))

    @functools.cached_property
    def attending(self) -> Attending:
        """Batch after batch. Of a sequence that shares its first half or more with those before it only the rest asks:
        what the shared part sees is the same in all, and a rectangle of scores is then less than half of a square."""
        if self.computed_T is None or self.arithmetic < 3:
            return Attending(self.side_by_side, self.side_by_side, self.batches)
        new_S = new_tokens(self._computed_T, self.lengths_S)
        asking_S = torch.where(2 * new_S <= self.lengths_S, new_S, self.lengths_S)
        step_S = (asking_S.log() / -math.log(_SHORTEST_TO_LONGEST)).floor()  # as similar as lengths are in a batch
        order = [s for s in self._order.tolist() if asking_S[s]]  # the beginning of another sequence asks nothing
        order.sort(key=lambda s: -float(step_S[s]))
        batches: list[list[int]] = []
        for s in order:
            first = batches[-1][0] if batches else s
            alike = step_S[s] == step_S[first] and self.lengths_S[s] >= self.lengths_S[first] * _SHORTEST_TO_LONGEST
            if batches and alike:
                batches[-1].append(s)
            else:
                batches.append([s])
        made = [self._asking(self.lengths_S[batch], asking_S[batch]) for batch in batches]
        padded = [(batch.num_asking, batch.length) for batch in made for _ in range(batch.num_sequences)]
        num_asking, num_asked = torch.tensor(padded).T
        return Attending(
            self._last_tokens(order, asking_S[order], num_asking),
            self._last_tokens(order, self.lengths_S[order], num_asked),
            made,
        )

    def _asking(self, lengths_S: torch.Tensor, asking_S: torch.Tensor) -> Batch:
        length, num_asking, asked_SQ = int(lengths_S.max()), int(asking_S.max()), None
        if not torch.equal(lengths_S, asking_S):
            asked_SQ = (lengths_S - asking_S)[:, None] + torch.arange(num_asking)
            # No sequence asks at a place beyond the end, which sees something in any window.
            asked_SQ = asked_SQ.clamp(max=length - 1).to(self._device, non_blocking=True)
        return Batch(len(lengths_S), length, num_asking, asked_SQ)

    def _last_tokens(self, order: torch.Tensor | list[int], counts_S: torch.Tensor, padded_S: torch.Tensor) -> Places:
        """So many tokens at the end of each sequence, in this order of sequences, each padded to so many places."""
        within_N = position_ids(counts_S)
        begins_S = self._starts_S[order] + self.lengths_S[order] - counts_S
        token_N = torch.repeat_interleave(begins_S, counts_S) + within_N
        place_N = torch.repeat_interleave(padded_S.cumsum(0) - padded_S, counts_S) + within_N
        in_pack = torch.argsort(token_N)
        return _places(self._computed_T[token_N[in_pack]], place_N[in_pack], int(padded_S.sum()), self._device)


def _places(computed_T: torch.Tensor, place_T: torch.Tensor, num_places: int, device: torch.device) -> Places:
    """The places of tokens in the order of the pack."""
    take_P = torch.zeros(num_places, dtype=torch.int64)
    take_P[place_T] = computed_T
    first_copy_U = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(computed_T).cumsum(0)])
    copies_P = place_T[torch.argsort(computed_T, stable=True)]
    place_U = copies_P[first_copy_U[:-1]]
    is_unread_P = torch.ones(num_places, dtype=torch.bool)
    is_unread_P[place_U] = False
    on_device = {
        "take_P": take_P,
        "place_U": place_U,
        "unread_E": is_unread_P.nonzero()[:, 0],
        "copies_P": copies_P,
        "first_copy_U": first_copy_U,
    }
    return Places(
        **{name: tensor.to(device, non_blocking=True) for name, tensor in on_device.items()},
        is_identity=num_places == len(place_U) and bool((take_P == torch.arange(num_places)).all()),
    )


_LAYOUT: ContextVar[Layout | None] = ContextVar("layout", default=None)


def current_layout() -> Layout | None:
    """The one that `in_layout` has set."""
    return _LAYOUT.get()


@contextmanager
def in_layout(layout: Layout | None) -> Iterator[None]:
    """Inside, tokens of a forward pass stand as `layout` says. Not an argument: some models do not hand it down."""
    token = _LAYOUT.set(layout)
    try:
        yield
    finally:
        _LAYOUT.reset(token)


def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's `forward`, computed again in the backward pass, in the layout that it had."""

    @functools.wraps(forward)
    def call(*arguments: Any, **named: Any) -> Any:
        layout = _LAYOUT.get()

        def again(*arguments: Any, **named: Any) -> Any:
            with in_layout(layout):
                return forward(*arguments, **named)

        return checkpoint(again, *arguments, use_reentrant=False, preserve_rng_state=False, **named)

    return call


@torch.compiler.disable
def run_side_by_side(forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a layer that keeps a state from token to token on sequences side by side: no state crosses from one to the
    next, and padding stands behind the end, where it reaches nothing. Every tensor of shape [1, U, …] is moved."""
    layout = _LAYOUT.get()
    if layout is None:
        return forward(*arguments, **named)
    states = next(value for value in (*arguments, *named.values()) if isinstance(value, torch.Tensor))
    places, num_tokens = layout.side_by_side, states.shape[1]

    def placed(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(placed(each) for each in value)
        is_by_token = isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[:2] == (1, num_tokens)
        return to_places(value.squeeze(0), places) if is_by_token else value

    def part(value: Any, start: int, batch: Batch) -> Any:
        if isinstance(value, tuple):
            return tuple(part(each, start, batch) for each in value)
        if not isinstance(value, torch.Tensor) or len(value) != len(places.take_P):
            return value
        rows = value[start : start + batch.num_sequences * batch.length]
        return rows.unflatten(0, (batch.num_sequences, batch.length))

    inputs, keywords = placed(arguments), {name: placed(value) for name, value in named.items()}
    outputs, start, rest = [], 0, None
    for batch in layout.batches:
        at = (start, batch)
        result = forward(*part(inputs, *at), **{name: part(value, *at) for name, value in keywords.items()})
        output, *rest = result if isinstance(result, tuple) else (result,)
        outputs.append(output.flatten(0, 1))
        start += batch.num_sequences * batch.length
    joined = from_places(torch.cat(outputs), places)[None]
    return (joined, *(rest or ())) if isinstance(result, tuple) else joined


def to_places(values_U: torch.Tensor, places: Places) -> torch.Tensor:
    """Copy what each computed token has, [U, …], to its places, [P, …]."""
    return values_U if places.is_identity else _ToPlaces.apply(values_U, places)


def from_places(values_P: torch.Tensor, places: Places) -> torch.Tensor:
    """Read what each computed token has got, [U, …]: all of its places have the same."""
    return values_P if places.is_identity else _FromPlaces.apply(values_P, places)


class _ToPlaces(torch.autograd.Function):
    """Copy every token to its places. The gradient is the sum over them, in an order that is always the same."""

    @staticmethod
    def forward(ctx: Any, values_U: torch.Tensor, places: Places) -> torch.Tensor:
        ctx.places = places
        return values_U.index_select(0, places.take_P)

    @staticmethod
    def backward(ctx: Any, gradient_P: torch.Tensor) -> tuple[torch.Tensor, None]:
        places = ctx.places
        if len(places.copies_P) == len(places.place_U):  # a token has one place: nothing to add
            return gradient_P.index_select(0, places.place_U), None
        summed = embedding_bag(
            places.copies_P, gradient_P.flatten(1), places.first_copy_U, mode="sum", include_last_offset=True
        )
        return summed.unflatten(1, gradient_P.shape[1:]), None


class _FromPlaces(torch.autograd.Function):
    """Read every token's result at its first place."""

    @staticmethod
    def forward(ctx: Any, values_P: torch.Tensor, places: Places) -> torch.Tensor:
        ctx.places = places
        return values_P.index_select(0, places.place_U)

    @staticmethod
    def backward(ctx: Any, gradient_U: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient_U.index_select(0, ctx.places.take_P).index_fill_(0, ctx.places.unread_E, 0), None
