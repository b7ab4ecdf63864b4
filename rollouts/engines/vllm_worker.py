"""What Millrace adds to vLLM's own workers: a weight reload that also renews what was derived from the weights.

In: a policy folder, or a broadcast of its weights. Out: new weights in every worker. vLLM mixes this class into its
worker (`worker_extension_cls`). An engine of several parts has a worker for each: all of them answer, and take what is
theirs.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

from infra.weight_broadcast import Broadcast, receive
from rollouts.engines.engine import EngineError
from settings.errors import InvalidInput

logger = logging.getLogger("millrace.engine")


def answering(method: Callable[..., Any]) -> Callable[..., tuple[Any, str]]:
    """Let a method of a worker answer with its result and what went wrong, instead of raising. See `results`.

    vLLM 0.32 reads no further answer once a worker has raised: those of the others, still in their queues, would be
    taken for what they say to the next call, and so on for ever.
    """

    @functools.wraps(method)
    def answer(self: Any, *arguments: Any) -> tuple[Any, str]:
        try:
            return method(self, *arguments), ""
        except Exception as error:
            logger.exception("%s: %s", method.__name__, error)  # with the stack, which the answer has not
            return None, f"{type(error).__name__}: {error}"

    return answer


def results(answers: list[tuple[Any, str]]) -> list[Any]:
    """What an `answering` method returned in each worker. Raises `EngineError` where one of them failed."""
    failed = [f"worker {number} of {len(answers)}: {wrong}" for number, (_, wrong) in enumerate(answers) if wrong]
    if failed:
        raise EngineError(failed[0])
    return [result for result, _ in answers]


class ReloadExtension:
    """Methods callable by `collective_rpc`; `self` is a vLLM worker."""

    model_runner: Any
    device: Any
    rank: int
    """Among the workers of one engine."""

    @answering
    def reload_policy(self, folder: str) -> None:
        """Load a policy folder in HF layout. The first call gets the folder that the engine was started with."""
        self._reload(folder, weights_path=folder)

    @answering
    def receive_policy(self, broadcast: dict[str, Any]) -> None:
        """Take part in a `Broadcast`, given as its fields; not as the first load.

        Fails with `storage.objects.digests.DigestMismatch` where the weights that arrived are not the log's.
        """
        policy = Broadcast(**broadcast)
        weights = receive(policy, rank=policy.first_rank + self.rank, device=self.device)
        self._reload(f"the broadcast of policy {policy.version}", weights_iterator=weights)

    def _reload(self, what: str, **source: Any) -> None:
        """vLLM's in-place reload, and then the output matrices that share their weight with the embeddings.

        Raises `ValueError` where a layer got fewer elements than at the first load. vLLM 0.32 only warns of a missing
        tensor, and not even that where it is a part of a fused one: the key projection without which a layer would
        compute with uninitialised memory.

        On the CPU an output matrix is multiplied from a packed copy. vLLM packs anew what the checkpoint names,
        but a tied `lm_head` is not named there, so it would go on with the old copy.
        """
        from vllm.platforms import current_platform

        model = self.model_runner.get_model()
        load_weights, incomplete = model.load_weights, {}

        def load_and_look(weights: Iterable[tuple[str, Any]]) -> Any:
            nonlocal incomplete
            loaded = load_weights(weights)
            incomplete = self._incomplete_layers(model)
            return loaded

        model.load_weights = load_and_look
        try:
            self.model_runner.reload_weights(**source)
        except BaseException:
            self._end_reload(model)
            raise
        finally:
            del model.load_weights  # the method of its class again
        padded = self.__dict__.setdefault("_padded_layers", incomplete)
        wrong = [f"{name} {incomplete[name]}" for name in incomplete if incomplete[name] != padded.get(name)]
        if wrong:
            raise InvalidInput(f"{what} lacks tensors; elements loaded of elements needed: {', '.join(wrong[:3])}")
        if current_platform.is_cpu():
            for module in model.modules():
                if type(module).__name__ == "ParallelLMHead":
                    module.quant_method.process_weights_after_loading(module)

    def _incomplete_layers(self, model: Any) -> dict[str, str]:
        """Layers that still wait for elements after a load: padded ones, and those whose tensors are not there."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        found = {name: get_layerwise_info(layer) for name, layer in model.named_modules()}
        return {
            name: f"{info.load_numel} of {info.load_numel_total}" for name, info in found.items() if info.can_load()
        }

    def _end_reload(self, model: Any) -> None:
        """Put an interrupted reload's layers back in place, whatever they now hold.

        vLLM 0.32 would continue it with the next one: a layer of which half was loaded would count that half twice
        and be closed before its last tensor arrives.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for layer in model.modules():
            half_loaded = get_layerwise_info(layer)
            half_loaded.loaded_weights.clear()
            half_loaded.load_numel = 0
        finalize_layerwise_reload(model, self.model_runner.model_config)
