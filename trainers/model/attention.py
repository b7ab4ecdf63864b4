"""Attention within each of several sequences that stand end to end, without a mask over all of their tokens.

In: queries, keys and values of a pack. Out: every token's attention over what it may see of its own sequence. Cost
grows with Σ length², not with (Σ length)².

    CUDA, half precision   one variable-length flash attention kernel (torch.nn.attention.varlen)
    … of long sequences    cuDNN's kernel, one sequence after the other, lengths rounded up: 1.7 times as fast at 16k
    anything else          sequences of similar length side by side, padded to the longest: one exact SDPA per length
    capped scores, sinks   the same, with the formula written out, some queries at a time
    … short, on a CPU      in half precision: SDPA forward, and backward in float32, a third of the time

In a team (`teams.py`) each rank does so for some of the heads, between two all-to-alls.

transformers calls `packed_attention` by the name `PACKED_ATTENTION`, and `packed_mask` for what a token may see. Where
the sequences stand says the layout that `layout.in_layout` has set.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from settings.errors import InvalidInput
from trainers.model.layout import Batch, Layout, current_layout, from_places, to_places
from trainers.model.teams import own_heads, to_heads, to_tokens

PACKED_ATTENTION = "millrace_packed"

_HALF = (torch.bfloat16, torch.float16)
_SHORT = 256
"""Below this length torch's flash attention for CPUs in bfloat16 goes backward slower than in float32: 105 ms of
processor time and 26 at [32, 9 heads, 90, 64], 109 and 15 at a length of 40, conversions apart. At a length of 256 and
more it is the faster one with them. Forward it is the fastest there is."""
_flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
_SCORES = 2**26
"""Scores that are held at a time if the formula is written out."""
_NOT_HONOURED = ("position_bias",)
"""Arguments by which some models change the attention's formula."""


class Sight:
    """What a token may see of its own sequence, where that is less than all tokens up to itself."""

    def __init__(self, rules: Sequence[Callable[..., torch.Tensor]], window: int | None) -> None:
        self._rules = rules
        self.window = window  # the only rule: itself and the window − 1 tokens before it
        self.mask = functools.cache(self._mask)

    def _mask(self, length: int, device: torch.device) -> torch.Tensor | None:
        """Booleans, [length, length]; None if a token sees all before it."""
        mask = self.of(torch.arange(length, device=device), length)
        return None if int(mask.sum()) == length * (length + 1) // 2 else mask

    def of(self, asked: torch.Tensor, length: int) -> torch.Tensor:
        """What the tokens at these places see of a sequence, booleans of shape [*asked.shape, length]."""
        places = torch.arange(length, device=asked.device)
        mask = places <= asked[..., None]
        for rule in self._rules:
            mask = mask & rule(0, 0, asked[..., None], places)
        return mask


_ALL_BEFORE = Sight([], None)


def packed_mask(*_: Any, mask_function: Callable[..., Any], local_size: int | None = None, **__: Any) -> Sight | None:
    """What transformers hands to `packed_attention` as its mask: rules about two places in one sequence. Of what stands
    in other sequences the layout takes care."""
    rules = _parts(mask_function)
    others = [rule for rule in rules if rule.__qualname__ != "causal_mask_function"]
    if not others and rules:
        return None
    is_window = [rule.__qualname__.split(".")[0] for rule in others] == ["sliding_window_overlay"]
    return Sight(rules, local_size if is_window else None)


