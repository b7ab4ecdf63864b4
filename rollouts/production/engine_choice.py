"""The engine a run file asks for.

In: the settings of the run. Out: an `Engine`, not started yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollouts.chat.chat_tokens import ChatTokens
from rollouts.engines.engine import Engine
from rollouts.engines.vllm.core_start import is_cpu_build
from settings.errors import InvalidInput
from settings.run_file import RunConfig
from storage.policies.model_config import model_config, num_positions, stored_dtype

_CPU_BLOCK = 32
"""On CPUs, a block of the cache has a multiple of this many tokens; with latent attention 16, whatever is set."""
QUANTISED_ON_CPUS = "fp8_per_channel"
"""What vLLM's CPU build makes of weights that are not quantised, at each load."""
_KERNEL = "vLLM says 'Failed to find a kernel that can implement' it"
_NOT_ON_CPUS = {
    **dict.fromkeys(["fp8", "fp8_per_tensor"], "vLLM's own static_scaled_fp8_quant is not in its build for CPUs"),
    **dict.fromkeys(["fp8_per_block", "mxfp8"], _KERNEL),
    **dict.fromkeys(["int8_per_channel_weight_only", "experts_int8"], "it quantises no layer but experts"),
}
MOST_SEQUENCES, BATCHED_TOKENS = 512, 8192
"""What an engine on a GPU computes at a time, of sequences at most and of tokens, where vLLM would take 128 and 2,048:
of an engine that is not behind its own server or in a script it knows nothing. It captures graphs for up to 512."""
ADAPTERS_OF_16_BITS = "vLLM's kernels for adapters on GPUs take weights of 16 bits alone"
_GAINS_BELOW, _PAYS_FROM = 100 * 10**6, 10**6
"""Bytes of weights, and tokens: one of 10 MB gained 4 ms per reply of 60 tokens, for 16 to 50 s of compiling; one of
270 MB gained nothing, for 60 s."""


def fitted_to_model(config: RunConfig, model: Path) -> RunConfig:
    """The run's settings with `engine.max_model_len` at most the model's positions, and for a model in float32 with
    `engine.vllm.dtype` "float32" if it is not set: vLLM would round its weights, and each reload again otherwise; but
    "bfloat16" for adapters on GPUs (`ADAPTERS_OF_16_BITS`). Nor if they are not set: on GPUs how much is computed at a
    time, as the memory plan has it; on CPUs `engine.vllm.enforce_eager`, unless compiling `pays_back`, and for a larger
    model the smallest `engine.vllm.block_size`: attempts share whole blocks of their prompt, of vLLM's 128 tokens none
    of a short one."""
    about = model_config(model)
    longest = min(config.engine.max_model_len, num_positions(about) or config.engine.max_model_len)
    own: dict[str, Any] = {}
    if stored_dtype(about) == "float32":
        own["dtype"] = "float32" if config.train.lora is None or is_cpu_build() else "bfloat16"
    if not is_cpu_build():
        sequences, tokens = num_sequences(config), config.engine.vllm.get("max_num_batched_tokens") or BATCHED_TOKENS
        own |= {"max_num_seqs": min(sequences, tokens), "max_num_batched_tokens": max(sequences, tokens)}
    else:
        weights_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        if not pays_back(config, weights_bytes):
            own["enforce_eager"] = True
        if weights_bytes >= _GAINS_BELOW and not config.reproducible:  # whose bits stay what they were
            own["block_size"] = _CPU_BLOCK
    engine = config.engine.model_copy(update={"max_model_len": longest, "vllm": {**own, **config.engine.vllm}})
    return config.model_copy(update={"engine": engine})


def num_sequences(config: RunConfig) -> int:
    """How many sequences an engine on a GPU computes at a time."""
    rollout, evaluation = config.rollout, config.evaluation
    at_once = max(rollout.max_concurrent * config.n_samples, evaluation.max_concurrent * evaluation.n_samples)
    return min(int(config.engine.vllm.get("max_num_seqs") or MOST_SEQUENCES), at_once)


def pays_back(config: RunConfig, weights_bytes: int) -> bool:
    """True if an engine on CPUs gains more in this run by compiling the model than the compiler takes: a small model
    gains some of the time around its products, a larger one nothing, in as many tokens as the run may sample."""
    most_tokens = config.steps * config.batch_size * config.n_samples * config.sampling.max_tokens
    return weights_bytes < _GAINS_BELOW and most_tokens >= _PAYS_FROM


def check_cpu_engine(arguments: Mapping[str, Any]) -> None:
    """Raise `InvalidInput` for arguments that vLLM's CPU build takes and does not carry out, each tried with 0.32."""
    if not is_cpu_build():
        return
    if (block_size := arguments.get("block_size")) and block_size % _CPU_BLOCK:
        raise InvalidInput(
            f"engine.vllm.block_size = {block_size}, on CPUs: vLLM's attention takes multiples of {_CPU_BLOCK}; use "
            "one, or leave it out"
        )
    kind = arguments.get("quantization")
    if kind is not None and kind != QUANTISED_ON_CPUS:
        reason = _NOT_ON_CPUS.get(kind, "it reads weights that are quantised already, and policies are not")
        raise InvalidInput(
            f"engine.vllm.quantization = {kind!r}, on CPUs: {reason}; use {QUANTISED_ON_CPUS!r}, or leave it out"
        )
    if arguments.get("speculative_config"):
        raise InvalidInput(
            "engine.vllm.speculative_config, on CPUs: the log-probabilities that vLLM reports of sampled tokens are "
            "not the policy's, with n-grams 0.05 nats per token off in float32, and some NaN; leave it out"
        )


def make_engine(config: RunConfig, model: Path) -> Engine:
    """The engine a run file asks for; with `train.lora` it serves adapters of `model`."""
    settings, lora = config.engine, config.train.lora
    match settings.kind:
        case "vllm":
            from rollouts.engines.vllm.vllm_engine import VllmEngine

            return VllmEngine(
                settings,
                seed=config.seed,
                lora_rank=0 if lora is None else lora.rank,
                base_folder=None if lora is None else model,
                ends_process=True,
                reproducible=config.reproducible,
                captures_routes=config.train.router_replay,
            )
        case "scripted":
            from rollouts.engines.scripted_engine import ScriptedEngine, random_reply

            tokens = ChatTokens.load(model)
            alphabet = tokens.alphabet()
            reply = random_reply(alphabet=alphabet, end_id=tokens.end_id, longest=3)
            return ScriptedEngine(reply, num_choices=len(alphabet))
