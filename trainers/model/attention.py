"""Attention within each of several sequences that stand end to end, without a mask over all of their tokens.

In: queries, keys and values of a pack, and its `Layout`, made once per pack from the offsets of its sequences.
Out: every token's attention over its own sequence up to itself. Cost grows with Σ length², not with (Σ length)².

Tokens that stand after the same tokens have the same states: the model computes them once, as one row of its inputs,
and only here they are copied to each sequence they belong to (Prefix Grouper, https://arxiv.org/abs/2506.05433).

    CUDA, half precision   one variable-length flash attention kernel (torch.nn.attention.varlen)
    … of long sequences    cuDNN's kernel, one sequence after the other, lengths rounded up: 1.7 times as fast at 16k
    anything else          sequences of similar length side by side, padded to the longest: one exact SDPA per length
    … short, on a CPU      in half precision: SDPA forward, and backward in float32, a third of the time

transformers calls `packed_attention` by the name `PACKED_ATTENTION`; the layout comes to it as a keyword argument.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import embedding_bag, scaled_dot_product_attention
from transformers import AttentionInterface

from settings.errors import InvalidInput
from trainers.data.packing import position_ids
from trainers.data.samples import ARITHMETIC

PACKED_ATTENTION = "millrace_packed"

_SHORTEST_TO_LONGEST = 0.75
"""Sequences of at least this share of the longest stand in one batch with it: padding wastes at most a quarter."""
_LONG, _GRAIN = 8192, 512
"""From this mean length on, sequences on a GPU stand one by one, rounded up to multiples: cuDNN needs a tenth of a
second for each length it has not had. On an H200, a forward and a backward pass of sequences of 16k, 4k and 2k tokens
with it takes 0.60, 0.88 and 1.40 of flash attention's time."""
_HALF = (torch.bfloat16, torch.float16)
_SHORT = 256
"""Below this length torch's flash attention for CPUs in bfloat16 goes backward slower than in float32, conversions
included: 105 ms of processor time and 34 at [32, 9 heads, 90, 64], 109 and 23 at a length of 40, 64 and 43 at 192, but
123 and 160 at [8, 16, 256, 128]. Forward it is the fastest there is."""
_flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
_NOT_HONOURED = ("softcap", "s_aux", "position_bias")
"""Arguments by which some models change the attention's formula."""


