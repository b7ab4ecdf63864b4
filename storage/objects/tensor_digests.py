"""Digests of tensors, computed on the device that holds them, to tell whether weights are those that were sent.

In: a tensor, on a CPU or a GPU. Out: text with its type, its shape and 128 bits, the same on both.

    bits as 64-bit words ─▶ rows of 1024 ─▶ two sums per row: Σ word · key, Σ (word >> 32) · key', modulo 2^64
                                    └──────── the sums are the next level's words, until one row is left ───┘

This is multilinear hashing (Lemire and Kaser 2014, https://arxiv.org/abs/1202.4961) with odd keys: any one changed bit
changes the digest, and any other change, such as two elements that changed places, goes unnoticed with a probability
below 2^-30. Sums of integers do not depend on the order of adding. It is for accidents, not for forgers: the keys are
public, and files that come from elsewhere have their sha256.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np

from storage.objects.splitmix import splitmix64

ROW = 1024
"""Words that are summed together."""
_ROWS_AT_ONCE = {"cpu": 31, "cuda": 8192}
"""Rows per operation. On CPUs their products stay in the cache, and are too few for torch to wait for other threads."""


def tensor_digests(tensors: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Name → digest. A GPU is waited for once, at the end."""
    import torch

    about: dict[str, str] = {}
    sums: list[Any] = []
    with torch.no_grad():
        for name, tensor in tensors:
            about[name] = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            sums.append(_sums_of(_words(tensor.detach())))
        numbers = torch.stack([each.to(sums[0].device) for each in sums]).tolist() if sums else []
    return {
        name: f"{text} " + "".join(f"{number % 2**64:016x}" for number in pair)
        for (name, text), pair in zip(about.items(), numbers, strict=True)
    }


def is_zero(digest: str) -> bool:
    """True if every bit of the tensor is 0."""
    return digest.endswith(" " + 32 * "0")


def keys(level: int) -> np.ndarray:
    """Odd keys of a level, int64, shape [2, ROW]."""
    bits: np.ndarray = splitmix64(0, np.arange(2 * ROW * level, 2 * ROW * (level + 1), dtype=np.uint64)) | 1
    return bits.view(np.int64).reshape(2, ROW)


@functools.cache
def _keys_on(device: Any, level: int) -> Any:
    import torch

    return torch.from_numpy(keys(level)).to(device)


def _words(tensor: Any) -> Any:
    """A tensor's bits as 64-bit words, the last one filled up with zeros; a view where that is possible."""
    import torch

    raw = tensor.contiguous().view(-1).view(torch.uint8)
    if rest := len(raw) % 8:
        raw = torch.nn.functional.pad(raw, (0, 8 - rest))
    elif raw.storage_offset() % 8 or raw.data_ptr() % 8:
        raw = raw.clone()
    return raw.view(torch.int64)


def _sums_of(words: Any, level: int = 0) -> Any:
    """The two sums of the last row."""
    import torch

    row_keys = _keys_on(words.device, level)
    num_rows = max(1, -(-len(words) // ROW))
    sums = torch.zeros(num_rows, 2, dtype=torch.int64, device=words.device)
    at_once = _ROWS_AT_ONCE[words.device.type]
    whole = len(words) // ROW
    products = torch.empty(min(at_once, whole), ROW, dtype=torch.int64, device=words.device)
    for first in range(0, whole, at_once):
        rows = words[first * ROW : min(first + at_once, whole) * ROW].view(-1, ROW)
        product = products[: len(rows)]
        torch.mul(rows, row_keys[0], out=product)
        torch.sum(product, 1, out=sums[first : first + len(rows), 0])
        torch.bitwise_right_shift(rows, 32, out=product)
        product.mul_(row_keys[1])
        torch.sum(product, 1, out=sums[first : first + len(rows), 1])
    if rest := len(words) % ROW:
        row = words[-rest:]
        sums[whole, 0] = (row * row_keys[0, :rest]).sum()
        sums[whole, 1] = ((row >> 32) * row_keys[1, :rest]).sum()
    return sums[0] if num_rows == 1 else _sums_of(sums.view(-1), level + 1)
