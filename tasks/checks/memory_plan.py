"""What a run takes of the memory of each device, before anything starts, and which settings would make it fit.

In: a run's settings, the sizes in its model's `config.json`, and how much memory is free where. Out: bytes by device,
process and part; the engine's arguments where it shares a GPU; or a refusal that names changes that fit.

    trainer rank   weights, gradients and AdamW's two moments in float32: 16 bytes per parameter over all ranks
                   layers gathered in the compute type; what a pack's layers keep for the backward pass; its logits
    engine part    weights; keys and values: what is left of a shared GPU, at most what all requests can fill
    both           a fixed overhead for libraries, CUDA's context and graphs

Who takes turns on a GPU (`tasks.checks.gpu_share`) has it to itself but for the other's libraries, and waits in the
machine's memory.

What a layer keeps per token was counted by hooks on the saved tensors of Llama, Qwen2 and Qwen3 layers; without the
attention's own it is near to Korthikanti et al. 2022, equation 2 (https://arxiv.org/abs/2205.05198).
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
from pydantic import ValidationError

from infra.placement import GpuMemory, gpu_memory
from rollouts.engines.vllm.core_start import cache_bytes
from settings.errors import InvalidInput, size
from settings.run_file import RunConfig
from storage.policies.model_config import num_positions, number_bytes, token_bytes
from tasks.checks.gpu_share import share_of
from tasks.checks.learning_rate import num_parameters

ADAPTER_SHARE = 0.02
"""Of the parameters, roughly, are trained if only adapters are."""
MARGIN = 0.04
"""Share of a shared GPU that the plan leaves free: allocators lose some to fragments."""
MOST_CHANGES = 3
"""Changes that a refusal names."""
_FEWEST_TOKENS = 32768
"""The cache of an engine on a shared GPU holds so many, if there can be as many: with fewer it would crawl."""
_VLLM_SHARE = 0.92
"""What vLLM takes of a GPU if nothing is set (`gpu_memory_utilization`)."""
STATE = ("weights", "gradients and moments")
"""Parts of a rank that `train.offload_optimizer` moves."""
_MOST_SEQUENCES, _MOST_BATCHED = 256, 8192
"""vLLM's usual `max_num_seqs` and `max_num_batched_tokens`."""
_OVERHEAD = {
    "GPU": {"trainer": 0.8 * 2**30, "engine": 1.5 * 2**30, "run": 0.0},
    "CPU": {"trainer": 0.4 * 2**30, "engine": 1.0 * 2**30, "run": 0.9 * 2**30},
}
"""Libraries, contexts and graphs of one process, and of driver, Ray, Prefect and MLflow together. Those of CPUs were
measured with the tiny model, whose processes share most of their libraries; those of GPUs are estimates."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What a machine has, in bytes."""

    gpus: list[GpuMemory]
    machine: int

    @classmethod
    def of_this_machine(cls) -> Memory | None:
        """None for a run on another cluster, at `RAY_ADDRESS`: nobody has asked its machines."""
        if os.environ.get("RAY_ADDRESS"):
            return None
        return cls(gpus=gpu_memory(), machine=psutil.virtual_memory().total)


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
    """Of the keys and values of one token, in one part of an engine."""
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


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU, or this machine's memory, and the processes on it."""

    name: str
    is_gpu: bool
    total: int
    free: int
    demands: list[Demand]
    by_turns: bool = False
    """Engine and trainer take turns: what waits for its turn keeps its libraries alone."""

    @property
    def needed(self) -> int:
        """At most, at any time."""
        if not self.by_turns:
            return sum(demand.total for demand in self.demands)
        waiting = sum(demand.parts["libraries"] for demand in self.demands)
        return waiting + max(demand.total - demand.parts["libraries"] for demand in self.demands)


