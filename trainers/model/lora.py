"""Low-rank adapters (LoRA, by peft): put on, switched off, written, read, merged.

In: a causal LM. Out: the same module with frozen weights and trainable adapters; adapter folders in peft's format, as
`peft.PeftModel.from_pretrained` and vLLM load them.

    add_adapters ─▶ FSDP2, training ─▶ write_adapter: adapter_model.safetensors + adapter_config.json
                         └─ without_adapters: the base model, for a reference         └─▶ merge_adapter: a whole model

LoRA, https://arxiv.org/abs/2106.09685: h = W x + (alpha / rank) · B A x, A random and B zero at first: the base model.
"""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from settings.errors import InvalidInput
from storage.objects.digests import DIGEST_FILE, WEIGHTS_FILE, seal_folder
from storage.policies.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, SAVED_PREFIX, adapter_layers, has_adapter
from trainers.model.distributed import copy_into, full
from trainers.model.kinds import decoder_of
from trainers.model.stored import stored_dtypes, write_weights
from trainers.model.weight_index import INDEX_FILE

_NAME = "default"  # of the only adapter


def add_adapters(
    causal_lm: nn.Module, *, rank: int, alpha: float, target_modules: Sequence[str] | Literal["all-linear"], seed: int
) -> None:
    """Freeze the model and put adapters on its decoder layers, in place; before it is sharded.

    `target_modules` are names such as `q_proj`, or `all-linear`. Equal seeds give equal adapters; torch's own random
    stream is left as it was.

    Raises `ValueError` for a name that no linear layer has, and for one outside the decoder layers: the output matrix
    and the embeddings are used without their module, so an adapter there would do nothing.
    """
    from peft import LoraConfig, inject_adapter_in_model

    layers = decoder_of(causal_lm).layers
    within = next(name for name, module in causal_lm.named_modules() if module is layers) + "."
    linear = [name for name, module in causal_lm.named_modules() if isinstance(module, nn.Linear)]
    chosen = [name for name in linear if name.startswith(within) and not _stays(causal_lm, name)]
    if target_modules != "all-linear":
        names = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in chosen}))
        chosen = []
        for each in target_modules:
            matches = [name for name in linear if f".{name}".endswith(f".{each}")]
            if not matches or not all(name.startswith(within) for name in matches):
                what = "is no part of the decoder layers" if matches else "is the name of no linear layer of this model"
                raise InvalidInput(f"train.lora.target_modules: {each!r} {what}; choose from {names}")
            if any(_stays(causal_lm, name) for name in matches):
                what = "is a router's, or of a state-space layer whose kernels take its weight without it"
                raise InvalidInput(f"train.lora.target_modules: {each!r} {what}; choose from {names}")
            chosen += matches
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        # peft takes fractions for alpha, and so does vLLM.
        own_names = sorted({name.removeprefix(within) for name in chosen})
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=own_names)
        for parameter in causal_lm.parameters():
            parameter.requires_grad_(False)
        # Into the layers, which have no `config`: in a model peft 0.21 takes `shared_expert.down_proj` for the experts.
        inject_adapter_in_model(config, layers, adapter_name=_NAME)


def _stays(causal_lm: nn.Module, name: str) -> bool:
    """True for a router, and for the layers of Mamba whose weights its kernels on GPUs take: all but the first."""
    owner, _, own = name.rpartition(".")
    is_state_space = isinstance(getattr(causal_lm.get_submodule(owner), "D", None), nn.Parameter)
    return "router" in name.split(".") or (is_state_space and own != "in_proj")


def has_adapters(model: nn.Module) -> bool:
    """True after `add_adapters`."""
    return bool(adapted_layers(model))


def adapted_layers(causal_lm: nn.Module) -> list[str]:
    """Names of the layers with an adapter."""
    return [name for name, module in causal_lm.named_modules() if hasattr(module, "lora_A")]


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, the model is its base model, bit for bit: the adapters' branch is not computed. Raises `ValueError` for a
    model that has none."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "lora_A")]
    if not layers:
        raise InvalidInput("the model has no adapters to switch off")
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        # peft freezes what it switches off, and FSDP2 notes at a parameter's first use whether it takes a gradient.
        for parameter in trainable:
            parameter.requires_grad_(True)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def adapter_weights(causal_lm: nn.Module) -> dict[str, torch.Tensor]:
    """The adapters' parameters by their name in peft's files."""
    return {saved_name(name): weight for name, weight in causal_lm.named_parameters() if _is_adapter(name)}


def saved_name(name: str) -> str:
    """What a parameter of `PolicyModel`, or of the model in it, is called in a policy's file.

    >>> saved_name("causal_lm.model.layers.0.mlp.up_proj.lora_A.default.weight")
    'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    name = name.removeprefix("causal_lm.")
    return SAVED_PREFIX + name.replace(f".{_NAME}.", ".") if _is_adapter(name) else name


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def write_adapter(causal_lm: nn.Module, folder: Path | None, *, base: str) -> None:
    """Write the adapters, whole and in float32, into a folder; the caller seals it. `base` says for people which model
    they belong to. Every rank has to call it, for shards are gathered; those that do not write pass no folder."""
    tensors = {name: full(weight).float().contiguous() for name, weight in adapter_weights(causal_lm).items()}
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(folder / ADAPTER_WEIGHTS), metadata={"format": "pt"})
    config = copy.copy(decoder_of(causal_lm).layers.peft_config[_NAME])
    config.base_model_name_or_path, config.inference_mode = base, True
    config.target_modules = sorted(adapted_layers(causal_lm))
    config.save_pretrained(str(folder))


def read_adapter(causal_lm: nn.Module, folder: Path) -> None:
    """Put a policy's adapter into the model's; a policy without one is the base model, so B becomes zero. Raises
    `ValueError` if the tensors are not those of the model's adapters."""
    weights = adapter_weights(causal_lm)
    if not has_adapter(folder):
        for name, weight in weights.items():
            if ".lora_B." in name:
                copy_into(weight, torch.zeros(weight.shape))
        return
    tensors = load_file(str(folder / ADAPTER_WEIGHTS))
    if {name: t.shape for name, t in tensors.items()} != {name: w.shape for name, w in weights.items()}:
        raise InvalidInput(f"{folder} holds adapters of other layers or of another rank than train.lora asks for")
    for name, weight in weights.items():
        copy_into(weight, tensors[name].to(weight.dtype))


def merge_adapter(base_folder: Path, adapter_folder: Path, folder: Path) -> str:
    """Write the base model with W + (alpha / rank) · B A in the place of W as a sealed folder in HF layout, merged in
    float32 and stored in the types of the base's weights; returns the weights digest."""
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(str(base_folder), dtype=torch.float32)
    config = json.loads((adapter_folder / ADAPTER_CONFIG).read_text())
    with torch.no_grad():
        for layer, (a, b) in adapter_layers(adapter_folder / ADAPTER_WEIGHTS).items():
            merged.get_submodule(layer).weight += b.float() @ a.float() * (config["lora_alpha"] / config["r"])
    shutil.copytree(base_folder, folder, ignore=shutil.ignore_patterns(DIGEST_FILE, "*.safetensors", INDEX_FILE))
    dtypes = stored_dtypes(base_folder)
    write_weights(merged, dict(merged.named_parameters()), base_folder, folder / WEIGHTS_FILE, dtypes=dtypes)
    return seal_folder(folder)
