"""Where workers run: Ray actors around plain classes, on this machine or on a cluster.

In: import paths of plain classes and their arguments. Out: `Hosted`, whose `call` awaits a method over there, or
`HostedGroup`, which is asked as one and computes as several ranks. Nothing outside this module knows that Ray exists.

    async with Fleet(log_folder=…) as fleet:
        worker = await fleet.host("rollout-0", "rollouts.worker:RolloutWorker", arguments={...})
        shard = await worker.call("collect")
        trainer = await fleet.host_group("trainer-0", "trainers.worker:TrainerWorker", arguments={...}, num_ranks=4)
        step = await trainer.call("train_step", claim)      # on all ranks; the result is rank 0's
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import gc
import importlib
import inspect
import logging
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra.structured_logs import CALL, json_handler, logs_are_json
from storage.redaction import redact_logs

logger = logging.getLogger("millrace.fleet")

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_STUCK_SECONDS = 120.0
_WATCHERS: list[subprocess.Popen[bytes]] = []


class WorkerDied(RuntimeError):
    """A hosted worker's process is gone; the message names it and its log file."""


class Hosted:
    """A handle to an object in another process."""

    def __init__(self, name: str, actor: Any, log_file: Path) -> None:
        self.name = name
        self.log_file = log_file
        self._actor = actor

    async def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Await `method(*arguments, **keywords)` over there.

        Raises what it raised, as its own type; `WorkerDied` when the process is gone.
        """
        return await self._answer(self._actor.call.remote(method, arguments, keywords), method)

    async def rendezvous(self) -> tuple[str, int]:
        """Address of the process's node and a port that is free there."""
        address, port = await self._answer(self._actor.rendezvous.remote(), "rendezvous")
        return str(address), int(port)

    async def prepare(self, environment: dict[str, str]) -> None:
        """Set environment variables over there before the object is built, which the first call does."""
        await self._answer(self._actor.prepare.remote(environment), "prepare")

    def kill(self) -> None:
        """End the process at once."""
        import ray

        ray.kill(self._actor)

    async def _answer(self, asked: Any, method: str) -> Any:
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return await asked
        except RayTaskError as error:
            raise error.cause from error
        except RayActorError as error:
            raise WorkerDied(f"{self.name} died during {method}(); its log is {self.log_file}") from error


