"""Attention within each of several sequences that stand end to end, without a mask over all of their tokens.

In: queries, keys and values of a pack, and its `Layout`, made once per pack from the offsets of its sequences.
Out: every token's attention over its own sequence up to itself. Cost grows with Σ length², not with (Σ length)².

    CUDA, half precision   one variable-length flash attention kernel (torch.nn.attention.varlen)
    anything else          sequences of similar length side by side, padded to the longest: one exact SDPA per length

transformers calls `packed_attention` by the name `PACKED_ATTENTION`; the layout comes to it as a keyword argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

PACKED_ATTENTION = "millrace_packed"

_SHORTEST_TO_LONGEST = 0.75
"""Sequences of at least this share of the longest stand in one batch with it: padding wastes at most a quarter."""
_NOT_HONOURED = ("softcap", "s_aux", "position_bias")
"""Arguments by which some models change the attention's formula."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences that are padded to one length."""

    num_sequences: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a pack's tokens stand when its sequences are batched by length. All of it is made on the host."""

    offsets_S: torch.Tensor
    """Where each sequence starts and the last one ends, int32 on the device: flash attention's cu_seqlens."""
    longest: int
    batches: tuple[Batch, ...]
    take_P: torch.Tensor
    """The token at each place of the padded batches, one after the other; 0 where there is none."""
    is_empty_P: torch.Tensor
    """True at places without a token."""
    place_T: torch.Tensor
    """The place of each token."""
    is_dense: bool
    """No place is empty and the order is the pack's: tokens stay where they are."""


def layout_of(offsets_S: torch.Tensor, *, device: torch.device) -> Layout:
    """The layout of a pack. Offsets on the host cost no wait for the GPU.

    Raises `ValueError` for offsets that do not start at 0 or hold an empty sequence.
    """
    offsets = offsets_S.detach().cpu().to(torch.int64)
    lengths = offsets.diff()
    if offsets.numel() < 2 or int(offsets[0]) != 0 or int(lengths.min()) < 1:
        raise ValueError(f"offsets {offsets.tolist()}: they start at 0 and grow with every sequence")
    order = torch.argsort(lengths, descending=True, stable=True)
    sizes = lengths[order].tolist()
    batches: list[Batch] = []
    start = 0
    while start < len(sizes):
        shortest = sizes[start] * _SHORTEST_TO_LONGEST
        end = start + 1
        while end < len(sizes) and sizes[end] >= shortest:
            end += 1
        batches.append(Batch(num_sequences=end - start, length=sizes[start]))
        start = end
    padded = torch.tensor([batch.length for batch in batches for _ in range(batch.num_sequences)])
    first_place = padded.cumsum(0) - padded
    # Of every token, in the order of the batches: where it is in the pack, and where it goes.
    lengths_in_order = lengths[order]
    within = torch.arange(int(offsets[-1])) - torch.repeat_interleave(
        lengths_in_order.cumsum(0) - lengths_in_order, lengths_in_order
    )
    token = torch.repeat_interleave(offsets[:-1][order], lengths_in_order) + within
    place = torch.repeat_interleave(first_place, lengths_in_order) + within
    take_P = torch.zeros(int(padded.sum()), dtype=torch.int64)
    take_P[place] = token
    is_empty_P = torch.ones(len(take_P), dtype=torch.bool)
    is_empty_P[place] = False
    place_T = torch.empty(len(token), dtype=torch.int64)
    place_T[token] = place
    return Layout(
        offsets_S=offsets_S.to(device=device, dtype=torch.int32, non_blocking=True),
        longest=sizes[0],
        batches=tuple(batches),
        take_P=take_P.to(device, non_blocking=True),
        is_empty_P=is_empty_P.to(device, non_blocking=True),
        place_T=place_T.to(device, non_blocking=True),
        is_dense=len(take_P) == len(token) and bool((token == place).all()),
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

    `query` has shape [1, heads, T, width], `key` and `value` may have fewer heads (grouped queries); the result is
    [1, T, heads, width]. Under a `sliding_window` of W a token sees itself and the W − 1 before it.

    Raises `ValueError` where the model asks for an attention that this is not.
    """
    if layout is None:
        raise ValueError("packed attention needs the pack's layout; call the model through PolicyModel")
    changed = [name for name in _NOT_HONOURED if others.get(name) is not None]
    if changed or dropout or attention_mask is not None or not getattr(module, "is_causal", True):
        what = ", ".join(changed) or ("dropout" if dropout else "a mask, or attention that is not causal")
        raise ValueError(f"{type(module).__name__} needs {what}, which packed attention does not have")
    window = sliding_window if sliding_window is not None and sliding_window < layout.longest else None
    query_THd, key_TGd, value_TGd = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if _has_flash_kernel(query_THd):
        from torch.nn.attention.varlen import varlen_attn

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
        return output_THd[None], None
    return _batched_attention(query_THd, key_TGd, value_TGd, layout, scale=scaling, window=window)[None], None


def _has_flash_kernel(query_THd: torch.Tensor) -> bool:
    width = query_THd.shape[-1]
    return (
        query_THd.is_cuda
        and query_THd.dtype in (torch.bfloat16, torch.float16)
        and width % 8 == 0
        and width <= 256
        and torch.cuda.get_device_capability(query_THd.device) >= (8, 0)
    )


def _batched_attention(
    query_THd: torch.Tensor,
    key_TGd: torch.Tensor,
    value_TGd: torch.Tensor,
    layout: Layout,
    *,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """One SDPA per batch of the layout. Padding stands behind a sequence, so causality alone hides it."""
    sizes = [batch.num_sequences * batch.length for batch in layout.batches]
    padded = [_to_places(tensor, layout).split(sizes) for tensor in (query_THd, key_TGd, value_TGd)]
    outputs = []
    for batch, *parts in zip(layout.batches, *padded, strict=True):
        query, key, value = (part.unflatten(0, (batch.num_sequences, batch.length)).transpose(1, 2) for part in parts)
        is_windowed = window is not None and window < batch.length
        output = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=_window_mask(batch.length, window, query.device) if is_windowed else None,
            is_causal=not is_windowed,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return _from_places(outputs[0] if len(outputs) == 1 else torch.cat(outputs), layout)


def _window_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    assert window is not None
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril() & ones.triu(1 - window)


def _to_places(values_T: torch.Tensor, layout: Layout) -> torch.Tensor:
    return values_T if layout.is_dense else _Move.apply(values_T, layout, True)


def _from_places(values_P: torch.Tensor, layout: Layout) -> torch.Tensor:
    return values_P if layout.is_dense else _Move.apply(values_P, layout, False)


class _Move(torch.autograd.Function):
    """Tokens to the padded batches, or back. Each has one place, so the gradient is the other move: no additions."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, layout: Layout, is_to_places: bool) -> torch.Tensor:
        ctx.arguments = layout, is_to_places
        return _moved(values, layout, is_to_places)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        layout, is_to_places = ctx.arguments
        return _moved(gradient, layout, not is_to_places), None, None


def _moved(values: torch.Tensor, layout: Layout, is_to_places: bool) -> torch.Tensor:
    if not is_to_places:
        return values.index_select(0, layout.place_T)
    return values.index_select(0, layout.take_P).masked_fill_(layout.is_empty_P[:, None, None], 0)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
