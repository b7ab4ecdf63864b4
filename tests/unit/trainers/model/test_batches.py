"""What each rank is given of a mini-batch: whole groups, every row once, and as many passes as the others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from tests.unit.trainers.builders import row_of, samples_of, tiny_model
from trainers.data.operations import Operations
from trainers.data.samples import ARITHMETIC
from trainers.model.batches import Spread, packs_of

_ROWS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=24)
"""The group of each row, and the length of its reply."""


@given(_ROWS, st.integers(1, 5), st.integers(12, 40), st.sampled_from([math.inf, 5.0]))
@example(rows=[(1, 7), (0, 1), (1, 7)], num_ranks=1, budget=12, attention=math.inf)  # a row between two that share
def test_groups_are_whole_on_one_rank_wherever_their_rows_stand(
    rows: list[tuple[int, int]], num_ranks: int, budget: int, attention: float
) -> None:
    samples = samples_of(
        [row_of([2] * length, group=group, attempt=number) for number, (group, length) in enumerate(rows)]
    )
    ranks_of: dict[int, set[int]] = {}
    seen: list[int] = []
    num_packs = set()
    for rank in range(num_ranks):
        packs = list(
            packs_of(
                samples,
                np.arange(len(rows)),
                mask_T=samples.mask_T,
                values={},
                budget=budget,
                spread=Spread(rank=rank, world_size=num_ranks, attention_length=attention),
                device=torch.device("cpu"),
            )
        )
        num_packs.add(len(packs))
        for pack in packs:
            assert pack.layout.num_computed <= budget
            if not pack.is_idle:
                found = np.unique(np.searchsorted(samples.offsets, pack.tokens, side="right") - 1).tolist()
                seen += found
                for row in found:
                    ranks_of.setdefault(rows[row][0], set()).add(rank)
    assert sorted(seen) == list(range(len(rows)))
    assert all(len(ranks) == 1 for ranks in ranks_of.values())
    assert len(num_packs) == 1


@pytest.mark.parametrize(("arithmetic", "num_rows"), [(2, [3, 3, 2]), (ARITHMETIC, [8])])
def test_what_attempts_share_counts_a_quarter_in_a_pack(arithmetic: int, num_rows: list[int]) -> None:
    """Of eight attempts of 10 tokens at a prompt of 90 one counts 99, the others 9 and 90 / 4: their last predict
    nothing."""
    samples = samples_of([row_of([2 + number] * 10, prompt=[3] * 90, attempt=number) for number in range(8)])
    packs = packs_of(
        dataclasses.replace(samples, arithmetic=arithmetic),
        np.arange(8),
        mask_T=samples.mask_T,
        values={},
        budget=99 + 7 * (9 + 23),
        spread=Spread(rank=0, world_size=1),
        device=torch.device("cpu"),
    )
    assert [len(pack.layout.lengths_S) for pack in packs] == num_rows


def _work(lengths: Sequence[int], attention: float) -> float:
    return sum(length + length**2 / attention for length in lengths)


def test_ranks_get_as_much_arithmetic_and_packs_of_about_as_much_meet() -> None:
    """Two long rows and 20 short ones make 100 tokens a rank in two ways, each with most work on one."""
    groups = enumerate([[60], [40], [5] * 12, [5] * 8])
    samples = samples_of([row_of([2] * length, group=group) for group, rows in groups for length in rows])
    busiest = {}
    for attention in (math.inf, 10.0):
        loads = []
        for rank in (0, 1):
            packs = packs_of(
                samples,
                np.arange(samples.num_rows),
                mask_T=samples.mask_T,
                values={},
                budget=64,
                spread=Spread(rank=rank, world_size=2, attention_length=attention),
                device=torch.device("cpu"),
            )
            lengths = [np.bincount(pack.sequences.numpy()).tolist() for pack in packs if not pack.is_idle]
            loads.append([_work(each, 10.0) for each in lengths])
        busiest[attention] = max(map(sum, loads))
        assert attention == math.inf or loads == [sorted(rank, reverse=True) for rank in loads]
    assert busiest[10.0] < 0.9 * busiest[math.inf]


@pytest.mark.parametrize("tied", [True, False])
def test_the_length_of_even_attention_is_what_torch_counts(tmp_path: Path, tied: bool) -> None:
    """transformers' own forward pass, whose attention computes the half that it masks: a L + b L², so a / b is half the
    length at which causal attention takes as much as the rest."""
    folder = tiny_model(tmp_path / "tiny", tied=tied)
    model = AutoModelForCausalLM.from_pretrained(str(folder), attn_implementation="eager")
    flops = []
    for length in (10, 20):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(input_ids=torch.ones(1, length, dtype=torch.long), use_cache=False)
        flops.append(counter.get_total_flops())
    b = (flops[1] / 20 - flops[0] / 10) / 10
    a = flops[0] / 10 - 10 * b
    operations = Operations.of(model)
    assert operations.attention_length == pytest.approx(2 * a / b, rel=1e-3)
    assert [operations.forward(computed=n, predicted=n, pairs=n * n) for n in (10, 20)] == pytest.approx(
        flops, rel=1e-3
    )
