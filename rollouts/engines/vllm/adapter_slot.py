"""Adapters (LoRA) in vLLM: one slot that holds the policy, and proof that vLLM applies it.

In: an adapter folder in peft's format. Out: the adapter in the slot of every worker, every number compared with it.

On CPUs vLLM computes adapters several times as slowly as the model itself. There the worker merges each adapter with
the base model as it loads it (`ReloadExtension.merge_policy`): nothing here but `merges` is used. In float32 the
probabilities are the trainer's to 1e-4 nats; in bfloat16 the sum W + (alpha / rank) · B A is rounded, as all trained
weights are.

Every request names the slot. The slot is zero while the base model is the policy. So adapters change as whole weights
do: under running requests, with one version per token, and for all requests at once.

vLLM can serve the base model although an adapter was asked for, without an error. Two checks exclude that: after each
load the numbers in the slot are compared, and once at the start a slot full of numbers must change the engine's
logprobs. (A policy's own first adapter is too small to change a logprob visibly.)
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollouts.engines.engine import EngineError
from rollouts.engines.vllm.core_start import is_cpu_build
from rollouts.engines.vllm.requests import prompt_logprobs
from rollouts.engines.vllm.worker_extension import ReloadExtension, results, returning_errors
from settings.errors import InvalidInput
from storage.objects.digests import sha256_of_file, sha256_of_json
from storage.objects.tensor_digests import tensor_digests
from storage.policies.adapters import ADAPTER_WEIGHTS, adapter_layers
from storage.policies.model_config import model_config

EXTENSION = "rollouts.engines.vllm.adapter_slot.AdapterExtension"
_SLOT_ID = 1  # vLLM counts from 1; 0 is no adapter
_PROMPT = list(range(8))
_VISIBLE = 1e-3  # nats, far above rounding: the check at the start must change a logprob by more


def merges(arguments: Mapping[str, Any], base: Path) -> bool:
    """True if an engine with these arguments of vLLM serves the base model with its adapter merged into it: on CPUs,
    unless the user has set `enable_lora`, or the base's weights are quantised."""
    is_quantised = "quantization" in arguments or bool(model_config(base).get("quantization_config"))
    return is_cpu_build() and "enable_lora" not in arguments and not is_quantised


def adapter_arguments(rank: int) -> dict[str, Any]:
    """vLLM's arguments for one adapter of at most this rank. Raises `InvalidInput` for a rank it cannot serve."""
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks

    ranks = sorted(get_args(MaxLoRARanks))
    max_rank = next((each for each in ranks if each >= rank), None)
    if max_rank is None:
        raise InvalidInput(f"train.lora.rank = {rank}: vLLM serves adapters up to rank {ranks[-1]}")
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": max_rank, "worker_extension_cls": EXTENSION}


def slot_request() -> Any:
    """The argument with which a request to vLLM names the slot."""
    from vllm.lora.request import LoRARequest

    # The path does not exist: if the slot is empty, vLLM fails to load it instead of serving the base model.
    return LoRARequest(lora_name="policy", lora_int_id=_SLOT_ID, lora_path="the-slot-is-empty")


async def check_applied(llm: Any) -> None:
    """Raise `EngineError` unless a full slot changes the engine's logprobs and an empty one does not.

    Leaves the slot empty. For an engine that has no requests yet.
    """
    results(await llm.collective_rpc("load_adapter", args=("",)))
    base, empty = await _logprobs(llm, None), await _logprobs(llm, slot_request())
    await llm.collective_rpc("fill_adapter")
    full = await _logprobs(llm, slot_request())
    results(await llm.collective_rpc("load_adapter", args=("",)))
    if max(abs(one - other) for one, other in zip(base, empty, strict=True)) > _VISIBLE:
        raise EngineError("vLLM's answers change with an adapter of zeros: it cannot serve the base model with LoRA on")
    if max(abs(one - other) for one, other in zip(base, full, strict=True)) < _VISIBLE:
        raise EngineError("vLLM takes adapters and answers with the base model; train without train.lora")


async def _logprobs(llm: Any, adapter: Any) -> list[float]:
    """Logprobs of a few fixed tokens."""
    return await prompt_logprobs(llm, _PROMPT, f"adapter-check-{uuid.uuid4().hex[:8]}", lora_request=adapter)