def _parts(rule: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The rules of which transformers' `and_masks` has made one."""
    if not rule.__qualname__.startswith("and_masks."):
        return [rule]
    joined = next(cell.cell_contents for cell in rule.__closure__ or () if isinstance(cell.cell_contents, tuple))
    return [part for each in joined for part in _parts(each)]


@torch.compiler.disable  # one break in a compiled layer, rather than one compilation per layout
def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Sight | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence of a pack, as transformers calls it.

    `query` has shape [1, heads, U, width], `key` and `value` may have fewer heads (grouped queries) and values another
    width; the result is [1, U, heads, width], for U computed tokens. `softcap` bounds the scores (Gemma 2,
    https://arxiv.org/abs/2408.00118), `s_aux` are each head's sinks (gpt-oss, https://arxiv.org/abs/2508.10925).

    Raises `ValueError` for a model that needs another attention.
    """
    layout = current_layout()
    if layout is None:
        raise InvalidInput("packed attention needs the pack's layout; call the model through PolicyModel")
    sight = attention_mask if isinstance(attention_mask, Sight) else None
    changed = [name for name in _NOT_HONOURED if others.get(name) is not None]
    if changed or dropout or sight is not attention_mask or not getattr(module, "is_causal", True):
        what = ", ".join(changed) or ("dropout" if dropout else "a mask, or attention that is not causal")
        raise InvalidInput(f"{type(module).__name__} needs {what}, which packed attention does not have")
    if sight is not None and sight.window is not None and sight.window >= layout.longest:
        sight = None
    # Views both ways: the gradient of an index, as in tensor[0], is a copy.
    by_token = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)]
    options = {"scaling": scaling, "softcap": softcap}
    if (team := layout.team) is None:
        return _within_sequences(by_token, layout, sight, sinks_H=s_aux, **options)[None], None
    by_token = to_heads(*by_token, team=team, num_tokens=layout.num_computed)
    sinks_H = None if s_aux is None else own_heads(s_aux, team)
    return to_tokens(_within_sequences(by_token, layout, sight, sinks_H=sinks_H, **options), team)[None], None


def _within_sequences(
    by_token: Sequence[torch.Tensor],
    layout: Layout,
    sight: Sight | None,
    *,
    scaling: float | None,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of queries, keys and values of all computed tokens, each [U, heads, width]."""
    is_plain = softcap is None and sinks_H is None
    has_flash = is_plain and (sight is None or sight.window is not None) and _has_flash_kernel(by_token[0])
    one_by_one = layout.is_one_by_one and sight is None
    if has_flash and not (one_by_one and torch.cuda.get_device_capability(by_token[0].device) >= (9, 0)):  # Hopper
        from torch.nn.attention.varlen import varlen_attn

        query_THd, key_TGd, value_TGd = (to_places(tensor, layout.end_to_end) for tensor in by_token)
        output_THd = varlen_attn(
            query_THd,
            key_TGd,
            value_TGd,
            layout.offsets_S,
            layout.offsets_S,
            layout.longest,
            layout.longest,
            scale=scaling,
            window_size=(-1 if sight is None or sight.window is None else sight.window - 1, 0),
            enable_gqa=query_THd.shape[1] != key_TGd.shape[1],
        )
        return from_places(output_THd, layout.end_to_end)
    attending = layout.attending
    places = (attending.queries, attending.keys, attending.keys)
    placed = [to_places(tensor, where) for tensor, where in zip(by_token, places, strict=True)]
    formula = (
        functools.partial(_attention, scale=scaling, short=_SHORT if layout.arithmetic >= 2 else 0)
        if is_plain
        else functools.partial(_written_out, scale=scaling, softcap=softcap, sinks_H=sinks_H)
    )
    with sdpa_kernel(_FASTEST_FIRST, set_priority=True) if has_flash else nullcontext():
        outputs = _batched(formula, placed, sight, attending.batches)
    return from_places(outputs, attending.queries)


def _has_flash_kernel(query_THd: torch.Tensor) -> bool:
    width = query_THd.shape[-1]
    return (
        query_THd.is_cuda
        and query_THd.dtype in _HALF
        and width % 8 == 0
        and width <= 256
        and torch.cuda.get_device_capability(query_THd.device) >= (8, 0)
    )


def _batched(
    formula: Callable[..., torch.Tensor], parts: Sequence[torch.Tensor], sight: Sight | None, batches: Sequence[Batch]
) -> torch.Tensor:
    """Call the formula once per batch, on [sequences, heads, length, width]."""
    asking = [batch.num_sequences * batch.num_asking for batch in batches]
    asked = [batch.num_sequences * batch.length for batch in batches]
    sizes = (asking, asked, asked)
    outputs = []
    for batch, *its in zip(batches, *(part.split(size) for part, size in zip(parts, sizes, strict=True)), strict=True):
        side_by_side = (part.unflatten(0, (batch.num_sequences, -1)).transpose(1, 2) for part in its)
        mask = _mask(sight, batch, parts[0].device)
        outputs.append(formula(*side_by_side, mask=mask).transpose(1, 2).flatten(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _mask(sight: Sight | None, batch: Batch, device: torch.device) -> torch.Tensor | None:
    """Booleans that spread to [sequences, heads, asking, length]; None if a token sees all before it and all ask."""
    if batch.asked_SQ is not None:
        return (sight or _ALL_BEFORE).of(batch.asked_SQ, batch.length)[:, None]
    return None if sight is None else sight.mask(batch.length, device)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float | None,
    mask: torch.Tensor | None,
    short: int,
) -> torch.Tensor:
    """SDPA. Padding stands behind a sequence, so causality alone hides it. Sequences below `short` tokens have the
    other backward pass if they are in half precision on a CPU."""
    num_sharing, length = query.shape[1] // key.shape[1], key.shape[2]
    is_half = not query.is_cuda and query.dtype in _HALF and query.shape[-1] == value.shape[-1]
    if is_half and length < short and (mask is None or mask.dim() > 2):
        return _ShortAttention.apply(query, key, value, mask, scale)
    if query.is_cuda and num_sharing > 1 and query.dtype not in _HALF:
        # Of the kernels for the others only the one that makes the square lets query heads share keys.
        key, value = (part.repeat_interleave(num_sharing, dim=1) for part in (key, value))
    options = {"scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, **options)


class _ShortAttention(torch.autograd.Function):
    """torch's flash attention for CPUs in half precision, and its backward pass in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
    ) -> torch.Tensor:
        ctx.options = {"scale": scale}
        if mask is not None:
            ctx.options["attn_mask"] = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, -torch.inf)
        options = {name: value.to(query.dtype) if name == "attn_mask" else value for name, value in ctx.options.items()}
        output, log_sum = _flash_on_cpu(query, key, value, 0.0, mask is None, **options)
        ctx.save_for_backward(query, key, value, output, log_sum)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *halves, log_sum = ctx.saved_tensors
        inputs = (tensor.float() for tensor in (gradient, *halves))
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *inputs, log_sum, 0.0, "attn_mask" not in ctx.options, **ctx.options
        )
        return *(each.to(gradient.dtype) for each in gradients), None, None


def _written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float | None,
    mask: torch.Tensor | None,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """softmax(cap · tanh(scores / cap), sink) · values, the sink's share left out; in blocks of queries, which a
    backward pass computes again, if there are many."""
    (num_sequences, heads, num_asking, width), length = query.shape, key.shape[2]
    scale = width**-0.5 if scale is None else scale
    key, value = (part.repeat_interleave(heads // part.shape[1], dim=1) for part in (key, value))
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()

    def block(query: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = (query @ key.transpose(2, 3) * scale).to(torch.promote_types(query.dtype, torch.float32))
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~mask, -torch.inf)
        if sinks_H is not None:
            sinks = sinks_H.to(scores.dtype)[:, None, None].expand(num_sequences, -1, scores.shape[2], 1)
            scores = torch.cat([scores, sinks], -1)
        return scores.softmax(-1)[..., :length].to(value.dtype) @ value

    size = max(1, _SCORES // (num_sequences * heads * length))
    if size >= num_asking:
        return block(query, mask)
    blocks = zip(query.split(size, 2), mask.split(size, -2), strict=True)
    return torch.cat([checkpoint(block, *each, use_reentrant=False, preserve_rng_state=False) for each in blocks], 2)


_find_packed_sequences = masking_utils.find_packed_sequence_indices


def _packed_sequences(position_ids: torch.Tensor) -> torch.Tensor | None:
    """transformers looks for them in the positions of every forward pass, and waits for a GPU to do so. A layout has
    them."""
    return _find_packed_sequences(position_ids) if current_layout() is None else None


masking_utils.find_packed_sequence_indices = _packed_sequences
AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, packed_mask)
