"""What a run file leaves to the machine: the type that the trainer computes in, and how much it computes at a time.

In: a run's settings. Out: the settings with both, which the run records; which type, and why.

    a run that exists ─▶ what it recorded
    GPUs, or weights in float32 ─▶ float32
    CPUs, and weights in bfloat16 ─▶ has the processor such products? ─▶ are they faster? ─▶ bfloat16
    CPUs, and a pack whose activations take more than the model does ─▶ half of it, and half again

Whether products are faster is tried once per machine and shape, in a process of its own, and kept in the state folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from infra.environment import cache_folder
from infra.ray.client import nodes_to_use
from infra.ray.placement import gpus_of
from infra.user_code import own_command
from settings.errors import InvalidInput
from settings.places.state_folder import store_uri
from settings.run_file import RunConfig
from storage.log.runs import open_run, run_config
from storage.objects.digests import sha256_of_json
from storage.objects.opening import open_store
from storage.policies.model_config import stored_dtype
from tasks.checks.memory_demand import STATE
from tasks.checks.memory_plan import memory_plan

Dtype = Literal["float32", "bfloat16"]

PRODUCTS = ("amx_bf16", "avx512_bf16", "bf16")
"""What Linux calls a processor's products in bfloat16, on x86 and on ARM."""
FEWEST_TOKENS, SMALL_PACK, STATE_SHARE = 512, 2**30, 0.5
"""Tokens that a pack keeps in any case; bytes of activations, and their share of weights, gradients and moments, up to
which a pack is not divided. More of them at a time would save a few hundredths of the time."""
WORTH = 1.1
"""How many times as fast they have to be: rounding costs something too."""
_CPU = Path("/proc/cpuinfo")
_SECONDS = 120.0
"""Time limit of the trial, most of which is the import of torch."""


class Precision(NamedTuple):
    """The type that `auto` comes to here."""

    dtype: Dtype
    reason: str


def for_this_machine(config: RunConfig, about: Mapping[str, Any]) -> RunConfig:
    """The settings with `train.dtype` decided, if it is `auto`, and `train.tokens_per_microbatch`, if it is not set: as
    the run has recorded them, else for this machine. `about` is the model's `config.json`."""
    train, recorded = config.train, _recorded(config)
    if train.dtype == "auto":
        dtype = recorded["dtype"] if recorded else best_precision(config, about).dtype
        train = train.model_copy(update={"dtype": dtype})
    config = config.model_copy(update={"train": train})
    if "tokens_per_microbatch" not in train.model_fields_set:
        tokens = recorded.get("tokens_per_microbatch") or _tokens_at_a_time(config, about)
        config = _with_tokens(config, tokens)
    return config


def best_precision(config: RunConfig, about: Mapping[str, Any]) -> Precision:
    """What is best on this machine for a model with this `config.json`."""
    if stored_dtype(about) != "bfloat16":
        return Precision("float32", f"the model is stored in {stored_dtype(about) or 'a type that is not known yet'}")
    if os.environ.get("RAY_ADDRESS"):  # not asked: a session of this process may be on that cluster
        return Precision("float32", "the cluster's processors are not known here; bfloat16 is for you to choose")
    if config.train.device != "cpu" and gpus_of(nodes_to_use()):
        return Precision("float32", "on GPUs bfloat16 is for you to choose")
    name, has = processor()
    if not has:
        return Precision("float32", f"{name} has no products in bfloat16 ({', '.join(PRODUCTS[:2])})")
    seconds = trial_seconds(name, has, about)
    if not seconds:
        return Precision("float32", f"products in bfloat16 could not be tried on {name}")
    times = seconds["float32"] / seconds["bfloat16"]
    speed = f"{name} ({', '.join(has)}) multiplies {times:.1f} times as fast in bfloat16 as in float32"
    return Precision("bfloat16" if times >= WORTH else "float32", f"the model is stored in bfloat16, and {speed}")


def precision_text(config: RunConfig, about: Mapping[str, Any]) -> str:
    """Which type the trainer computes in, and why, for people."""
    best, chosen = best_precision(config, about), config.train.computes_in
    if chosen == best.dtype:
        return f"{chosen}: {best.reason}"
    return f"{chosen}, by train.dtype or the run's record; here {best.dtype} would be chosen: {best.reason}"


def processor() -> tuple[str, list[str]]:
    """Its name, and which of `PRODUCTS` it has; none if Linux does not say."""
    text = ""
    with contextlib.suppress(OSError):
        text = _CPU.read_text()
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in pairs}
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return fields.get("model name") or platform.machine(), [name for name in PRODUCTS if name in flags]


def trial_seconds(name: str, has: list[str], about: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a product of the model's shape by type, tried once; empty if the trial fails."""
    width = int(about.get("hidden_size") or 1024)
    inner = int(about.get("moe_intermediate_size") or about.get("intermediate_size") or 4 * width)
    machine = [name, has, os.environ.get("OMP_NUM_THREADS"), version("torch"), inner, width]
    file = cache_folder() / "precision" / f"{sha256_of_json(machine)[:16]}.json"
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(file.read_text()))
    command = [*own_command("trainers.model.distributed:time_products"), str(inner), str(width)]
    with contextlib.suppress(subprocess.SubprocessError, ValueError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
        seconds = dict(json.loads(done.stdout))
        with contextlib.suppress(OSError):  # then it is tried again
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(seconds))
        return seconds
    return {}


def _tokens_at_a_time(config: RunConfig, about: Mapping[str, Any]) -> int:
    """Tokens of a pack: the default, or a part of it on CPUs, where their activations would be most of the memory."""
    tokens, longest = config.train.tokens_per_microbatch, config.engine.max_model_len / config.train.sequence_parallel
    while tokens // 2 >= max(FEWEST_TOKENS, longest):
        devices = memory_plan(_with_tokens(config, tokens), about)
        ranks = [demand.parts for d in devices if not d.is_gpu for demand in d.demands if demand.process == "trainer"]
        if not ranks or ranks[0]["activations"] <= max(SMALL_PACK, STATE_SHARE * sum(ranks[0][name] for name in STATE)):
            break
        tokens //= 2
    return tokens


def _with_tokens(config: RunConfig, tokens: int) -> RunConfig:
    return config.model_copy(update={"train": config.train.model_copy(update={"tokens_per_microbatch": tokens})})


def _recorded(config: RunConfig) -> dict[str, Any]:
    """The table `train` of a run that exists; empty if there is none. The oldest runs recorded none of both."""
    with contextlib.suppress(InvalidInput):
        store = open_store(store_uri(config.store))
        if store.exists(f"runs/{config.run}/run.json"):
            return {"dtype": "float32", **run_config(open_run(store, config.run)).get("train", {})}
    return {}
