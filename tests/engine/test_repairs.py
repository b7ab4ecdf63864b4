"""What is mended in vLLM's workers, on its own classes without an engine."""

from __future__ import annotations

import pytest
import torch

from rollouts.engines.vllm.repairs import CopiesAreLoads, rotate_by_heads, round_biases

pytest.importorskip("vllm")


class _Layer(torch.nn.Module):
    """Has two parameters; `load` copies into both, one of them by its `data`."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False)
        self.sinks = torch.nn.Parameter(torch.zeros(4), requires_grad=False)

    def load(self, value: float) -> None:
        self.experts.copy_(torch.full((2, 3), value))
        self.sinks.data.copy_(torch.full((4,), value))


@pytest.mark.parametrize("is_mended", [True, False])
def test_what_a_model_copies_by_itself_is_reloaded_into_the_memory_that_kernels_know(is_mended: bool) -> None:
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )

    layer = _Layer()
    record_metadata_for_reloading(layer)
    layer.load(1.0)
    kernels_know = layer.experts, layer.sinks
    initialize_layerwise_reload(layer)
    if is_mended:
        with CopiesAreLoads(layer):
            layer.load(2.0)
    else:
        layer.load(2.0)  # vLLM's own way: if this changes, CopiesAreLoads can go
    finalize_layerwise_reload(layer, None)
    assert (layer.experts, layer.sinks) == kernels_know
    assert {float(value) for its in kernels_know for value in its.flatten()} == {2.0 if is_mended else 1.0}


@pytest.mark.parametrize("is_neox", [True, False])
def test_heads_with_an_axis_of_their_own_are_rotated_like_those_side_by_side(is_neox: bool) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    with set_current_vllm_config(VllmConfig()):
        rope = {"rope_type": "default", "rope_theta": 1e4 + is_neox}  # get_rope keeps one of each kind
        rotary = get_rope(32, max_position=64, rope_parameters=rope, is_neox_style=is_neox, dtype=torch.float32)
    rotary._forward_method = rotary.forward_cpu  # as in an engine that compiles nothing
    rotate_by_heads(torch.nn.Sequential(rotary))
    positions, query, key = torch.tensor([3, 9, 50]), torch.randn(3, 4, 32), torch.randn(3, 2, 32)
    expected = rotary(positions, query.flatten(1).clone(), key.flatten(1).clone())
    found = rotary(positions, query.clone(), key.clone())
    for its, other in zip(found, expected, strict=True):
        torch.testing.assert_close(its.flatten(1), other, atol=1e-5, rtol=0)


def test_a_bias_that_a_kernel_wants_in_float32_is_reloaded_with_the_numbers_of_the_first_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.linear import ReplicatedLinear

    parallel = "vllm.model_executor.parameter.get_tensor_model_parallel"
    monkeypatch.setattr(f"{parallel}_rank", lambda: 0)
    monkeypatch.setattr(f"{parallel}_world_size", lambda: 1)
    with set_current_vllm_config(VllmConfig()):
        layer = ReplicatedLinear(8, 4, params_dtype=torch.bfloat16, disable_tp=True)
    stored = torch.tensor([1.001, -2.003, 0.0, 3.1])
    layer.bias.weight_loader(layer.bias, stored)
    layer.bias.data = layer.bias.to(torch.float32)  # as vLLM does on a processor with AMX, once
    first = layer.bias.clone()
    layer.bias.weight_loader(layer.bias, stored)
    assert not torch.equal(layer.bias, first), "vLLM rounds by itself: round_biases can go"
    round_biases(torch.nn.Sequential(layer))
    assert torch.equal(layer.bias, first) and layer.bias.dtype == torch.float32
