"""What vLLM 0.32 computes wrongly for some models without an error, mended in its workers.

    weights that a model copies by itself, as gpt-oss its experts and sinks ─▶ reloaded in place like all others
    positions of queries with an axis of heads, on CPUs (LFM2, DeepSeek)    ─▶ rotated head by head
    biases that a kernel wants in float32, on CPUs with AMX                 ─▶ rounded at a reload as at the start

In: a worker's model. Out: the same, or a context in which its weights are reloaded.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode


def rotate_by_heads(model: torch.nn.Module) -> None:
    """Let queries and keys of shape [tokens, heads, size] be rotated by vLLM's own computation in torch: its kernel for
    CPUs takes each for one head. Those of [tokens, heads × size] are left to the kernel."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    def rotate(module: Any, positions: torch.Tensor, query: torch.Tensor, *others: Any, **named: Any) -> Any:
        forward = module.forward_cpu if query.dim() == 2 else module.forward_native
        return forward(positions, query, *others, **named)

    for module in model.modules():
        method: Any = getattr(module, "_forward_method", None)
        if getattr(method, "__func__", None) is RotaryEmbedding.forward_cpu:
            vars(module)["_forward_method"] = functools.partial(rotate, module)


def round_biases(model: torch.nn.Module) -> None:
    """Round what a reload has put into biases that are held in a wider type than the layer's. At the start vLLM loads
    them in the layer's type and widens them for a kernel; a reload writes into the wide ones."""
    from vllm.model_executor.layers.linear import LinearBase

    for module in model.modules():
        bias: Any = getattr(module, "bias", None)
        if isinstance(module, LinearBase) and bias is not None and bias.dtype != module.params_dtype:
            bias.data.copy_(bias.data.to(module.params_dtype))


class CopiesAreLoads(TorchFunctionMode):
    """Inside, `parameter.copy_(weight)` and `parameter.data.copy_(weight)` are noted as loads of a whole parameter.

    vLLM reloads layer by layer: parameters are on no device until the last of their layer has come, and what has come
    is noted by their weight loaders. A copy without one goes nowhere, and the old weights stay.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._model = model
        self._owners: dict[int, tuple[torch.nn.Module, str]] = {}
        self._of_data: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        target = arguments[0] if arguments and isinstance(arguments[0], torch.Tensor) else None
        # While a weight loader runs, a mode of vLLM counts what it copies.
        is_own = target is not None and target.is_meta and _get_current_dispatch_mode() is None
        if is_own and function is torch.Tensor.copy_ and self._note(arguments[0], arguments[1]):
            return target
        result = function(*arguments, **(named or {}))
        if is_own and function == torch.Tensor.data.__get__:  # a new object each time
            self._of_data[id(result)] = (result, arguments[0])
        return result

    def _note(self, target: torch.Tensor, weight: torch.Tensor) -> bool:
        """True if `target` is a parameter that vLLM waits for."""
        from vllm.model_executor.model_loader.reload.layerwise import make_online_process_loader
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        parameter: Any
        _, parameter = self._of_data.get(id(target), (None, target))
        if id(parameter) not in self._owners:
            modules = list(self._model.modules())
            self._owners = {id(own): (module, name) for module in modules for name, own in module._parameters.items()}
        if id(parameter) not in self._owners:
            return False
        layer, name = self._owners[id(parameter)]
        parameter.weight_loader = default_weight_loader
        make_online_process_loader(layer, name)(parameter, weight)
        return True
