"""A base model from a folder or from the Hugging Face hub, as a sealed folder.

In: a path or a hub id. Out: configuration, safetensors weights and tokenizer, sealed by `digest.json`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from settings.errors import InvalidInput
from storage.objects.digests import seal_folder
from storage.objects.hub import fetch_from_hub

_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


def fetch_model(model: str, folder: Path) -> Path:
    """Copy or download `model` into `folder`.

    Raises `InvalidInput` if there are no safetensors weights, and as `fetch_from_hub`.
    """
    source = Path(model).expanduser()
    if not source.is_dir():
        source = fetch_from_hub(model, "model", patterns=_WANTED)
    folder.mkdir(parents=True)
    for pattern in _WANTED:
        for file in source.glob(pattern):
            shutil.copy(file, folder / file.name)
    if not list(folder.glob("*.safetensors")):
        raise InvalidInput(f"model {model!r} has no safetensors weights; convert it with transformers' save_pretrained")
    (folder / "digest.json").unlink(missing_ok=True)
    seal_folder(folder)
    return folder
