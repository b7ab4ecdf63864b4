"""Where workers run: Ray actors around plain classes, on this machine or on a cluster.

In: import paths of plain classes with an async classmethod `open`. Out: `Hosted`, whose `call` awaits `open`, and then
methods of what it made; or `HostedGroup`, several ranks. Only this module, `placement` and `worker_process` know Ray.

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
import functools
import logging
import os
import re
import secrets
import signal
import threading
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.ports import ray_of_our_own
from infra.ray.liveness import RayLost, Watch
from infra.ray.placement import (
    Placement,
    bundle,
    check_cluster_answers,
    end_ray,
    gpu_share,
    node_resources,
    num_slots,
    on_node,
)
from infra.ray.worker_process import Host, run_function
from infra.scratch import scratch_folder, worker_environment
from settings.errors import UserError, disk_full, failure_text_of_output, in_one_line, is_disk_full
from settings.places.state_folder import written_places
from settings.redaction import redact_error, without_secrets

logger = logging.getLogger("millrace.cluster")

LAG_SECONDS = 10.0
"""How long after one rank has failed the others may take to fail too."""

_SYSTEM_CONFIG = {
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
    "worker_register_timeout_seconds": 600,  # it may wait for what it is a fork of
}
_HEADER = "Traceback (most recent call last):"
_BETWEEN = r"python/ray/|[^\"]*/(?:site-packages/ray/|concurrent/futures/_base\.py|infra/ray/worker_process\.py)"
_CALLERS_FRAME = re.compile(rf'^((?: *\|)?) +File "(?:{_BETWEEN}).*\n(?:\1 {{4}}.*\n)*', re.MULTILINE)
"""A frame of Ray's or ours between the process's start and the method that was called, with its lines of code."""


class WorkerDied(UserError):
    """A hosted worker's process is gone; the message names it and its log file."""


class StartFailed(UserError):
    """A hosted object could not be opened; the message has its error and its log file."""


class RaisedInWorker(Exception):
    """What a worker raised was of a class that cannot come to this process; the message has its name and words."""


@dataclass(eq=False)
class Hosted:
    """A handle to an object in another process, and to the place that is given back when the process ends."""

    name: str
    log_file: Path
    _actor: Any
    _watch: Watch
    _placement: Placement | None = None

    async def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Await `method(*arguments, **keywords)` of the object.

        Raises what it raised, as its own type, with its traceback as a note; `RaisedInWorker` if that type cannot come
        to this process; `StartFailed` if it is no `UserError` and `open` raised it; `WorkerDied` when the process is
        gone; `RayLost` when Ray is.
        """
        try:
            return await self._awaited(self._actor.call.remote(method, arguments, keywords), method)
        except Exception as error:
            if method != "open" or isinstance(error, UserError):
                raise
            cause = in_one_line(failure_text_of_output(error.__notes__[-1]), whole=True)
            raise StartFailed(f"{self.name} could not start: {cause}; its log is {self.log_file}") from error

    async def rendezvous(self) -> tuple[str, int]:
        """Address of the process's node and a port that is free there."""
        address, port = await self._awaited(self._actor.rendezvous.remote(), "rendezvous")
        return str(address), int(port)

    async def prepare(self, environment: dict[str, str]) -> None:
        """Set environment variables of the process before the object is opened."""
        await self._awaited(self._actor.prepare.remote(environment), "prepare")

    def kill(self) -> None:
        """End the process at once."""
        import ray

        ray.kill(self._actor)
        self.give_back()

    def give_back(self) -> None:
        """Free the place of a process that has ended."""
        if self._placement is not None:
            self._placement.give_back()

    async def _awaited(self, reply: Any, method: str) -> Any:
        from ray.exceptions import RayActorError

        try:
            return await _result(reply, self.name, self._watch)
        except RayActorError as error:
            if reason := self._watch.raylet_is_gone():
                raise RayLost(reason) from error
            self.give_back()
            raise WorkerDied(f"{self.name} died during {method}(); its log is {self.log_file}") from error


