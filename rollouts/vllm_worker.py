"""What Millrace adds to vLLM's own workers: a weight reload that also renews what was derived from the weights.

In: a policy folder. Out: new weights in every worker. vLLM mixes this class into its worker (`worker_extension_cls`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class ReloadExtension:
    """Methods callable by `collective_rpc`; `self` is a vLLM worker."""

    model_runner: Any

    def reload_policy(self, folder: str) -> None:
        """vLLM's in-place reload, and then the output matrices that share their weight with the embeddings.

        The first call gets the folder that the engine was started with; a later one raises `ValueError` where a layer
        got fewer elements than then. vLLM 0.32 only warns of a missing tensor, and not even that where it is a part
        of a fused one: the key projection without which a layer would compute with uninitialised memory.

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
            self.model_runner.reload_weights(weights_path=folder)
        except BaseException:
            self._end_reload(model)
            raise
        finally:
            del model.load_weights  # the method of its class again
        padded = self.__dict__.setdefault("_padded_layers", incomplete)
        wrong = [f"{name} {incomplete[name]}" for name in incomplete if incomplete[name] != padded.get(name)]
        if wrong:
            raise ValueError(f"{folder} lacks tensors; elements loaded of elements needed: {', '.join(wrong[:3])}")
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
