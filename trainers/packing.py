"""Rows → packs: several sequences end to end in one forward pass, with no padding.

In: row lengths and a token budget. Out: lists of rows; and per pack the position ids and the block-diagonal causal
mask that keep its sequences from seeing each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def pack_rows(lengths: Sequence[int] | np.ndarray, *, budget: int) -> list[list[int]]:
    """First-fit decreasing: rows into packs of at most `budget` tokens; a longer row gets a pack of its own.

    Deterministic, and every row appears exactly once.

    >>> pack_rows([5, 3, 2], budget=5)
    [[0], [1, 2]]
    """
    packs: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda i: (-int(lengths[i]), i)):
        length = int(lengths[row])
        for index, free in enumerate(room):
            if length <= free:
                packs[index].append(row)
                room[index] -= length
                break
        else:
            packs.append([row])
            room.append(budget - length)
    return [sorted(pack) for pack in packs]


def position_ids(lengths: Sequence[int] | np.ndarray) -> torch.Tensor:
    """0, 1, 2, … anew for every sequence; shape [T], int64."""
    return torch.cat([torch.arange(int(length)) for length in lengths])


def block_causal_mask(lengths: Sequence[int] | np.ndarray) -> torch.Tensor:
    """True where token q may attend to token k: same sequence, k ≤ q. Shape [1, 1, T, T], bool."""
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.as_tensor(np.asarray(lengths)))
    same = sequence_T[:, None] == sequence_T[None, :]
    return (same & torch.ones_like(same).tril())[None, None]
