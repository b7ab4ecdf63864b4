"""Devices, process groups and FSDP2: the one place that asks what hardware there is.

In: a module and settings. Out: the module sharded over all ranks, gradients summed (not averaged) over them.
FSDP2 is used at world size 1 too, so that one rank and many run the same code.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def choose_device(device: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device this rank computes on. Raises `ValueError` when CUDA is asked for and absent."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("train.device = 'cuda', but torch sees no GPU; use 'auto' or 'cpu'")
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def start_process_group(device: torch.device) -> DeviceMesh:
    """Join the process group torchrun's variables describe, or make one of a single rank."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device.type, (dist.get_world_size(),))


def shard(model: nn.Module, layers: Iterable[nn.Module], *, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Apply FSDP2 to every layer and then to the whole; parameters stay float32, compute runs in `dtype`."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in [*layers, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
        assert isinstance(module, FSDPModule)
        # Losses carry the global denominator, so gradients add up over ranks. gloo has no PREMUL_SUM: force SUM.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a possibly sharded tensor, on the CPU."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().cpu()


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a whole tensor into a possibly sharded one."""
    with torch.no_grad():
        if isinstance(target, DTensor):
            local = source.to(target.device_mesh.device_type)
            target.copy_(distribute_tensor(local, target.device_mesh, target.placements))
        else:
            target.copy_(source)


def sum_over_ranks(values: dict[str, float], device: torch.device) -> dict[str, float]:
    """Element-wise sum over all ranks; keys must agree."""
    keys = sorted(values)
    packed = torch.tensor([values[key] for key in keys], dtype=torch.float64, device=device)
    dist.all_reduce(packed)
    return dict(zip(keys, packed.tolist(), strict=True))
