"""Policies for checking the engine, whole ones and adapters, and the logprobs that transformers gives them."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from storage.objects.digests import seal_folder
from storage.policies.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, has_adapter
from trainers.model.lora import adapter_weights, add_adapters, read_adapter, write_adapter

WEIGHTS = "model.safetensors"
RANK = 4
"""Of the adapters."""


def a_policy(base: Path, folder: Path, *, end_id: int, seed: int) -> Path:
    """The base model with every weight moved a little, and an end token it never samples.

    So a reply is as long as was asked for, and a swap falls inside it for certain. The embedding, which is the output
    matrix too, gets a first coordinate that says "not the end".
    """
    shutil.copytree(base, folder)
    tensors = load_file(str(folder / WEIGHTS))
    generator = torch.Generator().manual_seed(seed)
    a_little = 0.1 * (32 / tensors["model.norm.weight"].numel()) ** 0.5  # as much in sum, however wide the model is
    moved = {name: t + a_little * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}
    embeddings = moved["model.embed_tokens.weight"]
    embeddings[:, 0] = 1.0
    embeddings[end_id, 0] = -10.0
    moved["model.norm.weight"][0] = 2.0
    save_file(moved, str(folder / WEIGHTS), metadata={"format": "pt"})
    seal_folder(folder)
    return folder


def with_experts(base: Path, folder: Path) -> Path:
    """A random Qwen3-MoE with the tokenizer of a base model."""
    about = json.loads((base / "config.json").read_text())
    config = AutoConfig.for_model(
        "qwen3_moe",
        **{name: about[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")},
        **{"hidden_size": 64, "num_hidden_layers": 3},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 64},
        **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        **{"tie_word_embeddings": True, "max_position_embeddings": 512},
    )
    torch.manual_seed(0)
    shutil.copytree(base, folder)
    (folder / WEIGHTS).unlink()
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    seal_folder(folder)
    return folder


def spoilt(policy: Path, folder: Path, how: str) -> Path:
    """A copy of a policy folder, of whole weights or an adapter, with something wrong with it."""
    if how == "a rank that is too large":
        return an_adapter(_base_of(policy), folder, seed=9, rank=64)
    shutil.copytree(policy, folder)
    weights = folder / (ADAPTER_WEIGHTS if has_adapter(policy) else WEIGHTS)
    tensors = load_file(str(weights))
    match how:
        case "no folder":
            shutil.rmtree(folder)
        case "no weights":
            weights.unlink()
        case "cut short":
            weights.write_bytes(weights.read_bytes()[:-1000])
        case "not weights":
            weights.write_bytes(b"not weights")
        case "other weights than sealed":
            save_file({name: tensor + 1 for name, tensor in tensors.items()}, str(weights))
        case "a wrong shape":
            name = "model.layers.1.mlp.down_proj.weight"
            save_file({**tensors, name: tensors[name][:, :-1].contiguous()}, str(weights), metadata={"format": "pt"})
        case "a tensor missing":
            tensors.pop("model.layers.1.self_attn.k_proj.weight")
            save_file(tensors, str(weights), metadata={"format": "pt"})
        case "an unknown layer":
            extra = {name.replace("layers.1.", "layers.9."): tensor.clone() for name, tensor in tensors.items()}
            save_file({**tensors, **extra}, str(weights), metadata={"format": "pt"})
    if how in ("a wrong shape", "a tensor missing", "an unknown layer"):
        seal_folder(folder)
    return folder


def an_adapter(base: Path, folder: Path, *, seed: int, rank: int = RANK) -> Path:
    """A policy folder with random adapters that change every reply."""
    causal_lm = _adapted(base, rank=rank)
    generator = torch.Generator().manual_seed(seed)
    for weight in adapter_weights(causal_lm).values():
        weight.data = 0.15 * torch.randn(weight.shape, generator=generator)
    folder.mkdir()
    write_adapter(causal_lm, folder, base=str(base))
    seal_folder(folder)
    return folder


def _base_of(adapter: Path) -> Path:
    return Path(json.loads((adapter / ADAPTER_CONFIG).read_text())["base_model_name_or_path"])


def _adapted(base: Path, *, rank: int = RANK) -> nn.Module:
    """The base model under fresh adapters."""
    causal_lm: nn.Module = AutoModelForCausalLM.from_pretrained(str(base), dtype=torch.float32)
    add_adapters(causal_lm, rank=rank, alpha=12.0, target_modules="all-linear", seed=0)
    return causal_lm


@functools.cache
def _model(folder: Path) -> Any:
    """The module that the trainer trains."""
    if not has_adapter(folder):
        return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    causal_lm = _adapted(_base_of(folder))
    read_adapter(causal_lm, folder)
    return causal_lm


@torch.no_grad()
def logprobs_of(
    folder: Path,
    prompt: Sequence[int],
    reply: Sequence[int],
    *,
    temperature: float = 1.0,
    among: Sequence[int] | None = None,
) -> list[float]:
    """log-softmax(logits / temperature) of the reply's tokens under one policy, over the tokens `among` alone if it is
    given."""
    logits_TV = _model(folder)(torch.tensor([[*prompt, *reply]])).logits[0]
    if among is not None:
        left = torch.zeros(logits_TV.shape[-1], dtype=torch.bool)
        left[list(among)] = True
        logits_TV = logits_TV.masked_fill(~left, -torch.inf)
    return _picked(logits_TV[len(prompt) - 1 : -1], reply, temperature)


def logprobs_by_version(
    folders: Mapping[int, Path], prompt: Sequence[int], reply: Sequence[int], versions: Sequence[int]
) -> list[float]:
    """Each token under the policy that sampled it, everything before it seen by that policy."""
    whole = {version: logprobs_of(folders[version], prompt, reply) for version in set(versions)}
    return [whole[version][index] for index, version in enumerate(versions)]


@torch.no_grad()
def logprobs_with_kept_cache(
    folders: Mapping[int, Path], prompt: Sequence[int], reply: Sequence[int], versions: Sequence[int]
) -> list[float]:
    """Each token under the policy that sampled it, which finds the keys and values of the policies before."""
    seen, cache, found, done = list(prompt), DynamicCache(), [], 0
    for version, tokens in itertools.groupby(range(len(reply)), key=lambda index: versions[index]):
        part = [reply[index] for index in tokens]
        fed = [*seen, *part[:-1]]  # the last one's keys and values are computed when the next is sampled
        logits_TV = _model(folders[version])(torch.tensor([fed[done:]]), past_key_values=cache).logits[0]
        found += _picked(logits_TV[-len(part) :], part, 1.0)
        done, seen = len(fed), [*seen, *part]
    return found


def _picked(logits_TV: torch.Tensor, tokens: Sequence[int], temperature: float) -> list[float]:
    log_p = (logits_TV / temperature).log_softmax(-1)
    return [float(log_p[index, token]) for index, token in enumerate(tokens)]
