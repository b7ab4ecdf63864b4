"""What a run takes of the memory of each device, before anything starts, and which settings would make it fit.

In: a run's settings, the sizes in its model's `config.json`, and how much memory is free where. Out: bytes by device,
process and part, as `memory_demand` has them; the engine's arguments where it shares a GPU; or a refusal that names
changes that fit.

Who takes turns on a GPU (`tasks.checks.gpu_share`) has it to itself but for the other's libraries, and waits in the
machine's memory.
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

from infra.devices import GpuMemory, gpu_memory
from rollouts.production.engine_choice import num_sequences
from settings.errors import InvalidInput, size
from settings.run_file import RunConfig
from tasks.checks.gpu_share import share_of
from tasks.checks.learning_rate import num_parameters
from tasks.checks.memory_demand import (
    OVERHEAD,
    Demand,
    Sizes,
    engine_part,
    offloaded_of_rank,
    sizes_of,
    trainer_rank,
)

MARGIN = 0.04
"""Share of a shared GPU that the plan leaves free: allocators lose some to fragments."""
MOST_CHANGES = 3
"""Changes that a refusal names."""
_FEWEST_TOKENS = 32768
"""The cache of an engine on a shared GPU holds so many, if there can be as many: with fewer it would crawl."""
_VLLM_SHARE = 0.92
"""What vLLM takes of a GPU if nothing is set (`gpu_memory_utilization`)."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What a machine has, in bytes."""

    gpus: list[GpuMemory]
    machine: int

    @classmethod
    def of_this_machine(cls) -> Memory | None:
        """None for a run on another cluster, at `RAY_ADDRESS`: its machines were not asked."""
        if os.environ.get("RAY_ADDRESS"):
            return None
        return cls(gpus=gpu_memory(), machine=psutil.virtual_memory().total)


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
    sizes = sizes_of(config, about, parameters)
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


TOLERANCE = 0.1
"""By how much more than planned a step may have taken before it is said."""
_MEASURED = {
    "peak_memory_bytes": "memory of all processes",
    "trainer_gpu_bytes": "GPU memory of the trainer",
    "gpu_bytes": "memory of the trainer's GPU in all processes",
}


def planned(devices: Sequence[Device]) -> dict[str, float]:
    """What a step should find, in bytes, by the names of its metrics: of the trainer's first GPU while it trains, or of
    all processes if there are no GPUs. Empty without a plan."""
    if devices and not devices[0].is_gpu:
        return {"peak_memory_bytes": float(devices[0].needed)}
    for device in devices[:-1]:
        for trainer in (demand for demand in device.demands if demand.process == "trainer"):
            others = [demand for demand in device.demands if demand is not trainer]
            beside = sum(other.parts["libraries"] if device.by_turns else other.total for other in others)
            held = trainer.total - trainer.parts["libraries"]
            return {"trainer_gpu_bytes": float(held), "gpu_bytes": float(trainer.total + beside)}
    return {}


def above_plan(metrics: Mapping[str, float]) -> dict[str, str]:
    """By name, what a step has taken more of than was planned, with both numbers."""
    return {
        name: f"{what}: {size(metrics[name])}, planned {size(plan)}"
        for name, what in _MEASURED.items()
        if (plan := metrics.get(f"planned_{name}")) and metrics.get(name, 0) > (1 + TOLERANCE) * plan
    }


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
    held = f", {size(small.total - small.free)} of which others hold" if small.free < small.total else ""
    problem = f"the run needs {size(small.needed)} of {small.name}, which has {size(small.total)}{held}: " + " + ".join(
        f"{count} × {text}" if count > 1 else text for text, count in Counter(map(str, small.demands)).items()
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
    engine has a GPU of its own, or if the run file sets the share."""
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
    makers = {"engine": engine_part, "trainer": trainer_rank, "offloaded": offloaded_of_rank}
    demands = [makers[process](config, sizes, kind) for process in processes]
    if overhead := int(OVERHEAD[kind]["run"]):
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


def _cached_tokens(config: RunConfig, sizes: Sizes) -> tuple[int, int]:
    """Tokens that an engine's cache must hold at least, and the most that its requests can fill."""
    most = num_sequences(config)
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
