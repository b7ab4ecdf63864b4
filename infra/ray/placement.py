"""Reserve devices of a Ray cluster together, for all parts of an engine or all ranks of a trainer.

In: what each process needs. Out: a `Placement`, which is given back once. Until everything is free, its making waits.

    one engine of 4 parts     [4 GPUs]                            one process; all its devices on one node
    a trainer of 4 ranks      [1 GPU] [1 GPU] [1 GPU] [1 GPU]     a process each, on as few nodes as possible
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from settings.errors import InvalidInput, counted, path_errors

logger = logging.getLogger("millrace.placement")

SECONDS_TO_ANSWER = 5.0
_LOOK_SECONDS = 5.0
_HTTP2_SETTINGS = b"\x04"
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _HTTP2_SETTINGS + b"\0\0\0\0\0"
"""How a client begins (RFC 9113, 3.4); a server answers with a frame of its settings, whose type is its fourth byte."""
_LOOKS_PER_WARNING = 12
_LISTED_GPUS = Path("/proc/driver/nvidia/gpus")
_ELSEWHERE = "/usr/bin:/usr/local/nvidia/bin:/usr/lib/wsl/lib"
"""Where containers and WSL have `nvidia-smi`, not always on PATH."""
_SECONDS_TO_LIST = 30.0


def num_slots() -> int:
    """What a Ray of our own takes for this machine's CPUs: slots, not cores, because workers mostly wait for each
    other."""
    return max(64, os.cpu_count() or 1)


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """A GPU of this machine; bytes."""

    name: str
    total: int
    free: int


def gpu_memory() -> list[GpuMemory]:
    """The GPUs that this process may use, in their order; none where `nvidia-smi` is not there or does not answer, or
    says of none how much memory it has."""
    program = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path=_ELSEWHERE)
    if program is None:
        return []
    query = [program, "--query-gpu=index,uuid,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(
            query, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_SECONDS_TO_LIST, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        logger.debug("the GPUs of this machine cannot be asked: %s", error)
        return []
    rows = [line.split(", ") for line in listed.stdout.splitlines()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        by_name = {name: row for row in rows for name in row[:2]}
        rows = [by_name[name] for name in visible.replace(" ", "").split(",") if name in by_name]
    return [
        GpuMemory(name=name, total=int(total) * 2**20, free=int(free) * 2**20)
        for name, _, total, free in rows
        if total.isdigit() and free.isdigit()  # a GPU that shares the CPU's memory says [N/A]
    ]


def num_gpus() -> int:
    """GPUs of this machine that this process may use. Where the kernel lists none, as in some sandboxes, those that
    `nvidia-smi` does."""
    listed = len(list(_LISTED_GPUS.glob("*")))
    if not listed:
        return len(gpu_memory())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return listed if visible is None else len([v for v in visible.split(",") if v.strip() not in ("", "-1")])


def has_cores_for(num_processes: int) -> bool:
    """True if this machine has a core for each of so many processes."""
    return len(os.sched_getaffinity(0)) >= num_processes


def nodes_to_use() -> list[dict[str, float]]:
    """Resources of each node of the cluster at `RAY_ADDRESS`, or without it of this machine, which Ray is not asked
    for. Raises `InvalidInput` if the cluster does not answer."""
    if not (address := os.environ.get("RAY_ADDRESS")):
        gpus = num_gpus()
        return [{"CPU": float(num_slots()), **({"GPU": float(gpus)} if gpus else {})}]
    check_cluster_answers(address)
    import ray

    ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, configure_logging=False)
    try:
        return node_resources()
    finally:
        end_ray()


def end_ray() -> None:
    """`ray.shutdown`, with Ray's client out of reach before it ends. A reference to a result that another thread frees
    meanwhile would ask it, and Ray then ends the process."""
    import ray

    worker = ray._private.worker
    worker.disconnect()
    client = vars(worker.global_worker).pop("core_worker", None)
    if client is not None:
        client.shutdown_driver()
    ray.shutdown()


def check_cluster_answers(address: str) -> None:
    """Raise `InvalidInput` unless what listens at `RAY_ADDRESS` speaks HTTP/2, as Ray does, within seconds. Ray itself
    would try for minutes, deaf to Ctrl-C."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdigit():
        return
    problem = f"RAY_ADDRESS = {address!r}: no Ray cluster answers"
    with path_errors(problem), socket.create_connection((host.strip("[]"), int(port)), SECONDS_TO_ANSWER) as connection:
        if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
            return
        connection.sendall(_HTTP2_GREETING)
        if connection.recv(9)[3:4] != _HTTP2_SETTINGS:
            raise InvalidInput(f"{problem}: something else listens there; give the address that `ray start` printed")


def node_resources() -> list[dict[str, float]]:
    """Resources of each living node of the cluster: "CPU", "GPU" and others by their Ray names."""
    import ray

    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def gpus_of(nodes: Sequence[Mapping[str, float]]) -> float:
    """GPUs of all nodes together."""
    return sum(node.get("GPU", 0.0) for node in nodes)


