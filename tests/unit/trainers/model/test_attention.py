"""Packed attention: every sequence attends to itself alone, at a cost that is linear in their number."""

import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import varlen
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
)

from trainers.data.packing import shared_tokens
from trainers.data.samples import ARITHMETIC
from trainers.model import attention
from trainers.model import layout as layout_module
from trainers.model.attention import packed_attention, packed_mask
from trainers.model.layout import Layout, in_layout

_CPU = torch.device("cpu")


def _query_key_value(lengths: list[int], *, heads: int, groups: int, width: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(len(lengths))
    shapes = [(1, heads, sum(lengths), width), *[(1, groups, sum(lengths), width)] * 2]
    return [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]


def _attend(
    lengths: list[int],
    tensors: list[torch.Tensor],
    *,
    scale: float = 0.3,
    window: int | None = None,
    device: torch.device = _CPU,
    computed_T: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    rule = sliding_window_causal_mask_function(window) if window else causal_mask_function
    # As transformers joins it with a rule that keeps sequences apart by their positions.
    rule = and_masks(rule, packed_sequence_mask_function(torch.zeros(1, sum(lengths))))
    sight = packed_mask(mask_function=rule, local_size=window)
    with in_layout(Layout(lengths, device=device, computed_T=computed_T)):
        return packed_attention(torch.nn.Module(), *tensors, sight, scaling=scale, **options)[0]


def _by_definition(
    lengths: list[int],
    tensors: list[torch.Tensor],
    *,
    scale: float = 0.3,
    window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax over the keys k ≤ q of the same sequence (and k > q − window) and the sink, one sequence at a time."""
    query, key, value = (tensor[0] for tensor in tensors)
    key, value = (tensor.repeat_interleave(len(query) // len(key), 0) for tensor in (key, value))
    outputs, start = [], 0
    for length in lengths:
        here = slice(start, start + length)
        scores = scale * query[:, here] @ key[:, here].transpose(1, 2)
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | (distance >= (window or length))
        weights = scores.masked_fill(hidden, -torch.inf).exp()
        sink = 0 if s_aux is None else s_aux.exp()[:, None, None]
        outputs.append(weights / (weights.sum(-1, keepdim=True) + sink) @ value[:, here])
        start += length
    return torch.cat(outputs, 1).transpose(0, 1)[None]


@given(
    st.lists(st.integers(1, 24), min_size=1, max_size=8),
    st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    st.sampled_from([3, 8]),
    st.sampled_from([None, 1, 5]),
    st.sampled_from([None, 0.5]),
    st.booleans(),
    st.sampled_from([attention._SCORES, 200]),
)
@settings(max_examples=60)
def test_output_and_gradients_are_those_of_the_definition(
    lengths: list[int],
    heads: tuple[int, int],
    width: int,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    scores: int,
) -> None:
    tensors = _query_key_value(lengths, heads=heads[0], groups=heads[1], width=width)
    sinks = torch.linspace(-1, 1, heads[0], dtype=torch.float64).requires_grad_() if has_sinks else None
    options: dict[str, Any] = {"window": window, "softcap": softcap, "s_aux": sinks}
    with mock.patch.object(attention, "_SCORES", scores):  # some queries at a time, or all
        found, expected = _attend(lengths, tensors, **options), _by_definition(lengths, tensors, **options)
        tensors = [*tensors, *([] if sinks is None else [sinks])]
        _assert_same(found, expected, tensors)


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=2, max_size=8).map(sorted),
    st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    st.sampled_from([None, 1, 5]),
    st.sampled_from([None, 0.5]),
    st.booleans(),
    st.sampled_from([attention._SCORES, 200]),
)
@settings(max_examples=100)
def test_sequences_that_share_beginnings_have_the_output_and_gradients_of_the_definition(
    sequences: list[list[int]],
    heads: tuple[int, int],
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    scores: int,
) -> None:
    lengths = [len(sequence) for sequence in sequences]
    computed_T = shared_tokens(np.concatenate(sequences), lengths)
    places_T = torch.arange(sum(lengths)) if computed_T is None else computed_T
    tensors = _query_key_value([int(places_T.max()) + 1], heads=heads[0], groups=heads[1], width=3)
    sinks = torch.linspace(-1, 1, heads[0], dtype=torch.float64).requires_grad_() if has_sinks else None
    options: dict[str, Any] = {"window": window, "softcap": softcap, "s_aux": sinks}
    alone = _by_definition(lengths, [tensor[:, :, places_T] for tensor in tensors], **options)
    first_U = torch.from_numpy(np.unique(places_T, return_index=True)[1])
    with mock.patch.object(attention, "_SCORES", scores):
        found = _attend(lengths, tensors, computed_T=computed_T, **options)
        _assert_same(found, alone[:, first_U], [*tensors, *([] if sinks is None else [sinks])])


def test_a_prompt_asks_once_and_attempts_only_for_themselves() -> None:
    """Eight attempts of 10 tokens at a prompt of 90, and one of 200 that would gain nothing by it."""
    computed_T = torch.cat(
        [torch.arange(90), *(torch.tensor([*range(90), *range(n, n + 10)]) for n in range(90, 170, 10))]
    )
    computed_T = torch.cat([computed_T, torch.tensor([*range(90), *range(170, 280)])])
    layout = Layout([90, *[100] * 8, 200], device=_CPU, computed_T=computed_T)
    asked = [(batch.num_sequences, batch.length, batch.num_asking) for batch in layout.attending.batches]
    assert asked == [(1, 200, 200), (1, 90, 90), (8, 100, 10)]
    assert len(layout.attending.queries.take_P) == 370 and len(layout.attending.keys.take_P) == 1090
    older = Layout([90, *[100] * 8, 200], device=_CPU, computed_T=computed_T, arithmetic=2)
    assert older.attending.queries is older.attending.keys is older.side_by_side


def _assert_same(found: torch.Tensor, expected: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Values and gradients."""
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    upstream = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).reshape(found.shape)
    gradients = [torch.autograd.grad((output * upstream).sum(), tensors) for output in (found, expected)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize("heads", [(4, 4), (9, 3)])
@pytest.mark.parametrize("num_shared", [0, 30])
def test_short_sequences_in_bfloat16_have_a_more_exact_gradient(
    heads: tuple[int, int], width: int, num_shared: int
) -> None:
    """And the same output, if none of them share a beginning."""
    lengths, new = [40, 38, 35, 5, 1], torch.arange(40)
    computed_T = torch.cat(
        [new, *(torch.cat([new[:num_shared][:n], new[num_shared:n] + 40 * k]) for k, n in enumerate(lengths) if k)]
    )
    computed_T = torch.unique(computed_T, return_inverse=True)[1] if num_shared else torch.arange(sum(lengths))
    num_computed = int(computed_T.max()) + 1
    exact = [tensor.detach().bfloat16().double().requires_grad_() for tensor in
             _query_key_value([num_computed], heads=heads[0], groups=heads[1], width=width)]  # fmt: skip
    first_U = torch.from_numpy(np.unique(computed_T, return_index=True)[1])
    alone = _by_definition(lengths, [tensor[:, :, computed_T] for tensor in exact])[:, first_U]
    expected = torch.autograd.grad(alone.sin().sum(), exact)
    outputs, errors = [], []
    for arithmetic in (1, ARITHMETIC):
        halves = [tensor.detach().bfloat16().requires_grad_() for tensor in exact]
        layout = Layout(lengths, device=_CPU, computed_T=computed_T if num_shared else None, arithmetic=arithmetic)
        with in_layout(layout):
            outputs.append(packed_attention(torch.nn.Module(), *halves, None, scaling=0.3)[0])
        found = torch.autograd.grad(outputs[-1].double().sin().sum(), halves)
        errors.append([float((a - e).norm() / e.norm()) for a, e in zip(found, expected, strict=True)])
    assert num_shared or torch.equal(*outputs)
    assert max(errors[1]) < 4e-3 and all(new < old for old, new in zip(*errors, strict=True))


@pytest.mark.parametrize("window", [None, 3])
def test_the_kernel_of_gpus_is_asked_for_what_the_definition_says(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    """A stand-in takes what torch documents: sequences end to end, where they start, and who is seen."""

    def attend(
        query_THd: torch.Tensor,
        key_TGd: torch.Tensor,
        value_TGd: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None,
        window_size: tuple[int, int],
        enable_gqa: bool,
    ) -> torch.Tensor:
        assert enable_gqa and cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and torch.equal(cu_seq_q, cu_seq_k)
        lengths = cu_seq_q.diff().tolist()
        assert max_q == max_k == max(lengths) and scale is not None
        left, right = window_size
        assert right == 0
        tensors = [tensor.transpose(0, 1)[None] for tensor in (query_THd, key_TGd, value_TGd)]
        return _by_definition(lengths, tensors, scale=scale, window=None if left == -1 else left + 1)[0]

    monkeypatch.setattr(varlen, "varlen_attn", attend)
    monkeypatch.setattr(attention, "_has_flash_kernel", lambda query: True)
    lengths = [5, 1, 7]
    tensors = _query_key_value(lengths, heads=4, groups=2, width=8)
    found, expected = _attend(lengths, tensors, window=window), _by_definition(lengths, tensors, window=window)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("lengths", [[100, 1, 300, 77], [1500, 1030, 2048, 1]], ids=["short", "long"])
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("window", [None, 50])
def test_kernels_of_a_gpu_compute_the_definition(
    lengths: list[int], groups: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_module, "_LONG", 1024)
    tensors = _query_key_value(lengths, heads=4, groups=groups, width=64)
    on_gpu = [tensor.detach().to("cuda", torch.bfloat16).requires_grad_() for tensor in tensors]
    rounded = [tensor.detach().double().cpu().requires_grad_() for tensor in on_gpu]
    device = torch.device("cuda")
    assert Layout(lengths, device=device).is_one_by_one == (max(lengths) > 1024)
    found = _attend(lengths, on_gpu, window=window, device=device)
    expected = _by_definition(lengths, rounded, window=window)
    upstream = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mine = [found, *torch.autograd.grad((found * upstream.to(found)).sum(), on_gpu)]
    theirs = [expected, *torch.autograd.grad((expected * upstream).sum(), rounded)]
    for one, other in zip(mine, theirs, strict=True):
        assert (one.double().cpu() - other).norm() < 2e-2 * other.norm()


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60))
def test_padding_is_at_most_a_third_of_the_tokens(lengths: list[int]) -> None:
    layout = Layout(lengths, device=_CPU)
    assert sum(batch.num_sequences * batch.length for batch in layout.batches) <= sum(lengths) * 4 / 3
    assert sum(batch.num_sequences for batch in layout.batches) == len(lengths)
    assert layout.longest == max(lengths)
    # Their number grows with the spread of lengths, 4 / 3 from one batch to the next, and not with that of sequences.
    assert len(layout.batches) <= 1 + math.log(max(lengths) / min(lengths), 4 / 3)
    assert layout.end_to_end.is_identity and (layout.side_by_side.is_identity or len(set(lengths)) > 1)


def test_attention_of_another_formula_is_refused() -> None:
    tensors = _query_key_value([3], heads=2, groups=2, width=4)
    with pytest.raises(ValueError, match="Module needs position_bias"):
        _attend([3], tensors, position_bias=torch.zeros(1))
    with pytest.raises(ValueError, match="needs dropout"):
        _attend([3], tensors, dropout=0.1)
    with pytest.raises(ValueError, match="needs the pack's layout"):
        packed_attention(torch.nn.Module(), *tensors, None)
    for lengths in ([], [3, 0], [2, -1]):
        with pytest.raises(ValueError, match="a pack has a sequence, and a sequence a token"):
            Layout(lengths, device=_CPU)