def memory_plan(
    config: RunConfig, about: Mapping[str, Any], here: Memory | None = None, *, trains: bool = True
) -> list[Device]:
    """The devices of a machine, by default this one, with what the run puts on each: engines first, then ranks.

    `about` is the model's `config.json`; without `trains` there are engines alone. Empty for a model that is not on
    this machine or whose sizes are not known, and for a run on another cluster, at `RAY_ADDRESS`.
    """
    parameters, here = num_parameters(config), here or Memory.of_this_machine()
    if parameters is None or here is None:
        return []
    return plan_for(config, about, parameters, here, trains=trains)


def plan_for(
    config: RunConfig, about: Mapping[str, Any], parameters: int, here: Memory, *, trains: bool = True
) -> list[Device]:
    """`memory_plan` of a model with so many parameters that need not be here."""
    sizes = _sizes(config, about, parameters)
    if sizes is None:
        return []
    num_engines = (config.rollout.num_workers + config.evaluation.own_engine) * config.engine.num_gpus
    num_ranks = config.train.num_ranks if trains else 0
    ranks_on_gpus = num_ranks if here.gpus and config.train.device != "cpu" else 0
    on_gpus = [*["engine"] * num_engines, *["trainer"] * ranks_on_gpus] if here.gpus else []
    each = math.ceil(len(on_gpus) / max(1, len(here.gpus)))
    by_turns = share_of(config, len(here.gpus), trains=trains) == "phases"
    devices = []
    for number, gpu in enumerate(here.gpus if each else []):
        if on_this := on_gpus[number * each : (number + 1) * each]:
            about_gpu = (f"GPU {gpu.name}", gpu.total, gpu.free)
            devices.append(_device(config, sizes, *about_gpu, on_this, is_gpu=True, by_turns=by_turns))
    if by_turns:  # what waits for its turn is in the machine's memory: as if it were offloaded
        config = config.model_copy(update={"train": config.train.model_copy(update={"offload_optimizer": True})})
    offloads = config.train.offload_optimizer or config.train.offload_activations
    ranks_offloaded = ranks_on_gpus if offloads else 0
    kinds = {"engine": 0 if here.gpus else num_engines, "trainer": num_ranks - ranks_on_gpus}
    in_memory = [kind for kind, count in {**kinds, "offloaded": ranks_offloaded}.items() for _ in range(count)]
    devices.append(_device(config, sizes, "this machine", here.machine, here.machine, in_memory, is_gpu=False))
    return devices


def check_memory(config: RunConfig, about: Mapping[str, Any], here: Memory | None = None) -> None:
    """Raise `InvalidInput` for a run that needs more of a device than is free, with both and with what would fit."""
    parameters, here = num_parameters(config), here or Memory.of_this_machine()
    if parameters is None or here is None:
        return

    def too_small(changed: RunConfig) -> Device | None:
        return next((d for d in plan_for(changed, about, parameters, here) if d.needed > d.free), None)

    def fit(changes: Mapping[str, Any]) -> bool:
        try:
            return not too_small(_with(config, changes))
        except ValidationError:  # no settings of such a run
            return False

    small = too_small(config)
    if small is None:
        return
    taken = f", {size(small.total - small.free)} of which others hold" if small.free < small.total else ""
    problem = (
        f"the run needs {size(small.needed)} of {small.name}, which has {size(small.total)}{taken}: "
        + " + ".join(
            f"{count} × {text}" if count > 1 else text for text, count in Counter(map(str, small.demands)).items()
        )
    )
    changes = _changes(config, on_gpu=small.is_gpu)
    fits = [next((_text(key, value) for value in values if fit({key: value})), "") for key, values in changes]
    if named := [text for text in fits if text][:MOST_CHANGES]:
        raise InvalidInput(f"{problem}; {'any of these' if len(named) > 1 else 'this'} fits: {', '.join(named)}")
    together: dict[str, Any] = {}
    for key, values in changes:
        together[key] = values[-1]
        if fit(together):
            texts = [_text(name, value) for name, value in together.items()]
            raise InvalidInput(f"{problem}; these together fit: {', '.join(texts)}")
    raise InvalidInput(f"{problem}; no setting makes it fit: take a smaller model, or a larger device")