def gpu_share(nodes: Sequence[Mapping[str, float]], *, num_workers: int) -> float:
    """GPUs for each of the processes that hold a model: one, an even share of one, or none."""
    num_gpus = gpus_of(nodes)
    return 1 / math.ceil(num_workers / num_gpus) if num_gpus else 0.0


def check_shares(
    nodes: Sequence[Mapping[str, float]], *, num_workers: int, gpus_per_engine: int, num_ranks: int
) -> None:
    """Raise `InvalidInput` if ranks or parts of an engine would share a GPU, or if an engine fits on no node."""
    num_gpus, shared = gpus_of(nodes), 0 < gpu_share(nodes, num_workers=num_workers) < 1
    num_engines = (num_workers - num_ranks) // gpus_per_engine
    if gpus_per_engine > 1 and num_engines:
        device = "GPU" if num_gpus else "CPU"
        engine = f"an engine is to compute on {gpus_per_engine} {device}s (engine.vllm.tensor_parallel_size"
        largest = max((node.get(device, 0.0) for node in nodes), default=0.0)
        if largest < gpus_per_engine:
            raise InvalidInput(
                f"{engine} × pipeline_parallel_size), all of one node, and no node has more than {largest:g}: lower "
                "one of the two, or add a larger node"
            )
        if shared:
            raise InvalidInput(
                f"{engine}): with trainer and other engines that makes {num_workers}, and there are {num_gpus:g}; "
                "lower it"
            )
        places = sum(int(node.get(device, 0.0) // gpus_per_engine) for node in nodes)
        if places < num_engines:
            raise InvalidInput(
                f"{engine} × pipeline_parallel_size), all of one node: the nodes have places for {places} of "
                f"{counted(num_engines, 'engine')}; lower rollout.num_workers to {places}, or one of the two sizes"
            )
    if num_ranks > 1 and shared:
        raise InvalidInput(
            f"train.num_ranks = {num_ranks}: {num_workers} processes hold a model and there are {num_gpus:g} GPUs, but "
            'each rank needs one of its own; lower train.num_ranks, or set train.device = "cpu"'
        )


def bundle(*, num_gpus: float = 0, num_cpus: float = 1) -> dict[str, float]:
    """The resources of one process. Each has at least one CPU; on a GPU node that is only a slot."""
    return {"CPU": num_cpus, "GPU": num_gpus} if num_gpus else {"CPU": num_cpus}


def on_node(node_id: str = "", *, soft: bool = False) -> Any:
    """Ray's strategy for a process on this node, or the driver's; `soft`: on another one if that has no place."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = node_id or ray.get_runtime_context().get_node_id()
    return NodeAffinitySchedulingStrategy(node_id=here, soft=soft)


class Placement:
    """A Ray placement group with one process in each of its bundles. Made by `reserve`."""

    def __init__(self, name: str, bundles: Sequence[dict[str, float]]) -> None:
        from ray.util.placement_group import placement_group

        self.name = name
        self._bundles = list(bundles)
        self._group: Any = placement_group(self._bundles, strategy="STRICT_PACK" if len(bundles) == 1 else "PACK")

    @classmethod
    async def reserve(cls, name: str, bundles: Sequence[dict[str, float]]) -> Placement:
        """Reserve all bundles together, and wait without a limit: another run may end, or a lost node may come back."""
        placement = cls(name, bundles)
        try:
            await placement.wait()
        except BaseException:
            placement.give_back()
            raise
        return placement

    def options(self, number: int) -> dict[str, Any]:
        """Options of the Ray actor that uses one bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = self._bundles[number]
        inside = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
        return {"num_cpus": resources["CPU"], "num_gpus": resources.get("GPU", 0), "scheduling_strategy": inside}

    def give_back(self) -> None:
        """Free the devices, and kill a process that still uses them. A second call does nothing."""
        from ray.util.placement_group import remove_placement_group

        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)

    async def wait(self) -> None:
        """Return when everything is reserved. Until then log from time to time what is missing."""
        for look in itertools.count():
            if await asyncio.to_thread(self._group.wait, _LOOK_SECONDS):
                return
            if look % _LOOKS_PER_WARNING == 0:
                logger.warning(await asyncio.to_thread(self._shortage))

    def _shortage(self) -> str:
        import ray

        device = "GPU" if "GPU" in self._bundles[0] else "CPU"
        each = f"{self._bundles[0][device]:g} {device}s"
        request = f"{each} of one node" if len(self._bundles) == 1 else f"{len(self._bundles)} times {each}"
        nodes = ", ".join(f"{num:g}" for num in sorted((n.get(device, 0) for n in node_resources()), reverse=True))
        free = ray.available_resources().get(device, 0)
        return f"{self.name} waits for {request}; the nodes of the cluster have {nodes}, and {free:g} are free in all"
