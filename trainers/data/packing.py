"""Rows → packs: several sequences end to end in one forward pass, with no padding; and groups → ranks.

In: lengths and a token budget, or token counts and a number of ranks. Out: lists of rows or of groups; and of a pack,
position ids and what its sequences begin with in common.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import torch


def pack_rows(lengths: Sequence[int] | np.ndarray, *, budget: int) -> list[list[int]]:
    """First-fit decreasing: rows into packs of at most `budget` tokens; a longer row gets a pack of its own.

    A binary tree of the most room on either side leads to the first pack with room, so that n rows cost n log n.

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


_SHARED_OF_ONE = 4
"""Shared tokens that take at most the memory of a computed one: attention alone has copies of them."""


def pack_groups(
    lengths: np.ndarray, groups: np.ndarray, *, budget: int, new: np.ndarray | None = None
) -> list[list[int]]:
    """`pack_rows`, with rows of one group in one pack as far as it holds them: they begin alike.

    `new` are the tokens of each row that the row before it in its group does not begin with: behind that row the
    others count a quarter.

    >>> pack_groups(np.array([3, 2, 3, 2]), np.array([0, 1, 0, 1]), budget=6)
    [[0, 2], [1, 3]]
    >>> pack_groups(np.array([100, 100, 100]), np.zeros(3), budget=160, new=np.array([100, 4, 4]))
    [[0, 1, 2]]
    """
    parts: list[list[int]] = []
    counts: list[int] = []
    in_order = np.argsort(groups, kind="stable").tolist()
    for before, row in zip([-1, *in_order], in_order, strict=False):
        length = int(lengths[row])
        follows = length if new is None else int(new[row]) - (int(new[row]) - length) // _SHARED_OF_ONE
        if before < 0 or groups[row] != groups[before] or counts[-1] + follows > budget:
            parts.append([row])
            counts.append(length)
        else:
            parts[-1].append(row)
            counts[-1] += follows
    packs = pack_rows(counts, budget=budget)
    in_place = [sorted((parts[part] for part in pack), key=lambda part: part[0]) for pack in packs]
    return [[row for part in pack for row in part] for pack in in_place]  # a group's rows stay behind one another


_LEVEL = 1.01
"""Ranks with no more than this multiple of the mean are as good as even."""


def distribute_groups(token_counts_G: Sequence[int] | np.ndarray, num_ranks: int) -> list[list[int]]:
    """Whole groups to ranks, with about as many tokens on each; a list of groups per rank, in ascending order.

    The largest differencing method (Karmarkar and Karp 1982): partial divisions are joined, those of the largest
    spread first, the fullest rank of one with the emptiest of the other. Then the fullest rank gives groups away, or
    exchanges them, while that helps.

    >>> distribute_groups([8, 7, 6, 5, 4], 2)
    [[2, 3, 4], [0, 1]]
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
    if not divisions:
        return [[] for _ in range(num_ranks)]
    return _levelled([sorted(groups) for _, groups in divisions[0][2]], [int(count) for count in token_counts_G])


def _levelled(shares: list[list[int]], token_counts_G: Sequence[int]) -> list[list[int]]:
    """The same shares after the moves and exchanges between the fullest and another that even them out most."""
    loads = [sum(token_counts_G[group] for group in share) for share in shares]
    for _ in token_counts_G:
        full = loads.index(max(loads))
        if loads[full] * len(loads) <= _LEVEL * sum(loads):
            break
        best = loads[full], -1, -1, -1
        for other, share in enumerate(shares):
            for give in shares[full]:
                for take in (-1, *share):
                    moved = token_counts_G[give] - (token_counts_G[take] if take >= 0 else 0)
                    best = min(best, (max(loads[full] - moved, loads[other] + moved), other, give, take))
        _, other, give, take = best
        if other < 0:
            break
        for source, target, group in ((full, other, give), (other, full, take)):
            if group >= 0:
                shares[source].remove(group)
                shares[target].append(group)
                loads[source] -= token_counts_G[group]
                loads[target] += token_counts_G[group]
    return [sorted(share) for share in shares]


def position_ids(lengths: Sequence[int] | np.ndarray | torch.Tensor) -> torch.Tensor:
    """0, 1, 2, … anew for every sequence; shape [T], int64."""
    lengths_S = torch.as_tensor(lengths, dtype=torch.int64)
    starts_S = lengths_S.cumsum(0) - lengths_S
    return torch.arange(int(lengths_S.sum())) - starts_S.repeat_interleave(lengths_S)


def shared_tokens(input_ids_T: np.ndarray, lengths: Sequence[int] | np.ndarray) -> torch.Tensor | None:
    """Which computed token each token of a pack is, int64 [T]; None if every one has to be computed.

    A token is computed once for a sequence and those right after it that begin with the same tokens: the prompt of a
    group, the earlier turns of a conversation. Numbers are in the order of the pack. With several values for each
    token, [T, V], all of them have to be the same.

    >>> shared_tokens(np.array([7, 8, 1, 7, 8, 2, 3]), [3, 4])
    tensor([0, 1, 2, 0, 1, 3, 4])
    """
    computed_T = np.empty(len(input_ids_T), np.int64)
    ids_before, computed_before = input_ids_T[:0], computed_T[:0]
    start, num_computed = 0, 0
    for length in map(int, lengths):
        ids, computed = input_ids_T[start : start + length], computed_T[start : start + length]
        both = min(length, len(ids_before))
        differs = ids[:both] != ids_before[:both]
        differs = differs.any(1) if differs.ndim > 1 else differs
        common = int(differs.argmax()) if differs.any() else both
        computed[:common] = computed_before[:common]
        computed[common:] = np.arange(num_computed, num_computed + length - common)
        num_computed += length - common
        start, ids_before, computed_before = start + length, ids, computed
    return torch.from_numpy(computed_T) if num_computed < len(computed_T) else None


def new_tokens(computed_T: torch.Tensor | None, lengths: torch.Tensor) -> torch.Tensor:
    """How many tokens at the end of each sequence none before it has, of what `shared_tokens` returns; int64 [S].

    >>> new_tokens(torch.tensor([0, 1, 2, 0, 1, 3, 4]), torch.tensor([3, 4]))
    tensor([3, 2])
    """
    if computed_T is None:
        return lengths
    last_S = computed_T[lengths.cumsum(0) - 1].cummax(0).values
    return torch.diff(last_S, prepend=last_S.new_full((1,), -1))