def with_engine_share(
    config: RunConfig, about: Mapping[str, Any], here: Memory | None = None, *, trains: bool = True
) -> RunConfig:
    """The settings of engines that share a GPU, with a trainer or with other programs: vLLM is told how many bytes keys
    and values have, so that it does not measure what is left while a trainer starts beside it. As they are where each
    engine has a GPU of its own, or where the run file sets the share."""
    vllm, here = config.engine.vllm, here or Memory.of_this_machine()
    if here is None or not here.gpus or vllm.keys() & {"kv_cache_memory_bytes", "gpu_memory_utilization"}:
        return config
    plan = memory_plan(config, about, here, trains=trains)
    shared = [device for device in plan if device.is_gpu and not _is_alone(device)]
    engines = [(device, demand) for device in shared for demand in device.demands if demand.process == "engine"]
    if not engines:
        return config
    device, demand = min(engines, key=lambda pair: pair[1].parts["keys and values"])
    share = {"gpu_memory_utilization": round(demand.total / device.total, 3)}  # what must be free at its start
    share["kv_cache_memory_bytes"] = demand.parts["keys and values"]
    return config.model_copy(update={"engine": config.engine.model_copy(update={"vllm": {**vllm, **share}})})


def _is_alone(device: Device) -> bool:
    """True if one process may take what vLLM takes by default."""
    return len(device.demands) == 1 and device.free >= _VLLM_SHARE * device.total


def _device(
    config: RunConfig,
    sizes: Sizes,
    name: str,
    total: int,
    free: int,
    processes: Sequence[str],
    *,
    is_gpu: bool,
    by_turns: bool = False,
) -> Device:
    """A device with these processes; `by_turns` they have its memory one after another."""
    kind = "GPU" if is_gpu else "CPU"
    makers = {"engine": _engine, "trainer": _trainer, "offloaded": _offloaded}
    demands = [makers[process](config, sizes, kind) for process in processes]
    if overhead := int(_OVERHEAD[kind]["run"]):
        demands.append(Demand(process="driver, Ray and servers", parts={"libraries": overhead}))
    device = Device(name=name, is_gpu=is_gpu, total=total, free=free, demands=demands, by_turns=by_turns)
    engines = [demand for demand in demands if demand.process == "engine" and is_gpu]
    least, most = (tokens * sizes.token_bytes for tokens in _cached_tokens(config, sizes))
    share = config.engine.vllm.get("gpu_memory_utilization", _VLLM_SHARE if _is_alone(device) else None)
    left = (1 - MARGIN) * free - sum(
        demand.parts["libraries"] if by_turns and demand.process == "trainer" else demand.total for demand in demands
    )
    for engine in engines:
        room = min(most, left / len(engines)) if share is None else share * total - engine.total
        room = max(room, least if share is None else 0)
        engine.parts["keys and values"] = int(config.engine.vllm.get("kv_cache_memory_bytes") or room)
    return device


def _sizes(config: RunConfig, about: Mapping[str, Any], parameters: int) -> Sizes | None:
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


def _trainer(config: RunConfig, sizes: Sizes, kind: str) -> Demand:
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
        "earlier policy": width * trained / shards * (kind == "CPU" and config.max_staleness > 0),
        "libraries": _OVERHEAD[kind]["trainer"],
    }
    if train.offload_optimizer and kind == "GPU":
        parts |= dict.fromkeys(STATE, 0)
    if train.offload_activations and kind == "GPU":
        parts["activations"] = tokens * _kept_per_token(sizes, width)  # of the layer that is computed
    return Demand(process="trainer", parts={name: int(value) for name, value in parts.items()})


def _offloaded(config: RunConfig, sizes: Sizes, kind: str) -> Demand:
    """What a rank on a GPU keeps in the machine's memory."""
    names = [*STATE] * config.train.offload_optimizer + ["activations"] * config.train.offload_activations
    train = config.train.model_copy(update={"offload_optimizer": False, "offload_activations": False})
    parts = _trainer(config.model_copy(update={"train": train}), sizes, "GPU").parts
    return Demand(process="offloaded", parts={name: parts[name] for name in names})


