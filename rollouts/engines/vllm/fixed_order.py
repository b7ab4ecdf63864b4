"""The same bits in every batch, on vLLM's CPU build: a row is computed as if nothing else were in its batch.

In: the model runner of a vLLM worker, before its first request. Out: its layers compute in a fixed order.

    matrix products   oneDNN sums in another order for another number of rows ─▶ blocks of rows with equal bits
    attention         vLLM divides a sequence's keys over threads by the load of the batch, and takes other tiles of
                      keys for more queries ─▶ no division, and a prompt as requests of a few tokens each
    activations       torch divides the elements of a tensor over threads wherever they are many enough, and computes
                      what is left beside whole vector registers by another formula ─▶ few rows at a time

What this leaves out, such as experts that share a product over the rows of a batch, `batch_probe` finds and names.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from settings.errors import InvalidInput

BLOCKS = (8, 16, 32, 48, 64, 96, 128, 192, 256)
"""Row counts of a matrix product that are tried, ascending."""
_UNDIVIDED = 32768
"""Elements from which torch divides an operation over threads (`at::internal::GRAIN_SIZE`)."""
_TILE_ROWS = {"amx": 32}
"""Query rows that vLLM's attention computes at once, by instruction set; 8 by the others."""


def fix_order(runner: Any) -> None:
    """Let a CPU model runner compute in a fixed order. Raises `InvalidInput` for a layer that has none."""
    from vllm import envs
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    vars(envs)["VLLM_CPU_ATTN_SPLIT_KV"] = False
    CPUAttentionMetadataBuilder.build = _by_tiles(CPUAttentionMetadataBuilder.build)
    sizes: dict[Any, tuple[int, ...]] = {}
    methods = set()
    for name, module in runner.get_model().named_modules():
        if isinstance(module, LinearBase | VocabParallelEmbedding):
            kind = (type(module.quant_method), *_shape(module), getattr(module, "bias", None) is not None)
            if kind not in sizes:
                sizes[kind] = _equal_blocks(module, name)
            module.block_sizes = sizes[kind]
            methods.add(type(module.quant_method))
        elif type(module).__module__ == "vllm.model_executor.layers.activation":
            module._forward_method = _on_one_thread(module._forward_method)
    for method in methods:
        method.apply = _by_blocks(method.apply)


def blocks_of(num_rows: int, sizes: Sequence[int]) -> list[int]:
    """The blocks that hold so many rows: the largest, and the smallest that holds what is left. `sizes` ascend."""
    whole, left = divmod(num_rows, sizes[-1])
    return [sizes[-1]] * whole + [next(size for size in sizes if size >= left)] * (left > 0)


def in_blocks(product: Callable[[Any], Any], x_MK: Any, sizes: Sequence[int]) -> Any:
    """`product` of M rows, shape [M, N], computed in `blocks_of` them; the last is filled up with zeros."""
    import torch

    blocks = blocks_of(len(x_MK), sizes)
    if blocks == [len(x_MK)]:
        return product(x_MK)
    if missing := sum(blocks) - len(x_MK):
        x_MK = torch.cat([x_MK, x_MK.new_zeros(missing, x_MK.shape[1])])
    parts = [product(part) for part in x_MK.split(blocks)]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole[: len(whole) - missing]


def _by_blocks(apply: Callable[..., Any]) -> Callable[..., Any]:
    """A method of linear layers, `apply(layer, x, bias)`, in the layer's own blocks."""

    @functools.wraps(apply)
    def fixed(self: Any, layer: Any, x: Any, bias: Any = None) -> Any:
        x_MK = x.reshape(-1, x.shape[-1])
        out_MN = in_blocks(lambda part: apply(self, layer, part, bias), x_MK, layer.block_sizes)
        return out_MN.view(*x.shape[:-1], out_MN.shape[-1])

    return fixed


def _shape(layer: Any) -> tuple[Any, ...]:
    """Columns in and out, and the type of a layer's inputs. Its weights may be packed away."""
    if hasattr(layer, "embedding_dim"):
        return layer.embedding_dim, layer.num_embeddings_per_partition, layer.weight.dtype
    columns = getattr(layer, "input_size_per_partition", layer.input_size)
    return columns, getattr(layer, "output_size_per_partition", layer.output_size), layer.params_dtype