class HostedGroup:
    """The same object in several processes that compute as one: what one is asked, all are asked.

    Ranks stay in step, or the group ends: where one fails and the others do not, they would wait for it for ever.
    """

    def __init__(self, name: str, ranks: Sequence[Hosted], *, lag_seconds: float) -> None:
        self.name = name
        self.log_file = ranks[0].log_file
        self._ranks = ranks
        self._lag_seconds = lag_seconds
        self._ended = ""

    async def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Await `method(*arguments, **keywords)` on every rank; returns what rank 0 does.

        Raises what a rank raised, with a note that names the rank. An error with an attribute `rank` is there because
        of that rank's error, which is the one that is raised. If the others do not fail too within `lag_seconds`, or a
        process is gone (`WorkerDied`), all processes are killed, and later calls raise `WorkerDied`.
        """
        if self._ended:
            raise WorkerDied(f"{self.name} cannot do {method}() any more: {self._ended}")
        calls = [asyncio.ensure_future(rank.call(method, *arguments, **keywords)) for rank in self._ranks]
        try:
            done, running = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            if running:
                await asyncio.wait(running, timeout=self._lag_seconds)
        finally:
            for call in calls:
                call.cancel()
        errors = {rank: e for rank, c in enumerate(calls) if c.done() and not c.cancelled() and (e := c.exception())}
        if not errors:
            return calls[0].result()
        deaths = [rank for rank, error in errors.items() if isinstance(error, WorkerDied)]
        followed = [rank for error in errors.values() if (rank := getattr(error, "rank", None)) in errors]
        # Where all fail alike it is rank 0's error, else the earliest.
        earliest = [rank for rank in errors if calls[rank] in done] if len(errors) < len(calls) else [0]
        culprit = [*deaths, *followed, *earliest][0]
        error = errors[culprit]
        error.add_note(f"rank {culprit} of {len(calls)} of {self.name}; its log is {self._ranks[culprit].log_file}")
        if deaths or len(errors) < len(calls):
            self._end(str(error) if deaths else f"rank {culprit} failed in {method}(): {error}")
        raise error

    def _end(self, reason: str) -> None:
        logger.error("%s ends, all its ranks are killed: %s", self.name, reason)
        self._ended = reason
        for rank in self._ranks:
            rank.kill()


class _Host:
    """Runs inside the actor: builds the plain object there and forwards calls to it."""

    def __init__(self, path: str, arguments: dict[str, Any], log_file: str) -> None:
        _die_with_parent()
        _redirect_output(log_file)
        self._path = path
        self._arguments = arguments
        self._target: Any = None
        self._turning: asyncio.Task[None] | None = None

    def rendezvous(self) -> tuple[str, int]:
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def prepare(self, environment: dict[str, str]) -> None:
        os.environ.update(environment)

    async def call(self, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        self._turning = self._turning or asyncio.create_task(_log_stacks_when_stuck())
        steps = [step for argument in arguments if isinstance(step := getattr(argument, "step", None), int)]
        CALL.set({"call": method, **({"step": steps[0]} if steps else {})})
        if self._target is None:
            if method == "close":
                return None
            module, _, name = self._path.partition(":")
            self._target = getattr(importlib.import_module(module), name)(**self._arguments)
            result = await self._forwarded(method, arguments, keywords)
            # Libraries, engine and model stay until the end: the collector need not walk them again and again.
            gc.collect()
            gc.freeze()
            return result
        return await self._forwarded(method, arguments, keywords)

    async def _forwarded(self, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        result = getattr(self._target, method)(*arguments, **keywords)
        return await result if inspect.isawaitable(result) else result


async def _log_stacks_when_stuck() -> None:
    """Write every thread's stack to the log when this process's event loop has not turned for a while."""
    while True:
        faulthandler.dump_traceback_later(_STUCK_SECONDS)
        await asyncio.sleep(_STUCK_SECONDS / 4)


class Fleet:
    """The Ray cluster of one session: joined at `RAY_ADDRESS`, else started in-process and stopped at the end.

    On several nodes, workers that need no GPU are spread over them, one with several GPUs has them on one node, ranks
    are packed closely, and a trainer alone without a GPU is beside the driver. What was on a node that is lost raises
    `WorkerDied`, and what is hosted anew goes to the others.
    """

    def __init__(self, *, log_folder: Path, num_workers: int = 1, gpus_per_engine: int = 1) -> None:
        """Engines count `gpus_per_engine` times among the `num_workers` that hold a model, or a part of one."""
        self._log_folder = log_folder
        self._num_workers = num_workers
        self._gpus_per_engine = gpus_per_engine
        self._hosted: list[Hosted | HostedGroup] = []
        self._placements: dict[str, Any] = {}
        self.num_gpus = 0.0

    async def __aenter__(self) -> Fleet:
        import ray

        self._log_folder.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {
            "log_to_driver": False,
            "logging_level": logging.ERROR,
            "configure_logging": False,
        }
        # Without an address Ray would join any cluster it finds on this machine, somebody else's too.
        options["address"] = address = os.environ.get("RAY_ADDRESS") or "local"
        if address == "local":
            # A cluster of our own makes its own token; the warning that says so is of no use to anybody.
            logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
            options |= {
                "include_dashboard": False,
                "num_cpus": max(64, os.cpu_count() or 1),  # slots, not cores: workers mostly wait for each other
                "object_store_memory": 128 * 2**20,
                "_system_config": {"enable_worker_prestart": False, "prestart_worker_first_driver": False},
            }
        ray.init(**options)  # on the main thread, where Ray may install its SIGTERM handler
        self.num_gpus = ray.cluster_resources().get("GPU", 0.0)
        return self

    async def host(
        self, name: str, path: str, *, arguments: dict[str, Any], num_cpus: float = 1, num_gpus: float = 0
    ) -> Hosted:
        """`path` (`package.module:Class`) built with `arguments` in a process of its own, by the first call."""
        # No placement group for several GPUs: an actor has them on one node anyway, and inside of one vLLM would take
        # Ray for its workers instead of processes of its own.
        options = {
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            "scheduling_strategy": "DEFAULT" if num_gpus else "SPREAD",
        }
        hosted = self._start(name, path, arguments, log_name=name, options=options)
        self._hosted.append(hosted)
        return hosted

    async def host_group(
        self,
        name: str,
        path: str,
        *,
        arguments: dict[str, Any],
        num_ranks: int,
        num_cpus: float = 1,
        num_gpus: float = 0,
        lag_seconds: float = 10.0,
    ) -> Hosted | HostedGroup:
        """The same object in `num_ranks` processes that torch.distributed joins, as torchrun would have started them.

        `num_cpus` and `num_gpus` are for each; `lag_seconds` is how long after a rank has failed the others may take
        to fail too.
        """
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

        options: dict[str, Any] = {"num_cpus": num_cpus, "num_gpus": num_gpus}
        if num_ranks == 1:
            if not num_gpus:  # it is lost with the driver in any case
                here = ray.get_runtime_context().get_node_id()
                options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id=here, soft=True)
            hosted = self._start(name, path, arguments, log_name=name, options=options)
            self._hosted.append(hosted)
            return hosted
        bundle = {"CPU": num_cpus, **({"GPU": num_gpus} if num_gpus else {})}
        if name in self._placements:  # of ranks that have ended, whose place these take
            remove_placement_group(self._placements[name])
        placement = placement_group([bundle] * num_ranks, strategy="PACK")
        self._placements[name] = placement
        ranks = [
            self._start(
                f"rank {rank} of {name}",
                path,
                arguments,
                log_name=f"{name}-rank-{rank}" if rank else name,
                options=options
                | {
                    "scheduling_strategy": PlacementGroupSchedulingStrategy(
                        placement_group=placement, placement_group_bundle_index=rank
                    )
                },
            )
            for rank in range(num_ranks)
        ]
        group = HostedGroup(name, ranks, lag_seconds=lag_seconds)
        self._hosted.append(group)
        address, port = await ranks[0].rendezvous()
        shared = {
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "LOCAL_RANK": "0",  # among the GPUs that Ray lets a process see: its own
        }
        await asyncio.gather(*(rank.prepare({**shared, "RANK": str(number)}) for number, rank in enumerate(ranks)))
        return group

    def _start(
        self, name: str, path: str, arguments: dict[str, Any], *, log_name: str, options: dict[str, Any]
    ) -> Hosted:
        import ray

        log_file = self._log_folder / f"{log_name}.log"
        actor_class = ray.remote(_Host).options(max_concurrency=100, **options)
        return Hosted(name, actor_class.remote(path, arguments, str(log_file)), log_file)

    def check_ranks(self, num_ranks: int) -> None:
        """Raises `ValueError` where ranks, or the parts of one engine, would share a GPU, which NCCL refuses."""
        if self._gpus_per_engine > 1 and 0 < self.gpus_per_worker < 1:
            raise ValueError(
                f"an engine is to compute on {self._gpus_per_engine} GPUs (engine.vllm.tensor_parallel_size): with "
                f"trainer and other engines that makes {self._num_workers}, and there are {self.num_gpus:g}; lower it"
            )
        if num_ranks > 1 and 0 < self.gpus_per_worker < 1:
            raise ValueError(
                f"train.num_ranks = {num_ranks}: {self._num_workers} processes hold a model and there are "
                f"{self.num_gpus:g} GPUs, but each rank needs one of its own; lower train.num_ranks, "
                'or set train.device = "cpu"'
            )

    @property
    def gpus_per_worker(self) -> float:
        """GPUs for each of the processes that hold a model: one, an even share of one, or none."""
        return 1 / math.ceil(self._num_workers / self.num_gpus) if self.num_gpus else 0.0

    @property
    def gpus_per_engine(self) -> float:
        """GPUs for each engine: several, one, an even share of one, or none."""
        return self.gpus_per_worker * self._gpus_per_engine

    async def run(self, name: str, path: str, **arguments: Any) -> Any:
        """Run one function (`package.module:function`) in a process of its own and return its result."""
        import ray

        log_file = str(self._log_folder / f"{name}.log")
        return await ray.remote(_run_function).options(num_cpus=1, max_retries=0).remote(path, arguments, log_file)

    async def __aexit__(self, *_: object) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        # Side by side: on a node that is gone, what was to take the place of the dead never answers.
        closed = await asyncio.gather(*(_close(hosted) for hosted in self._hosted), return_exceptions=True)
        for placement in self._placements.values():  # of a cluster that goes on without us
            remove_placement_group(placement)
        await asyncio.to_thread(ray.shutdown)
        for error in closed:
            if isinstance(error, BaseException):
                raise error


async def _close(hosted: Hosted | HostedGroup) -> None:
    """Let it end in its own way, if it still answers."""
    try:
        async with asyncio.timeout(20):
            await hosted.call("close")
    except (WorkerDied, TimeoutError, AttributeError) as error:
        logger.warning("%s did not close: %s", hosted.name, str(error) or "no answer for 20 s")


def _run_function(path: str, arguments: dict[str, Any], log_file: str) -> Any:
    _die_with_parent()
    _redirect_output(log_file)
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)(**arguments)


def _die_with_parent() -> None:
    """Let this process and all its children be killed when the raylet dies or this process does.

    A killed run must leave no worker behind that holds memory or commits. The kernel tells us of the raylet's end;
    our children (vLLM's engine does not watch for ours) are killed by a shell that waits for our end of a pipe.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    watch = f"cat > /dev/null; kill -9 -{os.getpid()}"
    watcher = subprocess.Popen(["/bin/sh", "-c", watch], stdin=subprocess.PIPE, start_new_session=True)
    _WATCHERS.append(watcher)  # kept: dropping it would close the pipe
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _redirect_output(log_file: str) -> None:
    """Send this process's output, and that of the children it will start, to its log file."""
    Path(log_file).parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    line = "%(asctime)s %(name)s %(levelname)s %(message)s"
    redact_logs()
    logging.basicConfig(level=logging.INFO, format=line, stream=sys.stderr)
    if logs_are_json():
        process = {"run": Path(log_file).parent.name, "worker": Path(log_file).stem}
        logging.getLogger().handlers[:] = [json_handler(sys.stderr, lambda: process)]
