"""Which file of a model's folder holds which tensor. Importing it loads no torch.

In: a folder in HF layout. Out: the file of each tensor; files that no index names are not the model's.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open

from settings.errors import InvalidInput
from storage.objects.digests import WEIGHTS_FILE

INDEX_FILE = "model.safetensors.index.json"


def stored_in(folder: Path) -> dict[str, Path]:
    """The file of every tensor: of those that the index names, or without an index of `model.safetensors`.

    Raises `FileNotFoundError` without either and for a missing file, `InvalidInput` for an index that names tensors
    which its files do not have, and for both a whole file and an index of others: transformers reads the one, vLLM the
    other.
    """
    index, whole = folder / INDEX_FILE, folder / WEIGHTS_FILE
    if not index.exists():
        if not whole.exists():
            raise FileNotFoundError(f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}")
        return dict.fromkeys(_names(whole), whole)
    try:
        files = {str(name): folder / str(file) for name, file in json.loads(index.read_bytes())["weight_map"].items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InvalidInput(f"{index} is no index of weights: {error}") from error
    if whole.exists() and set(files.values()) != {whole}:
        raise InvalidInput(f"{folder} has {WEIGHTS_FILE} and an index of other files; remove the one that is stale")
    for file in sorted(set(files.values())):
        if not file.exists():
            raise FileNotFoundError(f"{folder} lacks {file.name}, which {INDEX_FILE} names")
        named = {name for name, its in files.items() if its == file}
        if missing := named - _names(file):
            raise InvalidInput(f"{file} lacks {min(missing)}, which {INDEX_FILE} says is in it")
    return files


def _names(file: Path) -> set[str]:
    with safe_open(str(file), framework="np") as weights:
        return set(weights.keys())
