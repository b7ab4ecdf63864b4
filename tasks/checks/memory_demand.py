"""What one process takes of the memory of its device: a rank of the trainer, or a part of an engine.

In: a run's settings, and the sizes in its model's `config.json`. Out: bytes by part; `memory_plan` adds them up.

    trainer rank   weights, gradients and AdamW's two moments in float32: 16 bytes per parameter over all ranks
                   layers gathered in the compute type; what a pack's layers keep for the backward pass; its logits
    engine part    weights; keys and values: what is left of a shared GPU, at most what all requests can fill
    both           a fixed overhead for libraries, CUDA's context and graphs

What a layer keeps per token was counted by hooks on the saved tensors of Llama, Qwen2 and Qwen3 layers; without the
attention's own it is near to Korthikanti et al. 2022, equation 2 (https://arxiv.org/abs/2205.05198).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollouts.engines.vllm.core_start import cache_bytes
from rollouts.production.engine_choice import BATCHED_TOKENS, num_sequences
from settings.errors import size
from settings.run_file import RunConfig
from storage.policies.model_config import num_positions, number_bytes, token_bytes

ADAPTER_SHARE = 0.02
"""The rough share of parameters that are trained if only adapters are."""
FREE_BLOCKS = 0.25
"""What a trainer on CPUs holds of freed blocks that fit nothing, by what comes and goes in a step: SmolLM2-135M had 0.2
to 0.45 GiB of them beside 1.3. Plans of GPUs leave a margin instead."""
STATE = ("weights", "gradients and moments")
"""Parts of a rank that `train.offload_optimizer` moves."""
OVERHEAD = {
    "GPU": {"trainer": 0.8 * 2**30, "engine": 1.5 * 2**30, "run": 0.0},
    "CPU": {"trainer": 0.4 * 2**30, "engine": 0.75 * 2**30, "run": 0.9 * 2**30},
}
"""Libraries, contexts and graphs of one process, and of driver, Ray, Prefect and MLflow together. Those of CPUs were
measured with the tiny model, whose processes share most of their libraries; those of GPUs are estimates."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A model's sizes, in units of one number."""

    parameters: int
    layers: int
    hidden: int
    inner: int
    """Width of the MLP, or of all experts that work on one token."""
    query: int
    key_value: int
    """Width of all heads' queries, and of all heads' keys."""
    vocabulary: int
    longest: int
    """Longest sequence that the engine takes, in tokens."""
    is_tied: bool
    engine_width: int
    """Bytes of a weight in the engine."""
    token_bytes: float
    """Bytes of the keys and values of one token, in one part of an engine."""
    cpu_cache: int
    """Bytes that an engine on CPUs has for keys and values."""

    @property
    def outside_layers(self) -> int:
        """Numbers in the embedding and the output matrix."""
        return self.vocabulary * self.hidden * (1 if self.is_tied else 2)


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What one process takes of its device, in bytes."""

    process: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        largest = sorted(self.parts.items(), key=lambda part: -part[1])[:3]
        return f"{self.process} {size(self.total)} ({', '.join(f'{name} {size(held)}' for name, held in largest)})"


def sizes_of(config: RunConfig, about: Mapping[str, Any], parameters: int) -> Sizes | None:
    """What a `config.json` does not say is as in a GPT: as many keys as queries, an MLP of four widths. None if it does
    not say how wide and how deep the model is."""
    hidden, layers = about.get("hidden_size"), about.get("num_hidden_layers")
    if not hidden or not layers:
        return None
    longest = min(config.engine.max_model_len, num_positions(about) or config.engine.max_model_len)
    arguments = {**config.engine.vllm, "max_model_len": longest}
    heads = int(about.get("num_attention_heads") or 1)
    head = int(about.get("head_dim") or hidden // heads)
    inner = int(about.get("moe_intermediate_size") or about.get("intermediate_size") or 4 * hidden)
    return Sizes(
        parameters=parameters,
        layers=layers,
        hidden=hidden,
        inner=inner * int(about.get("num_experts_per_tok") or 1),
        query=heads * head,
        key_value=int(about.get("num_key_value_heads") or heads) * head,
        vocabulary=int(about.get("vocab_size") or 0),
        longest=longest,
        is_tied=bool(about.get("tie_word_embeddings", True)),
        engine_width=number_bytes(arguments, about),
        token_bytes=token_bytes(arguments, about) / config.engine.num_gpus,
        cpu_cache=cache_bytes(arguments, dict(about)),
    )


def trainer_rank(config: RunConfig, sizes: Sizes, kind: str) -> Demand:
    """One rank. A critic is a second model; a reference and a moving average are more weights."""
    train = config.train
    copies = 1 + (train.reference.kind in ("base", "model")) + (train.ema is not None)
    trained = (ADAPTER_SHARE if train.lora is not None else 1) * sizes.parameters
    models = 2 if train.advantage.kind == "gae" else 1
    width = 2 if train.computes_in == "bfloat16" else 4
    shards = train.num_ranks / train.num_replicas
    weights = 4 * sizes.parameters * (copies + models - 1) / shards
    moments = 12 * (trained + (models - 1) * sizes.parameters) / shards
    in_layer = max(0, sizes.parameters - sizes.outside_layers) / sizes.layers
    attempts = config.batch_size * config.n_samples / train.num_minibatches
    tokens = min(train.tokens_per_microbatch, attempts * sizes.longest / train.sequence_parallel)
    kept = sizes.layers * _kept_per_token(sizes, width)
    if train.activation_checkpointing:
        kept = sizes.layers * sizes.hidden * width + _kept_per_token(sizes, width)
    parts = {
        "weights": weights,
        "gradients and moments": moments,
        "gathered layers": width * (2 * in_layer + sizes.outside_layers),
        "activations": tokens * kept,
        "logits": min(train.logits_gib * 2**30, tokens * (sizes.vocabulary or math.inf) * 3 * 4),
        "libraries": OVERHEAD[kind]["trainer"],
    }
    if kind == "CPU":
        come_and_go = parts["activations"] + parts["logits"]
        parts["free blocks"] = FREE_BLOCKS * come_and_go
        if config.max_staleness > 0:  # it is there when those are not
            parts["earlier policy"] = max(0, width * trained / shards - come_and_go)
    if train.offload_optimizer and kind == "GPU":
        parts |= dict.fromkeys(STATE, 0)
    if train.offload_activations and kind == "GPU":
        parts["activations"] = tokens * _kept_per_token(sizes, width)  # of the layer that is computed
    return Demand(process="trainer", parts={name: int(value) for name, value in parts.items()})


def offloaded_of_rank(config: RunConfig, sizes: Sizes, kind: str) -> Demand:
    """What a rank on a GPU keeps in the machine's memory."""
    names = [*STATE] * config.train.offload_optimizer + ["activations"] * config.train.offload_activations
    train = config.train.model_copy(update={"offload_optimizer": False, "offload_activations": False})
    parts = trainer_rank(config.model_copy(update={"train": train}), sizes, "GPU").parts
    return Demand(process="offloaded", parts={name: parts[name] for name in names})


