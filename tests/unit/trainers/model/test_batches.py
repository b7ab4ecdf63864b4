"""What each rank is given of a mini-batch: whole groups, every row once, and as many passes as the others."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.trainers.builders import row_of, samples_of
from trainers.model.batches import packs_of

_ROWS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=24)
"""The group of each row, and the length of its reply."""


@given(_ROWS, st.integers(1, 5), st.integers(12, 40))
def test_groups_are_whole_on_one_rank_wherever_their_rows_stand(
    rows: list[tuple[int, int]], num_ranks: int, budget: int
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
                rank=rank,
                world_size=num_ranks,
                device=torch.device("cpu"),
            )
        )
        num_packs.add(len(packs))
        for pack in packs:
            assert len(pack.tokens) <= budget
            if not pack.is_idle:
                found = np.unique(np.searchsorted(samples.offsets, pack.tokens, side="right") - 1).tolist()
                seen += found
                for row in found:
                    ranks_of.setdefault(rows[row][0], set()).add(rank)
    assert sorted(seen) == list(range(len(rows)))
    assert all(len(ranks) == 1 for ranks in ranks_of.values())
    assert len(num_packs) == 1
