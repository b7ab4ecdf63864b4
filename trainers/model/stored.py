"""How a model's folder stores its weights, and the same folder's tensors with trained ones in their place.

    parameters ─▶ as_stored: under the names of the files ─┐
    base folder: every tensor that its index names ────────┴─▶ write_weights ─▶ the same tensors, of the same types

Several ranks write one file, each a share of its bytes.

In: a folder in HF layout, parameters of the model it holds. Out: names and types; a safetensors file. What the model
does not compute with (`mtp.*`, `visual.*`) and what is not trained (buffers) is copied from the base bit for bit.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from safetensors.torch import _TYPES, save
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from settings.errors import InvalidInput
from trainers.data.packing import distribute_groups
from trainers.model.distributed import gathered, on_every_rank, on_first_rank, rank
from trainers.model.weight_index import stored_in

_LAYER = re.compile(r".*?\.layers\.\d+\.")
TRAINABLE = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
"""Types that hold trained weights."""


def stored_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """Name and type of every tensor; `config.json` need not name a type, or may name another."""
    dtypes: dict[str, torch.dtype] = {}
    for file, names in _by_file(stored_in(folder)):
        with safe_open(str(file), framework="pt") as weights:
            dtypes |= {name: _TYPES[weights.get_slice(name).get_dtype()] for name in names}
    return dtypes


def dtypes_in(file: BinaryIO) -> dict[str, torch.dtype]:
    """Name and type of every tensor in an open safetensors file, of which only the header is read."""
    header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: _TYPES[about["dtype"]] for name, about in header.items() if name != "__metadata__"}


def as_stored(causal_lm: nn.Module, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Values of parameters, by the names and in the shapes in which the files have them: transformers may load a model
    under other names, and with experts fused. A tied matrix has each of its names."""
    names: dict[int, str] = {}
    every = dict(weights)
    for name, parameter in causal_lm.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first in weights:
            every[name] = weights[first]
    model: Any = causal_lm
    return revert_weight_conversion(model, every)


def refuse_unstored(causal_lm: nn.Module, folder: Path) -> None:
    """Raise `InvalidInput` for a model whose trained weights would be stored under other names than its files have, and
    for weights in a type that cannot hold trained values."""
    what, stored = f"{folder}: {type(causal_lm).__name__}", stored_dtypes(folder)
    empty = {name: torch.empty(its.shape, device="meta") for name, its in causal_lm.named_parameters()}
    model: Any = causal_lm
    names = revert_weight_conversion(model, empty).keys()
    if other := names - stored.keys():
        raise InvalidInput(
            f"{what} stores its weights under other names than it computes with ({min(other)} is not in its files), so "
            "its policies could not be served; save it anew with transformers' save_pretrained"
        )
    if narrow := {name for name in names if stored[name] not in TRAINABLE}:
        raise InvalidInput(
            f"{what} stores {min(narrow)} as {str(stored[min(narrow)]).removeprefix('torch.')}, "
            "which cannot hold trained weights; use the model in bfloat16 or float32"
        )


def write_weights(
    causal_lm: nn.Module,
    parameters: Mapping[str, torch.Tensor],
    base: Path,
    file: Path,
    *,
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Write the tensors that `dtypes` names, in its types: those that `parameters` of the model are stored as, and all
    others as `base` has them. The bytes are those of `safetensors.torch.save_file`.

    Every rank must call it. Those that see the folder write about as many bytes each: layer after layer is gathered to
    the rank that writes it. So none holds more than one layer, or matrix outside of them, beside its shards. What fails
    on one raises on all.
    """
    empty = {name: torch.empty(its.shape, device="meta") for name, its in parameters.items()}
    parts: dict[str, list[str]] = {}
    for name in parameters:
        layer = _LAYER.match(name)
        parts.setdefault(layer[0] if layer else name, []).append(name)
    names = {part: as_stored(causal_lm, {name: empty[name] for name in its}) for part, its in parts.items()}
    copied = {name: its for name, its in stored_in(base).items() if name in dtypes}
    shapes: dict[str, Sequence[int]] = {}
    for source, its in _by_file(copied):
        with safe_open(str(source), framework="pt") as stored:
            shapes |= {name: stored.get_slice(name).get_shape() for name in its}
    shapes |= {name: tensor.shape for tensors in names.values() for name, tensor in tensors.items() if name in dtypes}
    trained = {name for tensors in names.values() for name in tensors}
    head, starts = _head({name: (dtypes[name], shapes[name]) for name in shapes})
    sizes = {name: math.prod(shapes[name]) * dtypes[name].itemsize for name in shapes}

    def make() -> None:
        with open(file, "wb") as made:
            made.write(head)
            made.truncate(len(head) + sum(sizes.values()))

    on_first_rank(make)
    writers = [number for number, sees in enumerate(on_every_rank(file.exists)) if sees]
    work = {part: sum(sizes.get(name, 0) for name in tensors) for part, tensors in names.items()}
    work |= {f"={name}": sizes[name] for name in copied.keys() - trained}
    owners = {
        part: writer
        for writer, its in zip(writers, distribute_groups(list(work.values()), len(writers)), strict=True)
        for part in (list(work)[number] for number in its)
    }
    failures: list[Exception] = []

    def write(tensors: Mapping[str, torch.Tensor]) -> None:
        with open(file, "r+b") as made:
            for name in tensors.keys() & starts.keys():
                made.seek(len(head) + starts[name])
                flat = tensors[name].to(dtypes[name]).contiguous().reshape(-1)
                made.write(memoryview(flat.view(torch.uint8).numpy()))

    def copy_and_report() -> None:
        if failures:
            raise failures[0]
        for source, its in _by_file({name: copied[name] for name in copied.keys() - trained}):
            with safe_open(str(source), framework="pt") as stored:
                for name in its:
                    if rank() == owners[f"={name}"]:
                        write({name: stored.get_tensor(name)})

    for part, its in parts.items():
        whole = {name: gathered(parameters[name], to=owners[part]) for name in its}
        if rank() == owners[part] and not failures:
            try:
                write(as_stored(causal_lm, {name: tensor for name, tensor in whole.items() if tensor is not None}))
            except Exception as error:  # noqa: BLE001 - raised later: the others wait for this rank's shards
                failures.append(error)
    on_every_rank(copy_and_report)


def _head(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> tuple[bytes, dict[str, int]]:
    """What a safetensors file with these tensors begins with, and where behind it the values of each begin."""
    content = save({name: torch.empty(0, dtype=dtype) for name, (dtype, _) in tensors.items()}, {"format": "pt"})
    header = json.loads(content[8:])  # of empty ones: the order is that of the library
    starts: dict[str, int] = {}
    end = 0
    for name, about in header.items():
        if name != "__metadata__":
            dtype, shape = tensors[name]
            starts[name] = end
            end += math.prod(shape) * dtype.itemsize
            about |= {"shape": list(shape), "data_offsets": [starts[name], end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, starts


def _by_file(files: Mapping[str, Path]) -> Iterator[tuple[Path, list[str]]]:
    for file in dict.fromkeys(files.values()):
        yield file, [name for name, its in files.items() if its == file]