class AdapterExtension(ReloadExtension):
    """Methods callable by `collective_rpc`; `self` is a vLLM worker."""

    @returning_errors
    def load_adapter(self, folder: str) -> tuple[str, str]:
        """Load an adapter folder into the slot, or zeros if `folder` is empty.

        Returns the sha256 of the weights file, and a digest of this worker's slot. Fails with `InvalidInput` if the
        slot differs from the file. If vLLM refuses the adapter, the slot does not change.
        """
        from vllm.lora.request import LoRARequest

        from rollouts.engines.vllm.repairs import rotate_by_heads

        rotate_by_heads(self.model_runner.get_model())
        manager = self.model_runner.lora_manager
        if not folder:
            manager.remove_adapter(_SLOT_ID)
            manager.add_dummy_lora(LoRARequest("policy", _SLOT_ID, "zeros"), rank=1)
            manager._adapter_manager.activate_adapter(_SLOT_ID)
            return "", self._compare_slot({}, scale=1.0)
        path = Path(folder)
        manager.add_adapter(LoRARequest("policy", _SLOT_ID, folder, load_inplace=True))
        config = json.loads((path / "adapter_config.json").read_text())
        layers = adapter_layers(path / ADAPTER_WEIGHTS)
        slot_digest = self._compare_slot(layers, scale=config["lora_alpha"] / config["r"])
        return sha256_of_file(path / ADAPTER_WEIGHTS), slot_digest

    def fill_adapter(self) -> None:
        """Fill the slot with a constant, to see whether vLLM applies it."""
        for _, module in self._adapted():
            for stacked in (*module.lora_a_stacked, *module.lora_b_stacked):
                stacked[0].fill_(0.05)

    def _adapted(self) -> list[tuple[str, Any]]:
        modules = self.model_runner.lora_manager._adapter_manager.modules
        return [(name, module) for name, module in sorted(modules.items()) if hasattr(module, "n_slices")]

    def _compare_slot(self, weights: dict[str, tuple[Any, Any]], *, scale: float) -> str:
        """Digest of the slot. Compares it with `weights`: layer → (A, B). A layer without weights must be zero."""
        packed = self.model_runner.lora_manager._adapter_manager.packed_modules
        slot: list[tuple[str, Any]] = []
        left = dict(weights)
        for name, module in self._adapted():
            parts = [left.pop(part, (None, None)) for part in packed.get(name, [name])]
            expected_a, expected_b = [a for a, _ in parts], [b for _, b in parts]
            if len(parts) < len(module.lora_a_stacked):  # one matrix in the file, several in the layer: Mamba's input
                expected_a, expected_b = module.expand_packed_lora(expected_a, expected_b)
            if module.tp_size > 1:
                one = len(expected_a) == 1
                expected_a = _listed(module.slice_lora_a(expected_a[0] if one else expected_a))
                expected_b = _listed(module.slice_lora_b(expected_b[0] if one else expected_b))
            pairs = zip(module.lora_a_stacked, module.lora_b_stacked, expected_a, expected_b, strict=True)
            for held_a, held_b, a, b in pairs:
                if not (_holds(held_a[0, 0], a, 1.0) and _holds(held_b[0, 0], b, scale)):
                    raise InvalidInput(f"the adapter in the engine's layer {name} is not the one in the file")
                slot += [(f"{name} A {len(slot)}", held_a[0, 0]), (f"{name} B {len(slot)}", held_b[0, 0])]
        if left:
            raise InvalidInput(f"the engine cannot adapt {min(left)}; take it out of train.lora.target_modules")
        return sha256_of_json(tensor_digests(slot))


def _holds(held: Any, matrix: Any, scale: float) -> bool:
    """True if `held` is the matrix, scaled as vLLM scales it, in its upper left corner, and zero elsewhere."""
    if matrix is None:
        return not held.any()
    rows, columns = matrix.shape
    expected = matrix.to(device=held.device, dtype=held.dtype)
    expected = expected if scale == 1.0 else expected * scale
    return bool(held[:rows, :columns].equal(expected) and not held[rows:].any() and not held[:, columns:].any())


def _listed(matrices: Any) -> list[Any]:
    return list(matrices) if isinstance(matrices, list | tuple) else [matrices]
