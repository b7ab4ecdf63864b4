"""Weights out, optimizer state out and in: safetensors and JSON, no pickle.

In: a sharded model and its optimizer. Out: a policy folder any HF tool loads, sealed by `digest.json`; a state
folder that resumes the optimizer bit for bit. Tensors are stored whole, so another world size can read them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from storage.digests import seal_folder, verify_folder
from trainers.distributed import copy_into, full
from trainers.model import PolicyModel

_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", "digest.json", "model.safetensors.index.json")


def save_policy(model: PolicyModel, base_folder: Path, folder: Path, *, dtype: torch.dtype) -> str:
    """Write the weights beside the base model's configuration and tokenizer; returns the weights digest.

    Equal weights give equal files and so equal digests.
    """
    folder.mkdir(parents=True)
    for file in base_folder.iterdir():
        if file.is_file() and not file.name.endswith(_NOT_COPIED):
            shutil.copy(file, folder / file.name)
    tensors = {name: full(tensor).to(dtype).contiguous() for name, tensor in _named_weights(model).items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return seal_folder(folder)


def save_state(model: PolicyModel, optimizer: torch.optim.AdamW, folder: Path, *, step: int) -> None:
    """Write float32 weights, both moments of every parameter, and torch's random state."""
    folder.mkdir(parents=True)
    tensors: dict[str, torch.Tensor] = {"random_state": torch.get_rng_state()}
    for name, parameter in model.named_parameters():
        tensors[f"weight/{name}"] = full(parameter).contiguous()
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}/{name}"] = full(value).contiguous()
    save_file(tensors, str(folder / "state.safetensors"))
    (folder / "state.json").write_text(json.dumps({"step": step}))
    seal_folder(folder)


def load_state(model: PolicyModel, optimizer: torch.optim.AdamW, folder: Path) -> int:
    """Restore what `save_state` wrote; returns its step.

    Raises `storage.digests.DigestMismatch` for a half-written or altered folder.
    """
    verify_folder(folder)
    tensors = load_file(str(folder / "state.safetensors"))
    torch.set_rng_state(tensors["random_state"])
    for name, parameter in model.named_parameters():
        copy_into(parameter, tensors[f"weight/{name}"])
        if f"exp_avg/{name}" in tensors:
            state = {"step": tensors[f"step/{name}"]}
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros_like(parameter)
                copy_into(state[key], tensors[f"{key}/{name}"])
            optimizer.state[parameter] = state
    return int(json.loads((folder / "state.json").read_text())["step"])


def load_weights(model: PolicyModel, folder: Path) -> None:
    """Put a policy folder's weights into the model, leaving the optimizer alone.

    Raises `storage.digests.DigestMismatch` for a half-written or altered folder.
    """
    verify_folder(folder)
    tensors = load_file(str(folder / "model.safetensors"))
    for name, parameter in _named_weights(model).items():
        copy_into(parameter, tensors[name].to(parameter.dtype))


def _named_weights(model: PolicyModel) -> dict[str, torch.Tensor]:
    """Weights by HF name; an output matrix tied to the embeddings is left out, as HF does."""
    causal_lm = model.causal_lm
    assert isinstance(causal_lm, nn.Module)
    return {name: parameter for name, parameter in causal_lm.named_parameters()}