class HostedGroup:
    """The same object in several processes that compute as one. If one fails and the others do not, all end."""

    def __init__(self, name: str, ranks: Sequence[Hosted], placement: Placement) -> None:
        self.name = name
        self.log_file = ranks[0].log_file
        self._ranks = ranks
        self._placement = placement
        self._ended = ""

    async def introduce(self) -> None:
        """Tell every rank its number and where rank 0 listens. If one is gone the group ends and `WorkerDied` rises."""
        try:
            address, port = await self.rendezvous()
            shared = {"WORLD_SIZE": str(len(self._ranks)), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
            shared["LOCAL_RANK"] = "0"  # among the GPUs that Ray lets a process see: its own
            await asyncio.gather(*(rank.prepare({**shared, "RANK": str(n)}) for n, rank in enumerate(self._ranks)))
        except WorkerDied as death:
            self._end(str(death))
            raise

    async def prepare(self, environment: dict[str, str]) -> None:
        """Set environment variables of every rank."""
        await asyncio.gather(*(rank.prepare(environment) for rank in self._ranks))

    async def rendezvous(self) -> tuple[str, int]:
        """Address of rank 0's node and a port that is free there."""
        return await self._ranks[0].rendezvous()

    async def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Await `method(*arguments, **keywords)` on every rank; returns what rank 0 does.

        Raises what a rank raised, with a note that names the rank; an error with an attribute `rank` stands for that
        rank's error. If the others do not fail too within `LAG_SECONDS`, or a process is gone (`WorkerDied`), all
        processes are killed, and later calls raise `WorkerDied`.
        """
        if self._ended:
            raise WorkerDied(f"{self.name} cannot do {method}() any more: {self._ended}")
        calls = [asyncio.ensure_future(rank.call(method, *arguments, **keywords)) for rank in self._ranks]
        try:
            done, running = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            if running:
                await asyncio.wait(running, timeout=LAG_SECONDS)
        finally:
            for call in calls:
                call.cancel()
        errors = {rank: e for rank, c in enumerate(calls) if c.done() and not c.cancelled() and (e := c.exception())}
        if not errors:
            return calls[0].result()
        deaths = [rank for rank, error in errors.items() if isinstance(error, WorkerDied)]
        raised = [error.__cause__ if isinstance(error, StartFailed) else error for error in errors.values()]
        followed = [rank for error in raised if (rank := getattr(error, "rank", None)) in errors]
        # If all fail alike it is rank 0's error, else the earliest.
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
        self.give_back()

    def give_back(self) -> None:
        """Free the places of all ranks."""
        self._placement.give_back()


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
        address = os.environ.get("RAY_ADDRESS") or "local"
        await asyncio.to_thread(check_cluster_answers, address)
        options: dict[str, Any] = {"address": address, "logging_level": logging.ERROR}
        options |= {"log_to_driver": False, "configure_logging": False}
        if address == "local":
            # A cluster of our own has a token of its own: Ray would write one into the user's home, and warn of it.
            logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
            if "RAY_AUTH_TOKEN_PATH" not in os.environ:
                os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            scratch = self._opened.enter_context(scratch_folder(self._home))
            self._environment = worker_environment(scratch)
            options |= {
                "_temp_dir": str(scratch),
                "include_dashboard": False,
                "num_cpus": num_slots(),
                "object_store_memory": 128 * 2**20,
                "_system_config": _SYSTEM_CONFIG,
            }
        # Ray replaces it by one that aborts with a page of addresses. Ours cancels, Prefect's knows its Cancel.
        handler = signal.getsignal(signal.SIGTERM)
        # Ray would print the last page of a dead raylet's log.
        ray._private.worker.print_to_stdstream = functools.partial(_keep, self._log_folder / "ray.log")
        try:
            with ray_of_our_own() if address == "local" else contextlib.nullcontext():
                ray.init(**options)
        except BaseException as error:
            self._opened.close()
            if not isinstance(error, Exception):
                raise
            raise StartFailed(f"Ray could not start: {in_one_line(str(error))}") from error
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
        node = ray._private.worker._global_node
        self._watch = Watch(node.raylet_socket_name, node.gcs_address, None if address == "local" else self._host_on)
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
            return await _result(remote.remote(path, arguments, log_file, self._environment), name, self._watch)
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


def _keep(file: Path, message: dict[str, Any], **_: Any) -> None:
    """Append Ray's messages to a log file; of those that matter `Hosted.call` raises errors."""
    with contextlib.suppress(OSError), open(file, "a") as log:
        log.writelines(f"{line}\n" for line in message["lines"])


async def _result(reply: Awaitable[Any], name: str, watch: Watch) -> Any:
    """What the process `name` returns. What it raised there is raised here, its traceback as a note."""
    from ray.exceptions import RayError, RayTaskError, UnserializableException

    try:
        return await watch.unless_lost(reply)
    except (RayTaskError, UnserializableException) as error:
        text = str(error).rpartition("Original exception:\n")[2]
        text = re.sub(r"^.*ray::.*$", _HEADER, text, count=1, flags=re.MULTILINE)  # Ray's own first line
        text = without_secrets(_CALLERS_FRAME.sub("", text))
        raised = getattr(error, "cause", None)
        if raised is None or isinstance(raised, RayError):
            message = failure_text_of_output(text).partition("\n  at ")[0]
            raised = RaisedInWorker(re.sub(r"^(?:\w+\.)+(?=\w+(?::|$))", "", message))
        if is_disk_full(raised):
            raised = disk_full(raised, written_places()) or raised
        redact_error(raised)  # as a task's state, Prefect records it
        raised.add_note(f"{name} raised it:\n{text.strip()}")
        raise raised from None


async def close(hosted: Hosted | HostedGroup) -> None:
    """Let a worker end in its own way, if it still answers."""
    try:
        async with asyncio.timeout(20):
            await hosted.call("close")
    except RayLost:
        return  # the run says so, and there is no place to give back
    except (WorkerDied, TimeoutError, AttributeError) as error:
        logger.warning("%s did not close: %s", hosted.name, str(error) or "no answer for 20 s")
    hosted.give_back()