def engine_part(config: RunConfig, sizes: Sizes, kind: str) -> Demand:
    """One process of an engine; on a GPU its keys and values are filled in by the device."""
    vllm, parts = config.engine.vllm, config.engine.num_gpus
    width = sizes.engine_width
    batched = int(vllm.get("max_num_batched_tokens", BATCHED_TOKENS if kind == "GPU" else sizes.longest))
    held = {
        "weights": sizes.parameters * width / parts,
        "activations": batched * width * (4 * sizes.hidden + 3 * sizes.inner / parts)
        # Logits three times over, and vLLM's counts of the tokens that each sequence has had.
        + (3 + (kind == "GPU")) * 4 * num_sequences(config) * sizes.vocabulary,
        "libraries": OVERHEAD[kind]["engine"],
    }
    if kind == "CPU":
        given = float(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "0")) * 2**30 or sizes.cpu_cache
        held["keys and values"] = float(vllm.get("kv_cache_memory_bytes") or given) / parts
    return Demand(process="engine", parts={name: int(value) for name, value in held.items()})


def _kept_per_token(sizes: Sizes, width: int) -> float:
    """Bytes that one layer keeps of a token for the backward pass; at 16 bits its norms keep float32 copies too."""
    around = 8 if width == 2 else 6
    return width * (around * sizes.hidden + 4 * (sizes.query + sizes.key_value) + 4 * sizes.inner)
