"""A base model from a folder or from the Hugging Face hub, as a sealed folder.

In: a path or a hub id. Out: configuration, safetensors weights and tokenizer, sealed by `digest.json`.
"""

from __future__ import annotations

from pathlib import Path

from settings.errors import InvalidInput
from storage.objects.digests import DIGEST_FILE, seal_folder
from storage.objects.hub import fetch_from_hub
from trainers.model.weight_index import stored_in

_WEIGHTS = "*.safetensors"
_WANTED = ["*.json", _WEIGHTS, "*.jinja", "*.txt", "*.model"]


def fetch_model(model: str, folder: Path) -> Path:
    """Make `folder` one of links to the files of a local or downloaded `model`: of weights those alone that its index
    names.

    Raises `InvalidInput` if there are no safetensors weights, or not those that the index names; and as
    `fetch_from_hub`.
    """
    source = Path(model).expanduser()
    if not source.is_dir():
        source = fetch_from_hub(model, "model", patterns=_WANTED)
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
