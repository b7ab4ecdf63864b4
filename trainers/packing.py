"""Rows → packs: several sequences end to end in one forward pass, with no padding; and groups → ranks.

In: lengths and a token budget, or token counts and a number of ranks. Out: lists of rows or of groups; and the position
ids of a pack.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import torch


def pack_rows(lengths: Sequence[int] | np.ndarray, *, budget: int) -> list[list[int]]:
    """First-fit decreasing: rows into packs of at most `budget` tokens; a longer row gets a pack of its own.

    Deterministic, and every row appears exactly once. The first pack with room is found in a binary tree of the most
    room on either side, so that n rows cost n log n.

    >>> pack_rows([5, 3, 2], budget=5)
    [[0], [1, 2]]
    """
    packs: list[list[int]] = []
    num_leaves = 1 << max(0, len(lengths) - 1).bit_length()
    most_room = [budget] * (2 * num_leaves)
    for row in sorted(range(len(lengths)), key=lambda i: (-int(lengths[i]), i)):
        length = int(lengths[row])
        node = 1
        while node < num_leaves:
            # A row over the budget fits nowhere: it opens the leftmost pack that is untouched.
            node = 2 * node if most_room[2 * node] >= min(length, budget) else 2 * node + 1
        if node - num_leaves == len(packs):
            packs.append([])
        packs[node - num_leaves].append(row)
        most_room[node] -= length
        while node > 1:
            node //= 2
            most_room[node] = max(most_room[2 * node], most_room[2 * node + 1])
    return [sorted(pack) for pack in packs]


def distribute_groups(token_counts_G: Sequence[int] | np.ndarray, num_ranks: int) -> list[list[int]]:
    """Whole groups to ranks, with about as many tokens on each; a list of groups per rank, in ascending order.

    The largest differencing method (Karmarkar and Karp 1982): partial divisions are joined, those of the largest
    spread first, the fullest rank of one with the emptiest of the other. Deterministic; with fewer groups
    than ranks some ranks get none.

    >>> distribute_groups([8, 7, 6, 5, 4], 2)
    [[1, 3, 4], [0, 2]]
    """
    # A division: its spread, negative for the heap; a tie-breaker; then (tokens, groups) per rank, the fullest first.
    divisions: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for group, count in enumerate(token_counts_G):
        alone = [(int(count), [group]), *((0, []) for _ in range(num_ranks - 1))]
        divisions.append((-int(count) if num_ranks > 1 else 0, group, alone))
    heapq.heapify(divisions)
    number = len(divisions)
    while len(divisions) > 1:
        one, other = heapq.heappop(divisions)[2], heapq.heappop(divisions)[2]
        joined = [(a + b, mine + theirs) for (a, mine), (b, theirs) in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda share: (-share[0], share[1]))
        heapq.heappush(divisions, (joined[-1][0] - joined[0][0], number, joined))
        number += 1
    return [sorted(groups) for _, groups in divisions[0][2]] if divisions else [[] for _ in range(num_ranks)]


def position_ids(lengths: Sequence[int] | np.ndarray) -> torch.Tensor:
    """0, 1, 2, … anew for every sequence; shape [T], int64."""
    return torch.cat([torch.arange(int(length)) for length in lengths])
