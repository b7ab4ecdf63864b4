"""A base model from a folder, a GGUF file or the Hugging Face hub, as a sealed folder.

    file.gguf ── once, in a process of its own ──▶ a folder in the cache ─┐
    a local folder, or the hub's ─────────────────────────────────────────┴─▶ links to its files, with `digest.json`

In: what `model` names. Out: a folder in HF layout: configuration, safetensors weights, tokenizer.
"""

from __future__ import annotations

import functools
import json
import logging
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from infra.environment import cache_folder
from infra.user_code import own_command
from settings.errors import InvalidInput
from settings.places.state_folder import expanded
from storage.objects.digests import DIGEST_FILE, seal_folder, sha256_of_file
from storage.objects.hub import fetch_from_hub
from storage.objects.staging import staging_folder
from trainers.model.weight_index import stored_in

logger = logging.getLogger("millrace.base_model")

GGUF = ".gguf"
_WEIGHTS = "*.safetensors"
_WANTED = ["*.json", _WEIGHTS, "*.jinja", "*.txt", "*.model"]


def own_folder(model: str) -> Path | None:
    """The folder that `model` names, or the one of the GGUF file that it names; None if it names neither. Raises as
    `folder_of_gguf`."""
    path = expanded(model)
    if path.suffix == GGUF and path.is_file():
        return folder_of_gguf(path)
    return path if path.is_dir() else None


def local_folder(model: str) -> Path | None:
    """The folder of a model that is on this machine: its own, or the hub's cache. None if it is not here. Raises as
    `folder_of_gguf`."""
    if (folder := own_folder(model)) is not None:
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def fetch_model(model: str, folder: Path) -> Path:
    """Make `folder` one of links to the files of a local or downloaded `model`: of weights those alone that its index
    names.

    Raises `InvalidInput` if there are no safetensors weights, or not those that the index names; and as
    `folder_of_gguf` and `fetch_from_hub`.
    """
    if expanded(model).is_file() and not model.endswith(GGUF):
        raise InvalidInput(f"model = {model!r}: a file is a base model if it is GGUF; use a folder")
    source = own_folder(model) or fetch_from_hub(model, "model", patterns=_WANTED)
    if not list(source.glob(_WEIGHTS)):
        raise InvalidInput(f"model {model!r} has no safetensors weights; convert it with transformers' save_pretrained")
    try:
        weights = set(stored_in(source).values())
    except FileNotFoundError as error:
        raise InvalidInput(f"model {model!r}: {error}") from error
    folder.mkdir(parents=True)
    for pattern in _WANTED:
        for file in source.glob(pattern):
            if file.name != DIGEST_FILE and (pattern != _WEIGHTS or file in weights):
                (folder / file.name).symlink_to(file.absolute())
    seal_folder(folder)
    return folder


def folder_of_gguf(file: Path) -> Path:
    """A GGUF file as a folder in HF layout: weights in bfloat16, or in float32 if all of them are stored so.

    It is made once, by transformers' reader, and found again by the file's content. `gguf.json` in it says of what.
    Raises `InvalidInput` for what transformers cannot read.
    """
    file = file.resolve()
    sha256 = _sha256(file, file.stat().st_size, file.stat().st_mtime_ns)
    folder = cache_folder() / "gguf" / f"{sha256[:12]}-{version('transformers')}"
    if folder.exists():
        return folder
    logger.info("making a folder of %s: once, about half a minute per GB", file)
    with staging_folder(cache_folder(), num_bytes=4 * file.stat().st_size) as scratch:
        command = [*own_command("trainers.model.fetch:convert_gguf"), str(file), str(scratch)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["its process died"])[-1]
            raise InvalidInput(f"model = {str(file)!r}: transformers cannot read this GGUF file: {reason}")
        about = {"file": file.name, "sha256": sha256, "transformers": version("transformers")}
        (scratch / "gguf.json").write_text(json.dumps(about))
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.exists():  # else another start was quicker
                raise
    logger.info("%s has no generation defaults: turns end as its chat template ends them", file.name)
    return folder


@functools.lru_cache(maxsize=8)
def _sha256(file: Path, _size: int, _changed: int) -> str:
    return sha256_of_file(file)


def convert_gguf() -> None:
    """In a process of its own, which takes its arguments from the command line: a GGUF file, and the folder to fill."""
    import torch
    from gguf import GGMLQuantizationType, GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    file, folder = map(Path, sys.argv[1:])
    kinds = {tensor.tensor_type for tensor in GGUFReader(file).tensors}
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32 if kinds == {GGMLQuantizationType.F32} else torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
