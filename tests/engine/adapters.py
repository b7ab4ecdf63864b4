"""Adapters for checking the engine, and what the trainer's model says of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from storage.objects.digests import seal_folder
from storage.policies.adapters import ADAPTER_WEIGHTS, has_adapter
from trainers.model.lora import adapter_weights, add_adapters, read_adapter, write_adapter

RANK, ALPHA = 4, 12.0


def adapted(base: Path, *, rank: int = RANK, target_modules: Sequence[str] | str = "all-linear") -> nn.Module:
    """The base model under fresh adapters."""
    causal_lm: nn.Module = AutoModelForCausalLM.from_pretrained(str(base), dtype=torch.float32)
    add_adapters(causal_lm, rank=rank, alpha=ALPHA, target_modules=target_modules, seed=0)
    return causal_lm


def an_adapter(
    base: Path, folder: Path, *, seed: int, rank: int = RANK, target_modules: Sequence[str] | str = "all-linear"
) -> Path:
    """A policy folder with random adapters that change every answer."""
    causal_lm = adapted(base, rank=rank, target_modules=target_modules)
    generator = torch.Generator().manual_seed(seed)
    for weight in adapter_weights(causal_lm).values():
        weight.data = 0.15 * torch.randn(weight.shape, generator=generator)
    folder.mkdir()
    write_adapter(causal_lm, folder, base="base")
    seal_folder(folder)
    return folder


def spoilt_adapter(base: Path, adapter: Path, folder: Path, how: str) -> Path:
    """An adapter folder with something wrong with it."""
    if how == "a rank that is too large":
        return an_adapter(base, folder, seed=9, rank=64)
    tensors = load_file(str(adapter / ADAPTER_WEIGHTS))
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    match how:
        case "a layer the model has not":
            name = next(name for name in tensors if "layers.1." in name and "lora_A" in name)
            for half in ("lora_A", "lora_B"):
                other = name.replace("lora_A", half)
                tensors[other.replace("layers.1.", "layers.9.")] = tensors[other].clone()
            save_file(tensors, str(folder / ADAPTER_WEIGHTS))
        case "not weights" | "altered since it was sealed":
            (folder / ADAPTER_WEIGHTS).write_bytes(b"not weights")
    seal_folder(folder)
    if how == "altered since it was sealed":
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, str(folder / ADAPTER_WEIGHTS))
    return folder


@functools.cache
def _model(base: Path, folder: Path) -> nn.Module:
    causal_lm = adapted(base) if has_adapter(folder) else AutoModelForCausalLM.from_pretrained(str(folder))
    if has_adapter(folder):
        read_adapter(causal_lm, folder)
    return causal_lm.float()


@torch.no_grad()
def logprobs_of(base: Path, folder: Path, prompt: Sequence[int], reply: Sequence[int]) -> list[float]:
    """log-softmax of the reply's tokens, by the module that the trainer trains."""
    logits_TV = _model(base, folder)(torch.tensor([[*prompt, *reply]])).logits[0]
    log_p = logits_TV[len(prompt) - 1 : -1].log_softmax(-1)
    return [float(log_p[index, token]) for index, token in enumerate(reply)]
