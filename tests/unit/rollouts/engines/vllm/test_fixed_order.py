"""A row has the same bits whatever stands beside it: blocks of rows, and a prompt as requests of a few tokens."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollouts.engines.vllm.fixed_order import BLOCKS, _equal_blocks, blocks_of, in_blocks, in_tiles
from settings.errors import InvalidInput


@given(num_rows=st.integers(1, 2000), sizes=st.sets(st.integers(1, 300), min_size=1).map(sorted))
def test_blocks_hold_all_rows_and_only_the_last_is_larger_than_it_must_be(num_rows: int, sizes: list[int]) -> None:
    blocks = blocks_of(num_rows, sizes)
    assert set(blocks) <= set(sizes) and sum(blocks) >= num_rows > sum(blocks[:-1])
    assert blocks == sorted(blocks, reverse=True)


def test_a_product_that_depends_on_the_number_of_rows_does_not_in_blocks() -> None:
    x_MK = torch.randn(100, 4)

    def product(part_MK: torch.Tensor) -> torch.Tensor:
        return part_MK[:, :2] + len(part_MK)

    among = in_blocks(product, x_MK, [16])
    assert among.shape == (100, 2)
    for row in (0, 17, 99):
        assert torch.equal(in_blocks(product, x_MK[row : row + 1], [16]), among[row : row + 1])
        assert not torch.equal(product(x_MK[row : row + 1]), product(x_MK)[row : row + 1])


def _layer(product: Any) -> Any:
    method = SimpleNamespace(apply=lambda layer, x, bias: product(x))
    return SimpleNamespace(
        quant_method=method,
        bias=None,
        input_size=8,
        output_size=8,
        params_dtype=torch.float32,
    )


def test_only_row_counts_with_equal_bits_are_used_together() -> None:
    assert _equal_blocks(_layer(lambda x: x * 2), "fc")[-1] == 256
    assert _equal_blocks(_layer(lambda x: x + (len(x) < 64)), "fc") == BLOCKS[BLOCKS.index(64) :]
    assert _equal_blocks(_layer(lambda x: x + (len(x) > 128)), "fc") == BLOCKS[: BLOCKS.index(192)]
    late = torch.arange(256)[:, None] >= 128
    assert _equal_blocks(_layer(lambda x: x + late[: len(x)]), "fc")[-1] == 128, "its later rows have other bits"
    with pytest.raises(InvalidInput, match=r"a row of model\.fc has other bits in another place of its batch"):
        _equal_blocks(_layer(lambda x: x + torch.arange(len(x))[:, None]), "model.fc")


@dataclasses.dataclass
class _Metadata:
    num_reqs: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table_tensor: torch.Tensor
    max_query_len: int


def _queries(batch: Any) -> list[tuple[int, int, int]]:
    """(row of the batch, its position, block of its request) of every query of a causal batch."""
    queries = []
    for request in range(batch.num_reqs):
        start, end = batch.query_start_loc[request : request + 2].tolist()
        first = batch.seq_lens[request].item() - (end - start)
        block = batch.block_table_tensor[request, 0].item()
        queries += [(row, first + row - start, block) for row in range(start, end)]
    return queries


@given(
    requests=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=9), tile=st.integers(1, 9)
)
def test_tiles_ask_what_the_requests_asked(requests: list[tuple[int, int]], tile: int) -> None:
    lengths = torch.tensor([asked for asked, _ in requests])
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0)]).to(torch.int32)
    whole = _Metadata(
        num_reqs=len(requests),
        query_start_loc=starts,
        seq_lens=(lengths + torch.tensor([before for _, before in requests])).to(torch.int32),
        block_table_tensor=torch.arange(len(requests), dtype=torch.int32)[:, None],
        max_query_len=int(lengths.max()),
    )
    tiles = in_tiles(whole, tile)
    assert _queries(tiles) == _queries(whole)
    assert (tiles.query_start_loc[1:] - tiles.query_start_loc[:-1]).max() <= tile
    assert tiles.query_start_loc.dtype == tiles.seq_lens.dtype == tiles.block_table_tensor.dtype == torch.int32