class Batch(NamedTuple):
    """Sequences that are padded to one length."""

    num_sequences: int
    length: int


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
    ) -> None:
        """`lengths` are those of the sequences. With `computed_T` (`trainers.data.packing.shared_tokens`, on the host)
        what sequences begin with in common is computed once. Raises `ValueError` without a sequence, or for an empty
        one."""
        self._device = device
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
                self.batches.append(Batch(1, -(-length // _GRAIN) * _GRAIN))
            elif self.batches and length >= self.batches[-1].length * _SHORTEST_TO_LONGEST:
                self.batches[-1] = Batch(self.batches[-1].num_sequences + 1, self.batches[-1].length)
            else:
                self.batches.append(Batch(1, length))

    @functools.cached_property
    def end_to_end(self) -> Places:
        """Sequence after sequence."""
        return _places(self._computed_T, torch.arange(len(self._computed_T)), len(self._computed_T), self._device)

    @functools.cached_property
    def side_by_side(self) -> Places:
        """Batch after batch, each sequence padded behind its end."""
        lengths = self.lengths_S[self._order]
        padded = torch.tensor([batch.length for batch in self.batches for _ in range(batch.num_sequences)])
        within = position_ids(lengths)
        token = torch.repeat_interleave(self._starts_S[self._order], lengths) + within
        place_T = torch.empty_like(token)
        place_T[token] = torch.repeat_interleave(padded.cumsum(0) - padded, lengths) + within
        return _places(self._computed_T, place_T, int(padded.sum()), self._device)


def _places(computed_T: torch.Tensor, place_T: torch.Tensor, num_places: int, device: torch.device) -> Places:
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


@torch.compiler.disable  # one break in a compiled layer, rather than one compilation per layout
def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    layout: Layout | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence of a pack, as transformers calls it.

    `query` has shape [1, heads, U, width], `key` and `value` may have fewer heads (grouped queries); the result is
    [1, U, heads, width], for U computed tokens. Under a `sliding_window` of W a token sees itself and W − 1 before it.

    Raises `ValueError` for a model that needs another attention.
    """
    if layout is None:
        raise InvalidInput("packed attention needs the pack's layout; call the model through PolicyModel")
    changed = [name for name in _NOT_HONOURED if others.get(name) is not None]
    if changed or dropout or attention_mask is not None or not getattr(module, "is_causal", True):
        what = ", ".join(changed) or ("dropout" if dropout else "a mask, or attention that is not causal")
        raise InvalidInput(f"{type(module).__name__} needs {what}, which packed attention does not have")
    window = sliding_window if sliding_window is not None and sliding_window < layout.longest else None
    # Views both ways: the gradient of an index, as in tensor[0], is a copy.
    by_token = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)]
    has_flash = _has_flash_kernel(by_token[0])
    one_by_one = layout.is_one_by_one and window is None
    if has_flash and not (one_by_one and torch.cuda.get_device_capability(query.device) >= (9, 0)):  # Hopper
        from torch.nn.attention.varlen import varlen_attn

        query_THd, key_TGd, value_TGd = (_to_places(tensor, layout.end_to_end) for tensor in by_token)
        output_THd = varlen_attn(
            query_THd,
            key_TGd,
            value_TGd,
            layout.offsets_S,
            layout.offsets_S,
            layout.longest,
            layout.longest,
            scale=scaling,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=query_THd.shape[1] != key_TGd.shape[1],
        )
        return _from_places(output_THd, layout.end_to_end)[None], None
    query_PHd, key_PGd, value_PGd = (_to_places(tensor, layout.side_by_side) for tensor in by_token)
    with sdpa_kernel(_FASTEST_FIRST, set_priority=True) if has_flash else nullcontext():
        short = _SHORT if layout.arithmetic >= 2 else 0
        places = query_PHd, key_PGd, value_PGd
        outputs = _batched_attention(*places, layout.batches, scale=scaling, window=window, short=short)
    return _from_places(outputs, layout.side_by_side)[None], None


def _has_flash_kernel(query_THd: torch.Tensor) -> bool:
    width = query_THd.shape[-1]
    return (
        query_THd.is_cuda
        and query_THd.dtype in _HALF
        and width % 8 == 0
        and width <= 256
        and torch.cuda.get_device_capability(query_THd.device) >= (8, 0)
    )


def _batched_attention(
    query_PHd: torch.Tensor,
    key_PGd: torch.Tensor,
    value_PGd: torch.Tensor,
    batches: Sequence[Batch],
    *,
    scale: float | None,
    window: int | None,
    short: int,
) -> torch.Tensor:
    """One SDPA per batch. Padding stands behind a sequence, so causality alone hides it. Sequences below `short` tokens
    have the other backward pass if they are in half precision on a CPU."""
    is_half = not query_PHd.is_cuda and query_PHd.dtype in _HALF and query_PHd.shape[-1] == value_PGd.shape[-1]
    sizes = [batch.num_sequences * batch.length for batch in batches]
    outputs = []
    for batch, *parts in zip(
        batches, query_PHd.split(sizes), key_PGd.split(sizes), value_PGd.split(sizes), strict=True
    ):
        query, key, value = (part.unflatten(0, (batch.num_sequences, batch.length)).transpose(1, 2) for part in parts)
        if is_half and batch.length < short and (window is None or window >= batch.length):
            outputs.append(_ShortAttention.apply(query, key, value, scale).transpose(1, 2).flatten(0, 1))
            continue
        num_sharing = query.shape[1] // key.shape[1]
        if query.is_cuda and num_sharing > 1 and query.dtype not in _HALF:
            # Of the kernels for the others only the one that makes the square lets query heads share keys.
            key, value = (part.repeat_interleave(num_sharing, dim=1) for part in (key, value))
        mask = None
        if window is not None and window < batch.length:
            mask = torch.ones(batch.length, batch.length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
        options = {"scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
        output = scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, **options)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class _ShortAttention(torch.autograd.Function):
    """torch's flash attention for CPUs in half precision, and its backward pass in float32."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        output, log_sum = _flash_on_cpu(query, key, value, 0.0, True, scale=scale)
        ctx.save_for_backward(query, key, value, output, log_sum)
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *halves, log_sum = ctx.saved_tensors
        inputs = (tensor.float() for tensor in (gradient, *halves))
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *inputs, log_sum, 0.0, True, scale=ctx.scale
        )
        return *(each.to(gradient.dtype) for each in gradients), None


def _to_places(values_U: torch.Tensor, places: Places) -> torch.Tensor:
    return values_U if places.is_identity else _ToPlaces.apply(values_U, places)


def _from_places(values_P: torch.Tensor, places: Places) -> torch.Tensor:
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


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
