"""Where workers run: Ray actors around plain classes, on this machine or on a cluster.

In: import paths of plain classes with an async classmethod `open`. Out: `Hosted`, whose `call` awaits `open`, and then
methods of what it made; or `HostedGroup`, several ranks.

    async with Cluster(log_folder=…) as cluster:
        worker = await cluster.host("rollout-0", "rollouts.production.worker:RolloutWorker")
        checksum = await worker.call("open", config, …)     # what the new object has as `opened`
        shard = await worker.call("collect")
        trainer = await cluster.host_group("trainer-0", "trainers.worker:TrainerWorker", num_ranks=4)
        await trainer.call("open", config, …)
        step = await trainer.call("train_step", claim)      # on all ranks; the result is rank 0's
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any

from infra.ray.client import LOCAL, check_cluster_answers, end_ray, node_resources, start_ray
from infra.ray.hosted import Hosted, HostedGroup, StartFailed, WorkerDied, close, result_of
from infra.ray.liveness import Watch
from infra.ray.placement import Placement, bundle, gpu_share, on_node
from infra.ray.worker_process import Host, run_function
from infra.scratch import scratch_folder, worker_environment
from settings.errors import in_one_line


class Cluster:
    """The Ray cluster of one session: joined at `RAY_ADDRESS`, else started in-process and stopped at the end.

    Workers without a GPU are spread over the nodes. All devices of an engine are on one node, those of all ranks
    closely packed, and a single rank without a GPU is beside the driver. A lost node's workers raise `WorkerDied`.
    """

    def __init__(
        self, *, log_folder: Path, home: Path | None = None, num_workers: int = 1, gpus_per_engine: int = 1
    ) -> None:
        """An engine counts `gpus_per_engine` times among `num_workers`. Without GPUs it has that many of Ray's CPUs.

        What Ray and workers write beside logs is below `home`, by default `log_folder`, until the end.
        """
        self._log_folder = log_folder
        self._home = home or log_folder
        self._num_workers = num_workers
        self._gpus_per_engine = gpus_per_engine
        self._hosted: list[Hosted | HostedGroup] = []
        self._opened = contextlib.ExitStack()
        self._environment: dict[str, str] = {}
        self._watch: Watch
        """Set when Ray has started."""
        self.nodes: list[dict[str, float]] = []
        """Resources of each node, as they were at the start."""

    async def __aenter__(self) -> Cluster:
        import ray

        self._log_folder.mkdir(parents=True, exist_ok=True)
        # Without an address Ray would join any cluster it finds on this machine, also one of another user.
        address, scratch = os.environ.get("RAY_ADDRESS") or LOCAL, None
        await asyncio.to_thread(check_cluster_answers, address)
        if address == LOCAL:
            scratch = self._opened.enter_context(scratch_folder(self._home))
            self._environment = worker_environment(scratch)
        try:
            start_ray(address, scratch, log=self._log_folder / "ray.log")
        except BaseException as error:
            self._opened.close()
            if not isinstance(error, Exception):
                raise
            raise StartFailed(f"Ray could not start: {in_one_line(str(error))}") from error
        node = ray._private.worker._global_node
        self._watch = Watch(node.raylet_socket_name, node.gcs_address, None if address == LOCAL else self._host_on)
        self._opened.callback(self._watch.end)
        self.nodes = node_resources()
        return self

    async def host(self, name: str, path: str, *, num_gpus: float = 0) -> Hosted:
        """A process for an object of `path`, which `call("open")` makes there. Waits for the devices of its parts."""
        placement = None
        options = {"num_cpus": 1, "num_gpus": num_gpus, "scheduling_strategy": "DEFAULT" if num_gpus else "SPREAD"}
        if self._gpus_per_engine > 1:
            whole = bundle(num_gpus=num_gpus) if num_gpus else bundle(num_cpus=self._gpus_per_engine)
            placement = await self._watch.unless_lost(Placement.reserve(name, [whole]))
            options = placement.options(0)
        return self._start(name, path, options=options, placement=placement)

    async def host_group(self, name: str, path: str, *, num_ranks: int, num_gpus: float = 0) -> Hosted | HostedGroup:
        """The same object in `num_ranks` processes, for torch.distributed as torchrun would have started them.

        `num_gpus` are for each.
        """
        if num_ranks == 1:
            options: dict[str, Any] = {"num_cpus": 1, "num_gpus": num_gpus}
            # Without GPUs it is lost with the driver in any case.
            options["scheduling_strategy"] = "DEFAULT" if num_gpus else on_node(soft=True)
            return self._start(name, path, options=options)
        placement = await self._watch.unless_lost(Placement.reserve(name, [bundle(num_gpus=num_gpus)] * num_ranks))
        logs = [name, *(f"{name}-rank-{rank}" for rank in range(1, num_ranks))]
        ranks = [
            self._process(f"rank {rank} of {name}", path, log_name=log, options=placement.options(rank))
            for rank, log in enumerate(logs)
        ]
        group = HostedGroup(name, ranks, placement)
        self._hosted.append(group)
        await group.introduce()
        return group

    def _start(self, name: str, path: str, *, options: dict[str, Any], placement: Placement | None = None) -> Hosted:
        hosted = self._process(name, path, log_name=name, options=options, placement=placement)
        self._hosted.append(hosted)
        return hosted

    def _process(
        self, name: str, path: str, *, log_name: str, options: dict[str, Any], placement: Placement | None = None
    ) -> Hosted:
        import ray

        self._watch.check()
        log_file = self.log_file(log_name)
        actor = ray.remote(Host).options(max_concurrency=100, **options).remote(path, str(log_file), self._environment)
        return Hosted(name, log_file, actor, self._watch, placement)

    def _host_on(self, node_id: str, path: str) -> Hosted:
        name, options = f"node-{node_id[:8]}", {"num_cpus": 0, "scheduling_strategy": on_node(node_id)}
        return self._process(name, path, log_name=name, options=options)

    @property
    def gpus_per_worker(self) -> float:
        """GPUs for each of the processes that hold a model: one, an even share of one, or none."""
        return gpu_share(self.nodes, num_workers=self._num_workers)

    @property
    def gpus_per_engine(self) -> float:
        """GPUs for each engine: several, one, an even share of one, or none."""
        return self.gpus_per_worker * self._gpus_per_engine

    def log_file(self, name: str) -> Path:
        """Of a process, on the machine that it runs on."""
        return self._log_folder / f"{name}.log"

    async def run(self, name: str, path: str, **arguments: Any) -> Any:
        """Run one function (`package.module:function`) in a process of its own; raises as `Hosted.call`."""
        import ray
        from ray.exceptions import WorkerCrashedError

        self._watch.check()
        log_file = str(self.log_file(name))
        # One call is all: an idle process would keep what it has imported.
        remote = ray.remote(max_calls=1)(run_function).options(num_cpus=1, max_retries=0)
        try:
            return await result_of(remote.remote(path, arguments, log_file, self._environment), name, self._watch)
        except WorkerCrashedError as error:
            raise WorkerDied(f"{name} died; its log is {log_file}") from error

    async def close(self) -> None:
        """Let what is hosted end in its own way, and then Ray; a second call does nothing.

        Raises the first error that is not the end of a process.
        """
        hosted, self._hosted = self._hosted, []
        try:
            # Side by side: on a node that is gone, what was to take the place of the dead never answers.
            closed = await asyncio.gather(*map(close, hosted), return_exceptions=True)
        finally:
            await asyncio.to_thread(end_ray)  # if it never returns, as it may without a GCS, the watch ends it
            await asyncio.to_thread(self._opened.close)
        if errors := [each for each in closed if isinstance(each, BaseException)]:
            raise errors[0]

    async def __aexit__(self, *_: object) -> None:
        await self.close()
