"""How a model's folder stores its weights, and the same folder's tensors with trained ones in their place.

    parameters ─▶ as_stored: under the names of the files ─┐
    base folder: every tensor that its index names ────────┴─▶ write_weights ─▶ the same tensors, of the same types

In: a folder in HF layout, parameters of the model it holds. Out: names and types; a safetensors file. What the model
does not compute with (`mtp.*`, `visual.*`) and what is not trained (buffers) is copied from the base bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from safetensors.torch import _TYPES, save_file
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from settings.errors import InvalidInput
from trainers.model.weight_index import stored_in

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
    weights: Mapping[str, torch.Tensor], base: Path, file: Path, *, dtypes: Mapping[str, torch.dtype]
) -> None:
    """Write the tensors that `dtypes` names, in its types: `weights` by their names in the files, and all others as
    `base` has them."""
    tensors = {name: weights[name].to(dtypes[name]) for name in dtypes.keys() & weights.keys()}
    for source, names in _by_file({name: its for name, its in stored_in(base).items() if name in dtypes}):
        with safe_open(str(source), framework="pt") as stored:
            tensors |= {name: stored.get_tensor(name).to(dtypes[name]) for name in names if name not in tensors}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        # A safetensors file has no two tensors in one memory, as those of a tied matrix are, or parts of a fused one.
        is_own = storage.data_ptr() not in taken and storage.nbytes() == tensor.nbytes and tensor.is_contiguous()
        tensors[name] = tensor if is_own else tensor.clone(memory_format=torch.contiguous_format)
        taken.add(storage.data_ptr())
    save_file(tensors, str(file), metadata={"format": "pt"})


def _by_file(files: Mapping[str, Path]) -> Iterator[tuple[Path, list[str]]]:
    for file in dict.fromkeys(files.values()):
        yield file, [name for name, its in files.items() if its == file]
