"""Devices, process groups and FSDP2: the one place that asks what hardware there is, and how many ranks.

In: a module and settings. Out: the module sharded over all ranks, gradients summed (not averaged) over them.
FSDP2 is used at world size 1 too, so that one rank and many run the same code.

    what may fail on one rank alone (files, store) ─▶ on_every_rank, on_first_rank, agreed ─▶ all go on, or all raise

A collective waits for every rank: what one rank skips, because it failed or decided otherwise, all others wait for.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from infra.weight_broadcast import tcp_store

_TRIES, _LONGEST_TRIAL = 10, 0.4
"""Products in each type, and seconds for all of them."""
Json = TypeVar("Json")
"""A value that JSON gives back as it was."""


class RankFailed(RuntimeError):
    """Another rank could not do its part of something that all do; `rank` raises the error itself."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[Any, ...]:
        return RankFailed, (str(self), self.rank)


class RanksDiffer(RuntimeError):
    """Ranks that must do the same would not; nothing was done."""


def choose_device(device: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device this rank computes on; `trainers.refusals` refuses CUDA without a GPU."""
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def time_products() -> None:
    """In a process of its own, which takes two sizes from its command line and prints seconds by type: what a product
    of a few tokens with a matrix of that shape takes on this machine's CPUs, in half a second for all."""
    rows, columns = map(int, sys.argv[1:])
    num_tokens = max(16, min(512, 10**9 // (rows * columns)))  # a slow core does 20 of them in half a second
    weights, inputs = torch.randn(rows, columns), torch.randn(num_tokens, columns)
    pairs = {"float32": (inputs, weights.T), "bfloat16": (inputs.bfloat16(), weights.bfloat16().T)}
    seconds = dict.fromkeys(pairs, math.inf)
    begun = time.perf_counter()
    for number in range(_TRIES):
        for name, (left, right) in pairs.items():
            started = time.perf_counter()
            left @ right
            if number:  # the first one makes its kernel
                seconds[name] = min(seconds[name], time.perf_counter() - started)
        if number and time.perf_counter() - begun > _LONGEST_TRIAL:
            break
    print(json.dumps(seconds))


def start_process_group(device: torch.device, *, num_replicas: int = 1) -> DeviceMesh:
    """Join the process group torchrun's variables describe, or make one of a single rank. Returns the mesh that the
    model is sharded over: all ranks, or neighbouring ones, and replicas of that."""
    if not dist.is_initialized():
        backend = "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
            backend = "cpu:gloo,cuda:nccl"  # the CPU's carries offloaded shards, and what ranks agree on
        rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        store: Any = dist.HashStore()
        if size > 1:
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = tcp_store(address, port, size, rank=rank, patience=dist.default_pg_timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    if num_replicas == 1:
        return init_device_mesh(device.type, (dist.get_world_size(),))
    shape = (num_replicas, dist.get_world_size() // num_replicas)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def num_ranks() -> int:
    """How many ranks there are; 1 before the process group is started."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Which one this is, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def shard(
    model: nn.Module, layers: Iterable[nn.Module], *, mesh: DeviceMesh, dtype: torch.dtype, offload: bool = False
) -> None:
    """Apply FSDP2 to every layer and then to the whole, and move it to the mesh's device; parameters keep their type,
    compute runs in `dtype`. With `offload` parameters, gradients and so the optimizer's moments live in host memory,
    and one layer at a time visits the GPU."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.promote_types(dtype, torch.float32))
    offload_policy = CPUOffloadPolicy() if offload else OffloadPolicy()
    for module in [*layers, model]:
        # By default the outermost module keeps its parameters gathered after a forward pass: without a backward pass
        # behind it the next update would not reach them.
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload_policy, reshard_after_forward=True)
        assert isinstance(module, FSDPModule)
        # Losses carry the global denominator, so gradients add up over ranks. gloo has no PREMUL_SUM: force SUM.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    if not offload:
        model.to(mesh.device_type)
        return
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(mesh.device_type))


def move(modules: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer], device: torch.device) -> None:
    """Move parameters, buffers and moments, in place: optimizer and FSDP2 go on with the parameters that they know."""
    for module in modules:
        module.to(device)
    for optimizer in optimizers:
        for state in optimizer.state.values():
            state |= {name: its.to(device) for name, its in state.items() if isinstance(its, torch.Tensor)}


def give_back_device_memory() -> None:
    """Give the GPU's driver, and so other processes, what torch's allocator keeps of it for the next tensors."""
    if torch.cuda.is_available():
        gc.collect()  # an error's frames, and a compiled layer, refer to themselves, and may hold tensors
        torch.cuda.empty_cache()


def device_bytes(device: torch.device) -> dict[str, float]:
    """Metrics: what this rank's allocator has held of its GPU at most since this was last asked, and what all processes
    hold of it now; none on a CPU."""
    if device.type != "cuda":
        return {}
    peak = torch.cuda.max_memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    return {"trainer_gpu_bytes": float(peak), "gpu_bytes": float(total - free)}


def peak_flops(device: torch.device) -> float | None:
    """Operations a second that a GPU does at most on dense bfloat16 matrices, by NVIDIA's data sheets; None for a CPU
    and for a GPU that is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((tera * 1e12 for part, tera in _PEAK_TFLOPS.items() if part in name), None)


_PEAK_TFLOPS = {
    "GB200": 2500,
    "B200": 2250,
    "H200 NVL": 835,
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H800": 989,
    "H20": 148,
    "A100": 312,
    "A800": 312,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "A10G": 70,
    "A10": 125,
    "RTX 4090": 165,
    "RTX 3090": 71,
}
"""By a part of the GPU's name, the first that is in it; with accumulation in float32."""


def kept_on_host() -> saved_tensors_hooks:
    """Inside, what a forward pass keeps for the backward pass is kept in host memory; parameters, which FSDP2 gathers
    again, stay where they are."""
    host = save_on_cpu(pin_memory=torch.cuda.is_available())

    def pack(tensor: torch.Tensor) -> Any:
        is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        return tensor if is_weight else host.pack_hook(tensor)

    return saved_tensors_hooks(pack, lambda kept: kept if isinstance(kept, torch.Tensor) else host.unpack_hook(kept))


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a possibly sharded tensor, on the CPU. Every rank must call it. One rank on a CPU has it already: it
    is the same memory."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) and num_ranks() > 1 else local(tensor)
    return whole.detach().cpu()


def gathered(tensor: torch.Tensor, *, to: int) -> torch.Tensor | None:
    """The whole of a possibly sharded tensor, on the CPU of the rank `to`; None on all others, which send it no more
    than their shards. Every rank must call it."""
    whole = local(tensor).detach()
    if isinstance(tensor, DTensor) and num_ranks() > 1:
        mesh = tensor.device_mesh
        group = mesh.get_group(mesh.ndim - 1)  # of several replicas that of `to` does it
        members = dist.get_process_group_ranks(group)
        if to not in members:
            return None
        own = whole.new_zeros(-(-tensor.shape[0] // len(members)), *tensor.shape[1:])  # as `torch.chunk` divides it
        own[: len(whole)] = whole
        shards = [torch.empty_like(own) for _ in members] if rank() == to else None
        dist.gather(own, shards, dst=to, group=group)
        whole = torch.cat(shards)[: tensor.shape[0]] if shards is not None else whole
    return whole.cpu() if rank() == to else None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's own part of a possibly sharded tensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a whole tensor into a possibly sharded one, each rank its own part of it: there is no collective."""
    with torch.no_grad():
        if isinstance(target, DTensor):
            local = source.to(target.device_mesh.device_type)
            target.copy_(distribute_tensor(local, target.device_mesh, target.placements, src_data_rank=None))
        else:
            target.copy_(source)


def sum_over_ranks(values: np.ndarray, *, device: torch.device, counts: bool = True) -> np.ndarray:
    """Element-wise sum over all ranks whose values are to count, of the same shape and type; exact where only one rank
    has a number but 0."""
    if num_ranks() == 1:
        return values
    total = torch.tensor(values if counts else np.zeros_like(values), device=device)
    dist.all_reduce(total)
    summed: np.ndarray = total.cpu().numpy()
    return summed


def on_every_rank(action: Callable[[], Json]) -> list[Json]:
    """Do `action` on all ranks and return what each got, in order. Every rank must call it. If one raises, no rank goes
    on: that rank raises its own error, the others `RankFailed`."""
    if num_ranks() == 1:
        return [action()]
    outcome: dict[str, Any] = {}
    failure: Exception | None = None
    try:
        outcome["result"] = action()
    except Exception as error:  # noqa: BLE001 - whatever it is, the others are to stop too; it is raised below
        failure, outcome = error, {"error": f"{type(error).__name__}: {error}"}
    outcomes = [json.loads(text) for text in _gather_text(json.dumps(outcome))]
    if failure is not None:
        raise failure
    for number, each in enumerate(outcomes):
        if "error" in each:
            raise RankFailed(f"rank {number}: {each['error']}", number)
    return [each["result"] for each in outcomes]


def on_first_rank(action: Callable[[], Json]) -> Json:
    """Do `action` on rank 0 alone; every rank must call it, and gets the result or the error, as `RankFailed`."""
    first, *_ = on_every_rank(lambda: action() if rank() == 0 else None)
    return first  # type: ignore[return-value]  # rank 0 has done it


def agreed(results: Sequence[Json], *, what: str) -> Json:
    """What all ranks returned (see `on_every_rank`); raises `RanksDiffer` on all if it is not the same."""
    if any(result != results[0] for result in results):
        listed = ", ".join(f"rank {number}: {result}" for number, result in enumerate(results))
        raise RanksDiffer(
            f"the ranks do not have the same {what} ({listed}), so nothing was done. Each must see the same store and "
            "run the same code; start this run again"
        )
    return results[0]


def _gather_text(text: str) -> list[str]:
    """Every rank's text, in order. Not `all_gather_object`, which unpickles what comes from a port."""
    own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(num_ranks())]
    dist.all_gather(sizes, torch.tensor([len(own)]))
    longest = max(int(size) for size in sizes)
    padded = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(padded, torch.nn.functional.pad(own, (0, longest - len(own))))
    return [part[: int(size)].numpy().tobytes().decode() for part, size in zip(padded, sizes, strict=True)]
