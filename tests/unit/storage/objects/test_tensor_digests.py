"""Digests of tensors against plain Python, and which changes they notice."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from storage.objects.tensor_digests import ROW, keys, tensor_digests


def _digest(tensor: torch.Tensor) -> str:
    return tensor_digests([("weight", tensor)])["weight"]


def _plain_digest(tensor: torch.Tensor) -> str:
    """The formula of the module, row by row in numpy, whose 64-bit integers wrap around."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    words, level = np.frombuffer(data + bytes(-len(data) % 8), np.int64), 0
    while True:
        low, high = keys(level)
        rows = [words[first : first + ROW] for first in range(0, len(words), ROW)] or [words]
        sums = [((row * low[: len(row)]).sum(), ((row >> 32) * high[: len(row)]).sum()) for row in rows]
        if len(sums) == 1:
            name = str(tensor.dtype).removeprefix("torch.")
            return f"{name} {list(tensor.shape)} " + "".join(f"{int(each) % 2**64:016x}" for each in sums[0])
        words, level = np.array(sums, np.int64).reshape(-1), level + 1


def test_the_sums_wrap_around_as_in_pythons_integers() -> None:
    tensor = torch.tensor([-(2**63), 2**63 - 1, 5, -1])
    low, high = keys(0).tolist()
    words = tensor.tolist()
    sums = [sum(map(int.__mul__, words, low)), sum(map(int.__mul__, [word >> 32 for word in words], high))]
    assert _digest(tensor) == "int64 [4] " + "".join(f"{each % 2**64:016x}" for each in sums)
    assert low[0] % 2**64 == 0xE220A8397B1DCDAF, "the first number of splitmix64 from 0, which is odd"


def _weights(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    torch.manual_seed(0)
    return (0.02 * torch.randn(shape)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (4 * ROW,), (7, ROW, 9), (2, 70 * ROW)])
def test_a_digest_is_its_formula(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = _weights(*shape, dtype=torch.float32)
    tensor = (100 * tensor).to(dtype) if dtype == torch.int8 else tensor.to(dtype)
    assert _digest(tensor) == _plain_digest(tensor)


def test_a_digest_of_many_levels_is_its_formula() -> None:
    tensor = torch.arange(ROW * ROW // 2 + 5, dtype=torch.int64) * 0x9E3779B97F4A7C1
    assert _digest(tensor) == _plain_digest(tensor)


def test_equal_values_have_an_equal_digest_however_they_lie_in_memory() -> None:
    tensor = _weights(40, 30)
    shifted = torch.cat([torch.zeros(1, dtype=tensor.dtype), tensor.reshape(-1)])[1:].view(40, 30)
    assert shifted.data_ptr() % 8 and _digest(shifted) == _digest(tensor)
    assert _digest(tensor.T.contiguous().T) == _digest(tensor)
    assert tensor_digests([("a", tensor), ("b", tensor[:0])]).keys() == {"a", "b"}
    assert tensor_digests([]) == {}


def test_each_flipped_bit_changes_the_digest() -> None:
    tensor = _weights(30)
    digests = {_digest(tensor)}
    for place in range(30):
        for bit in range(16):
            other = tensor.clone()
            other.view(torch.int16)[place] ^= (1 << bit) - (1 << 16) * (bit == 15)
            digests.add(_digest(other))
    assert len(digests) == 1 + 30 * 16


@pytest.mark.parametrize("size", [9, 3 * ROW, 5 * 4 * ROW])
def test_elements_that_changed_places_change_the_digest(size: int) -> None:
    tensor = _weights(size)
    rng = np.random.default_rng(0)
    digest = _digest(tensor)
    drawn = [rng.choice(size, 2, replace=False).tolist() for _ in range(300)]
    for one, other in [[0, 1], [0, 4], [0, size - 1], *drawn]:
        swapped = tensor.clone()
        swapped[[one, other]] = tensor[[other, one]]
        assert (_digest(swapped) == digest) == bool(tensor[one] == tensor[other]), (one, other)
    assert _digest(tensor.roll(1)) != digest and _digest(tensor.flip(0)) != digest


def test_another_type_or_shape_or_name_is_another_digest() -> None:
    tensor = _weights(8, 16)
    others = [tensor.view(16, 8), tensor.view(-1), tensor.view(torch.float16), tensor.view(torch.int16), tensor.T]
    others += [torch.zeros(8), torch.zeros(9), torch.zeros(0), torch.zeros(8, dtype=torch.float64)]
    assert len({_digest(tensor), *map(_digest, others)}) == 1 + len(others)
    one, other = _weights(4, 4), 2 * _weights(4, 4)
    assert tensor_digests([("a", one), ("b", other)]) != tensor_digests([("a", other), ("b", one)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_computes_the_digest_of_a_cpu(dtype: torch.dtype) -> None:
    for shape in [(), (0,), (3, 5), (2047, 4097), (8192, 8192)]:
        tensor = _weights(*shape, dtype=dtype)
        assert _digest(tensor.cuda()) == _digest(tensor), shape
