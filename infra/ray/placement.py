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
from collections.abc import Mapping, Sequence
from typing import Any

from infra.ray.client import node_resources
from settings.errors import InvalidInput, counted

logger = logging.getLogger("millrace.placement")

_LOOK_SECONDS = 5.0
_LOOKS_PER_WARNING = 12


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
