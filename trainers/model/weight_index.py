"""Which file of a model's folder holds which tensor. Importing it loads no torch.

In: a folder in HF layout. Out: the file of each tensor; files that no index names are not the model's.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

from settings.errors import InvalidInput
from storage.objects.digests import WEIGHTS_FILE
from trainers.model.kinds import refusal

INDEX_FILE = "model.safetensors.index.json"
_NEEDED = ("config.json", "tokenizer_config.json")
_VOCABULARIES = ("tokenizer.json", "*vocab*", "*.model", "*.tiktoken", "*.spm", "tekken.json")
"""Patterns of files, one of which every tokenizer has."""
_LFS_POINTER = b"version https://git-lfs"


def check_model_folder(folder: Path, *, trains_weights: bool = False) -> None:
    """Raise `InvalidInput` for a folder that lacks files, parts of files or the model's head, holds pointers of git-lfs
    instead of files, or whose tokenizer knows tokens for which the model has no embedding; for an architecture that
    cannot be trained, and, if all weights are to be trained, for quantised ones."""
    missing = [name for name in _NEEDED if not (folder / name).is_file()]
    if not any(file.is_file() for pattern in _VOCABULARIES for file in folder.glob(pattern)):
        missing.append("tokenizer.json")
    weights = sorted(folder.glob("*.safetensors"))
    if not missing and not weights:
        others = next((file.name for file in folder.glob("*.bin")), "")
        missing = ["safetensors weights" + (f" ({others} is not read: save_pretrained writes them)" if others else "")]
    if missing:
        raise InvalidInput(f"the folder lacks {', '.join(missing)}")
    _check_files(folder)
    try:
        names = set(stored_in(folder))
    except FileNotFoundError as error:
        raise InvalidInput(f"{error}; copy or download the model again") from error
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    with _of_damaged("config.json"):
        check_kind(config, trains_weights=trains_weights)
        about = config.get("text_config") or config
        rows = about.get("vocab_size")
    with _of_damaged("tokenizer.json"):
        most = _highest_token(folder / "tokenizer.json")
    is_known = any(name.endswith("embed_tokens.weight") for name in names)
    if is_known and not any("lm_head" in name for name in names) and not _is_tied(config, about):
        raise InvalidInput(
            "its weights have no lm_head, and config.json does not tie it to the embedding: it is no causal language "
            "model, or was saved without its head; use the checkpoint of the whole model"
        )
    if isinstance(rows, int) and most >= rows:
        raise InvalidInput(
            f"its tokenizer has a token {most}, and the model embeds {rows}: take the tokenizer that belongs to the "
            f"weights, or call resize_token_embeddings({most + 1}) and save both again"
        )


@contextlib.contextmanager
def _of_damaged(name: str) -> Iterator[None]:
    """Raise `InvalidInput` for a value of another type than such files have."""
    try:
        yield
    except (AttributeError, KeyError, TypeError) as error:
        raise InvalidInput(f"{name} is damaged ({type(error).__name__}: {error}); copy it again") from error


def check_kind(config: dict[str, Any], *, trains_weights: bool) -> None:
    """Raise `InvalidInput` for a `config.json` of an architecture that cannot be trained, or that needs code of its
    own; and, if all weights are to be trained, of quantised ones."""
    if reason := refusal(config):
        raise InvalidInput(f"{reason}; docs/models.md lists what can be trained")
    quantised = (config.get("quantization_config") or {}).get("quant_method")
    if quantised and trains_weights:
        raise InvalidInput(
            f"its weights are quantised ({quantised}) and cannot hold trained values; use the model in bfloat16 or "
            "float32, or train adapters (train.lora)"
        )


def _check_files(folder: Path) -> None:
    for file in sorted(file for file in folder.iterdir() if file.is_file()):
        with open(file, "rb") as start:
            if start.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise InvalidInput(f"{file.name} is a pointer of git-lfs, not the file: run `git lfs pull` in {folder}")
        if file.suffix not in (".json", ".safetensors"):
            continue
        try:
            json.loads(file.read_text(encoding="utf-8")) if file.suffix == ".json" else _names(file)
        except Exception as error:  # the header of a safetensors file says how long it must be
            what = f"{type(error).__name__}: {error}"
            raise InvalidInput(f"{file.name} is damaged ({what}); copy it again") from error


def _is_tied(config: dict[str, Any], about: dict[str, Any]) -> bool:
    """Whether the embedding is the head too; what config.json leaves out is the default of its kind of model."""
    for values in (config, about):
        if isinstance(tied := values.get("tie_word_embeddings"), bool):
            return tied
    from transformers import AutoConfig

    try:
        return bool(AutoConfig.for_model(about["model_type"]).tie_word_embeddings)
    except (KeyError, ValueError):  # a kind of model that is not known here: its own loader decides
        return True


def _highest_token(file: Path) -> int:
    """The greatest token id of a tokenizer.json; −1 without one."""
    if not file.exists():
        return -1
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    return max([-1, *ids, *(token["id"] for token in tokenizer.get("added_tokens") or ())])


def stored_in(folder: Path) -> dict[str, Path]:
    """The file of every tensor: of those that the index names, or without an index of `model.safetensors`.

    Raises `FileNotFoundError` without either and for a missing file, `InvalidInput` for an index that names tensors
    which its files do not have, or have twice, or files in other folders, and for both a whole file and an index of
    others: transformers reads the one, vLLM the other.
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
    if not files:
        raise InvalidInput(f"{index} names no weights; copy or download the model again")
    if whole.exists() and set(files.values()) != {whole}:
        raise InvalidInput(f"{folder} has {WEIGHTS_FILE} and an index of other files; remove the one that is stale")
    for file in sorted(set(files.values())):
        if file.parent != folder:
            what = f"{index} names {file.relative_to(folder)}, which is not beside it"
            raise InvalidInput(f"{what}; put all weights into one folder, and their names alone into the index")
        if not file.exists():
            raise FileNotFoundError(f"{folder} lacks {file.name}, which {INDEX_FILE} names")
        named = {name for name, its in files.items() if its == file}
        if missing := named - _names(file):
            raise InvalidInput(f"{file} lacks {min(missing)}, which {INDEX_FILE} says is in it")
        if twice := (_names(file) - named) & files.keys():
            raise InvalidInput(f"{min(twice)} is in {files[min(twice)].name} and in {file.name}; remove the stale one")
    return files


def _names(file: Path) -> set[str]:
    with safe_open(str(file), framework="np") as weights:
        return set(weights.keys())
