"""How a model's folder stores its weights, in one file or in several.

In: a folder in HF layout. Out: names, type, tensors.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file


def stored_names(folder: Path) -> set[str]:
    """Names of all tensors."""
    names: set[str] = set()
    for file in _files(folder):
        with safe_open(str(file), framework="pt") as weights:
            names.update(weights.keys())
    return names


def stored_dtype(folder: Path) -> torch.dtype:
    """Type of the first tensor; `config.json` need not name one, or may name another."""
    with safe_open(str(_files(folder)[0]), framework="pt") as weights:
        dtype = weights.get_tensor(next(iter(weights.keys()))).dtype
    assert isinstance(dtype, torch.dtype)
    return dtype


def stored_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors by name, on the CPU."""
    return {name: tensor for file in _files(folder) for name, tensor in load_file(str(file)).items()}


def _files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no .safetensors file")
    return files