def _equal_blocks(layer: Any, name: str) -> tuple[int, ...]:
    """The row counts of `BLOCKS` at which a row of this layer has the same bits, wherever it stands.

    The order of a sum depends on shapes and not on numbers, so random ones show it, and what they show stays true.
    Raises `InvalidInput` if a row's bits depend on its place.
    """
    import torch

    columns, _, dtype = _shape(layer)
    generator = torch.Generator().manual_seed(0)
    x_MK = torch.randn(BLOCKS[-1], columns, generator=generator).to(dtype)

    def product(part: Any) -> Any:
        return layer.quant_method.apply(layer, part, getattr(layer, "bias", None))

    outputs = {size: in_blocks(product, x_MK, [size]) for size in BLOCKS}
    alike = [[other for other in outputs if torch.equal(outputs[other], outputs[size])] for size in outputs]
    largest: list[int] = max(alike, key=lambda sizes: (len(sizes), sizes[-1]))
    turned = in_blocks(product, x_MK.flip(0), largest[-1:])
    if not torch.equal(turned.flip(0), outputs[largest[-1]]):
        raise InvalidInput(f"reproducible = true: a row of {name} has other bits in another place of its batch")
    return tuple(largest)


def _by_tiles(build: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's attention metadata for the CPU, with every request as requests of as many tokens as are computed at once:
    so a query has the tiles of keys that it would have alone."""

    @functools.wraps(build)
    def fixed(self: Any, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
        rows, heads = _TILE_ROWS.get(self.isa, 8), self.num_heads // self.num_kv_heads
        tile = rows // heads if rows % heads == 0 else rows
        if common.causal is True and common.max_query_len > tile:
            common = in_tiles(common, tile)
        return build(self, common_prefix_len, common, fast_build)

    return fixed


def in_tiles(common: Any, tile: int) -> Any:
    """Attention metadata of a causal batch whose requests have at most `tile` queries each."""
    import torch

    starts_R, ends_R = (common.query_start_loc[: common.num_reqs + 1][part] for part in (slice(-1), slice(1, None)))
    tiles_R = (ends_R - starts_R + tile - 1) // tile
    request_T = torch.repeat_interleave(torch.arange(len(tiles_R)), tiles_R)
    first_T = torch.arange(len(request_T)) - (tiles_R.cumsum(0) - tiles_R)[request_T]
    starts_T = (starts_R[request_T] + tile * first_T).to(starts_R.dtype)
    ends_T = torch.minimum(starts_T + tile, ends_R[request_T])
    return dataclasses.replace(
        common,
        num_reqs=len(request_T),
        query_start_loc=torch.cat([starts_T, ends_T[-1:]]),
        seq_lens=common.seq_lens[request_T] - (ends_R[request_T] - ends_T),
        block_table_tensor=common.block_table_tensor[request_T],
        max_query_len=tile,
    )


def _on_one_thread(activate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """An activation of rows, a few at a time: so few elements torch does not divide over threads."""
    import torch

    @functools.wraps(activate)
    def fixed(x_MN: Any) -> Any:
        rows = max(1, (_UNDIVIDED - 1) // x_MN.shape[-1])
        if len(x_MN) <= rows:
            return activate(x_MN)
        return torch.cat([activate(part) for part in x_MN.split(rows)])

    return fixed


class LayerWatch:
    """Digests of what every layer of a worker's model computes, by request, position and layer."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._digests: dict[str, list[tuple[int, str, str]]] = {}
        for name, module in runner.get_model().named_modules():
            if not list(module.children()):
                layer = f"{name} ({type(module).__name__})"
                module.register_forward_hook(lambda _, __, output, layer=layer: self._note(layer, output))

    def of_request(self, request_id: str) -> list[tuple[int, str, str]]:
        """(position, layer, digest) of every token that was computed for a request."""
        return next((noted for name, noted in self._digests.items() if name.startswith(request_id)), [])

    def _note(self, layer: str, output: Any) -> None:
        import torch

        names = self._runner.input_batch.req_ids
        starts = self._runner.query_start_loc.np[: len(names) + 1].tolist()
        lengths = self._runner.optimistic_seq_lens_cpu[: len(names)].tolist()
        tensors = [each for each in (output if isinstance(output, tuple) else (output,)) if torch.is_tensor(each)]
        if not tensors or not names or len(tensors[0]) not in (starts[-1], len(names)):
            return
        for row, name in enumerate(names):
            by_token = len(tensors[0]) == starts[-1]
            rows = range(starts[row], starts[row + 1]) if by_token else range(row, row + 1)
            for place, at in enumerate(reversed(rows), start=1):
                digest = hashlib.sha256()
                for tensor in tensors:
                    digest.update(tensor[at].contiguous().view(torch.uint8).numpy().tobytes())
                self._digests.setdefault(name, []).append((lengths[row] - place, layer, digest.hexdigest()))