def _engine(config: RunConfig, sizes: Sizes, kind: str) -> Demand:
    """One process of an engine; on a GPU its keys and values are filled in by the device."""
    vllm, parts = config.engine.vllm, config.engine.num_gpus
    width = sizes.engine_width
    sequences = int(vllm.get("max_num_seqs", _MOST_SEQUENCES))
    batched = int(vllm.get("max_num_batched_tokens", _MOST_BATCHED if kind == "GPU" else sizes.longest))
    held = {
        "weights": sizes.parameters * width / parts,
        "activations": batched * width * (4 * sizes.hidden + 3 * sizes.inner / parts)
        + 3 * 4 * min(sequences, _requests(config)) * sizes.vocabulary,
        "libraries": _OVERHEAD[kind]["engine"],
    }
    if kind == "CPU":
        given = float(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "0")) * 2**30 or sizes.cpu_cache
        held["keys and values"] = float(vllm.get("kv_cache_memory_bytes") or given) / parts
    return Demand(process="engine", parts={name: int(value) for name, value in held.items()})


def _kept_per_token(sizes: Sizes, width: int) -> float:
    """Bytes that one layer keeps of a token for the backward pass; at 16 bits its norms keep float32 copies too."""
    around = 8 if width == 2 else 6
    return width * (around * sizes.hidden + 4 * (sizes.query + sizes.key_value) + 4 * sizes.inner)


def _requests(config: RunConfig) -> int:
    return config.rollout.max_concurrent * config.n_samples


def _cached_tokens(config: RunConfig, sizes: Sizes) -> tuple[int, int]:
    """Tokens that an engine's cache must hold at least, and the most that its requests can fill."""
    sequences = int(config.engine.vllm.get("max_num_seqs", _MOST_SEQUENCES))
    most = min(sequences, _requests(config))
    return max(sizes.longest, min(_FEWEST_TOKENS, sizes.longest * most)), sizes.longest * most


def _changes(config: RunConfig, *, on_gpu: bool) -> list[tuple[str, list[Any]]]:
    """Settings that take less memory, the cheapest in time first, with the values to try."""
    train, longest = config.train, config.engine.max_model_len
    halves = [train.tokens_per_microbatch >> times for times in range(1, 8)]
    changes: list[tuple[str, list[Any]]] = [
        ("engine.vllm.gpu_memory_utilization", [None] * ("gpu_memory_utilization" in config.engine.vllm)),
        (
            "train.tokens_per_microbatch",
            [tokens for tokens in halves if tokens >= max(512, longest / train.sequence_parallel)],
        ),
        ("train.activation_checkpointing", [True] * (not train.activation_checkpointing)),
        ("engine.share", ["phases"] * (config.engine.share == "split" and config.max_staleness == 0)),
        ("train.offload_activations", [True] * (on_gpu and not train.offload_activations)),
        ("train.dtype", ["bfloat16"] * (train.computes_in == "float32")),
        ("engine.max_model_len", [longest // 2] * (longest > 1024)),
        ("train.offload_optimizer", [True] * (on_gpu and not train.offload_optimizer)),
        ("train.num_ranks", [1] * (not on_gpu and train.num_ranks > 1)),
        ("rollout.num_workers", [1] * (config.rollout.num_workers > 1)),
        ("train.lora", [{"rank": 16}] * (train.lora is None)),
    ]
    return [(key, values) for key, values in changes if values]


def _text(key: str, value: Any) -> str:
    return f"{key} left out" if value is None else f"{key} = {json.dumps(value)}"


def _with(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """The run's settings with others; None leaves a key out."""
    document = config.model_dump(mode="json")
    for key, value in changes.items():
        *tables, name = key.split(".")
        table = functools.reduce(lambda outer, inner: outer[inner], tables, document)
        table.pop(name, None) if value is None else table.update({name: value})
    return RunConfig.model_validate(document)
