"""Millrace's extension of vLLM's workers: a weight reload that also renews what was derived from the weights, and draws
that belong to their token.

In: a policy folder, or a broadcast of its weights. Out: new weights in every worker. vLLM mixes this class into its
worker (`worker_extension_cls`). An engine of several parts has a worker per part: all of them answer, and each takes
its part of the weights.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from infra.environment import give_back_beside_large
from infra.weight_broadcast import Broadcast, receive
from rollouts.engines.draws import DRAW, nth_seeds
from rollouts.engines.engine import EngineError
from rollouts.engines.vllm.fixed_order import LayerWatch, fix_order
from rollouts.engines.vllm.requests import Draws
from settings.errors import InvalidInput
from storage.objects.digests import sha256_of_file
from storage.objects.tensor_digests import tensor_digests
from storage.policies.adapters import ADAPTER_WEIGHTS, merged_weights

logger = logging.getLogger("millrace.engine")


def returning_errors(method: Callable[..., Any]) -> Callable[..., tuple[Any, str]]:
    """Make a worker's method return its result and an error message instead of raising. See `results`.

    Once a worker has raised, vLLM 0.32 reads no further replies. Those of the other workers stay in their queues and
    would be read as replies to the next call.
    """

    @functools.wraps(method)
    def call(self: Any, *arguments: Any) -> tuple[Any, str]:
        try:
            return method(self, *arguments), ""
        except Exception as error:
            logger.exception("%s: %s", method.__name__, error)  # with the traceback, which the reply lacks
            return None, f"{type(error).__name__}: {error}"

    return call


def results(replies: list[tuple[Any, str]]) -> list[Any]:
    """What a `returning_errors` method returned in each worker. Raises `EngineError` if one of them failed."""
    for number, (_, error) in enumerate(replies):
        if error:
            raise EngineError(f"worker {number} of {len(replies)}: {error}")
    return [result for result, _ in replies]


class ReloadExtension:
    """Methods callable by `collective_rpc`; `self` is a vLLM worker."""

    vllm_config: Any
    model_runner: Any
    device: Any
    rank: int
    """Rank among the workers of the engine."""

    def own_draws(self) -> Draws:
        """Let every token of a request with `DRAW` be drawn by its place, if vLLM does not do so itself.

        vLLM 0.32 samples on CPUs by `fused_gumbel_argmax` with one seed a row, each from the next number of one global
        stream. A request's own `seed` ends the engine as soon as a prompt is computed in parts.
        """
        if getattr(self, "use_v2_model_runner", False):
            return "hashed"
        sampler = self.model_runner.sampler.topk_topp_sampler
        if sampler.forward != getattr(sampler, "forward_cpu", None):
            return "streamed"
        import torch
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        def forward(logits: Any, generators: Any, k: Any, p: Any) -> Any:
            """`TopKTopPSampler.forward_cpu` with other seeds."""
            logits = apply_top_k_top_p(logits, k, p)
            returned = {
                "processed_logits": lambda: logits,
                "processed_logprobs": lambda: logits.log_softmax(dim=-1, dtype=torch.float32),
            }.get(sampler.logprobs_mode, lambda: None)()
            seeds = torch.randint(0, 2**31, (logits.shape[0],), dtype=torch.long)
            rows, token_seeds = self._token_seeds()
            seeds[rows] = torch.from_numpy(token_seeds)
            return torch.ops._C.fused_gumbel_argmax(logits.to(torch.float32), seeds), returned

        sampler.forward = forward
        return "ours"

    def _token_seeds(self) -> tuple[list[int], np.ndarray]:
        """The rows of the batch whose request has a draw, and the seed of the token that each samples now."""
        runner, batch = self.model_runner, self.model_runner.input_batch
        extras = [runner.requests[request_id].sampling_params.extra_args for request_id in batch.req_ids]
        rows = [row for row, extra in enumerate(extras) if extra and DRAW in extra]
        draws_R = np.fromiter(itertools.chain.from_iterable(extras[row][DRAW] for row in rows), np.int64).reshape(-1, 2)
        # Counted by what is computed in this step: also right after a preemption, and when outputs come a step later.
        tokens_R = runner.optimistic_seq_lens_cpu.numpy()[rows] - batch.num_prompt_tokens[rows]
        return rows, nth_seeds(draws_R[:, 0], draws_R[:, 1] + tokens_R)

    @returning_errors
    def fix_order(self) -> None:
        """Let log-probabilities not depend on the batch; on GPUs vLLM's batch-invariant mode has done so already."""
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            fix_order(self.model_runner)

    @returning_errors
    def capture_routes(self) -> None:
        """Let replies have the routes of their tokens; vLLM's newer model runner does so itself."""
        if not getattr(self, "use_v2_model_runner", False):
            from rollouts.engines.vllm.routes import capture_routes

            capture_routes(self)

    @returning_errors
    def layers_of(self, request_id: str) -> list[tuple[int, str, str]]:
        """What `LayerWatch` has noted for a request. The first call begins to watch, which is slow and does not end."""
        if not hasattr(self, "_watch"):
            self._watch = LayerWatch(self.model_runner)
        return self._watch.of_request(request_id)

    @returning_errors
    def weight_digests(self) -> dict[str, str]:
        """Digest of every weight that this worker computes with, made where it lies: vLLM's own checksums copy each to
        the host and hash it on one thread, while generation is paused."""
        from vllm.model_executor.model_loader.weight_checksum import _weights

        return tensor_digests(_weights(self.model_runner.get_model()))

    @returning_errors
    def buffer_digests(self) -> dict[str, str]:
        """The same of what the model computes with beside its weights, as angles of positions: no load renews it."""
        return tensor_digests(self.model_runner.get_model().named_buffers())

    @returning_errors
    def reload_policy(self, folder: str) -> None:
        """Load a policy folder in HF layout. The first call gets the folder that the engine was started with."""
        self._reload(folder, weights_path=folder)

    @returning_errors
    def merge_policy(self, base: str, adapter: str) -> str:
        """Load the base model with an adapter merged into it; returns the sha256 of the adapter's weights file."""
        self._reload(adapter, weights_iterator=merged_weights(Path(base), Path(adapter)))
        return sha256_of_file(Path(adapter) / ADAPTER_WEIGHTS)

    @returning_errors
    def receive_policy(self, broadcast: dict[str, Any]) -> None:
        """Take part in a `Broadcast`, given as its fields. The first load must not be a broadcast.

        Fails with `storage.objects.digests.DigestMismatch` if the weights are not those in the log.
        """
        policy = Broadcast(**broadcast)
        weights = receive(policy, rank=policy.first_rank + self.rank, device=self.device)
        self._reload(f"the broadcast of policy {policy.version}", weights_iterator=weights)

    def _reload(self, what: str, **source: Any) -> None:
        """Run vLLM's in-place reload, then renew output matrices that share their weight with the embeddings.

        Raises `InvalidInput` if a layer got fewer elements than at the first load, or experts none. vLLM 0.32 only
        warns of a missing tensor, and says nothing if the tensor is a part of a fused one: the layer would compute with
        uninitialised memory.

        On the CPU vLLM multiplies with a packed copy of an output matrix. It packs the tensors of the checkpoint anew,
        but a tied `lm_head` is not among them, so its old copy would stay in use. Experts are packed only where their
        kernel is made: so it is made again.
        """
        from vllm.config import set_current_vllm_config
        from vllm.platforms import current_platform

        from rollouts.engines.vllm.repairs import CopiesAreLoads, rotate_by_heads, round_biases

        model = self.model_runner.get_model()
        rotate_by_heads(model)
        methods: dict[str, Any] = {
            name: getattr(module, "quant_method", None) for name, module in model.named_modules()
        }
        experts = [name for name, method in methods.items() if getattr(method, "moe_kernel", None) is not None]
        for name in experts if current_platform.is_cpu() else ():
            methods[name].moe_kernel = None
        load_weights, incomplete, num_bytes = model.load_weights, {}, 0

        def count(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
            nonlocal num_bytes
            for name, tensor in weights:
                num_bytes += tensor.nbytes
                yield name, tensor

        def load_and_check(weights: Iterable[tuple[str, Any]]) -> Any:
            nonlocal incomplete
            loaded = load_weights(count(weights))
            incomplete = self._incomplete_layers(model)
            if unchanged := [name for name in experts if incomplete.get(name, "").startswith("0 of")]:
                raise InvalidInput(
                    f"vLLM does not take new weights into {unchanged[0]} of {type(model).__name__}; train adapters "
                    "(train.lora) of a model with these experts"
                )
            return loaded

        model.load_weights = load_and_check
        try:
            # Kernels of experts and of latent attention ask for the configuration, which vLLM's worker sets around it.
            with set_current_vllm_config(self.vllm_config), CopiesAreLoads(model):
                self.model_runner.reload_weights(**source)
        except BaseException:
            with set_current_vllm_config(self.vllm_config):
                self._end_reload(model)
            raise
        finally:
            del model.load_weights  # back to the method of its class
        padded = self.__dict__.setdefault("_padded_layers", incomplete)
        wrong = [f"{name} {incomplete[name]}" for name in incomplete if incomplete[name] != padded.get(name)]
        if wrong:
            raise InvalidInput(f"{what} lacks tensors; elements loaded of elements needed: {', '.join(wrong[:3])}")
        round_biases(model)
        if current_platform.is_cpu():
            for module in model.modules():
                if type(module).__name__ == "ParallelLMHead":
                    module.quant_method.process_weights_after_loading(module)
        give_back_beside_large(num_bytes)  # at the first load what the start took for a moment, more than the model

    def _incomplete_layers(self, model: Any) -> dict[str, str]:
        """Layers that lack elements after a load: padded ones, and those whose tensors are missing."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        layers = {name: get_layerwise_info(layer) for name, layer in model.named_modules()}
        return {
            name: f"{info.load_numel} of {info.load_numel_total}" for name, info in layers.items() if info.can_load()
        }

    def _end_reload(self, model: Any) -> None:
        """End an interrupted reload. Its layers may hold anything.

        Otherwise vLLM 0.32 would continue it with the next reload: a half-loaded layer would count that half twice and
        be finished before its last tensor arrives.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for layer in model.modules():
            half_loaded = get_layerwise_info(layer)
            half_loaded.loaded_weights.clear()
            half_loaded.load_numel = 0
        finalize_layerwise_reload(model, self.model_runner.model_config)
