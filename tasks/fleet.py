"""The rollout workers of one session, what they serve, and the replacement of dead ones.

    start ─▶ take_part ─▶ collect, collect, … ─▶ dies ─▶ leave: its prompts are free ─▶ another one starts
                              ▲ swap or broadcast: a new policy under the running requests

In: the run's log, its settings, and processes on a cluster. Out: workers in `Fleet.workers`, and entries in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
from collections.abc import Awaitable, Iterable, Sequence
from typing import TypeVar

from infra.devices import has_cores_for
from infra.environment import cache_folder, code_version
from infra.ray.cluster import Cluster
from infra.ray.hosted import Hosted, WorkerDied
from infra.ray.placement import gpus_of
from infra.weight_broadcast import Broadcast
from rollouts.engines.engine import WeightUpdate
from rollouts.production.failures import Failures
from settings.errors import InvalidInput, counted
from settings.evaluation import EvaluationSettings
from settings.places.hints import command
from settings.run_file import RunConfig
from storage.log.claims import due_version
from storage.log.entries import Alias, Evaluation, Policy, Shard
from storage.log.producers import Lookout, withdraw
from storage.log.run_log import RunLog
from storage.policies.policies import PolicyReader
from storage.shards.failed_attempts import read_failures
from tasks.phases import SharedDevice
from tasks.trainer import TrainerHandle

logger = logging.getLogger("millrace.workers")

ROLLOUT_ALIAS = "rollout"
REPLACEMENTS = 3
"""Workers that may die in a row, without a shard in between, before a run gives up."""
_ANSWER_SECONDS = 10.0
_LARGE = 100 * 10**6
"""Bytes of weights from which an engine is worth a thread more. Smaller models' kernels wait for each other longer than
they compute, and one thread is left to vLLM's front end and rewards."""

Result = TypeVar("Result")


def engine_threads(num_threads: int, num_engines: int, *, max_staleness: float, weights_bytes: int) -> int:
    """Threads of one of several engines on a machine's processors. At staleness 0 the trainer waits while they compute,
    and they divide all threads; else it computes beside them, and they leave one.

    >>> [engine_threads(8, engines, max_staleness=0, weights_bytes=10**9) for engines in (1, 2)]
    [8, 4]
    >>> engine_threads(8, 2, max_staleness=1, weights_bytes=10**9)
    3
    """
    alone = max_staleness == 0 and weights_bytes >= _LARGE
    return max(1, (num_threads if alone else num_threads - 1) // num_engines)


class Fleet:
    """Processes with an engine. Workers are called `names` and a number."""

    def __init__(
        self,
        log: RunLog,
        cluster: Cluster,
        *,
        config: RunConfig,
        device: SharedDevice,
        num_engines: int = 1,
        names: str = "rollout",
        outside: bool = False,
    ) -> None:
        """`num_engines` are to run at the same time. `outside`: another process than the driver's starts them."""
        self.log = log
        self.cluster = cluster
        self.config = config
        self.hosted: dict[str, Hosted] = {}
        """Every process with an engine, by name."""
        self.workers: dict[str, Hosted] = {}
        """The rollout workers that produce, by name."""
        self.evaluator: Hosted | None = None
        """The worker that does nothing but evaluate; None when a rollout worker does it beside its own work."""
        self.arrivals = asyncio.Event()
        """Set whenever a worker of this session has committed a shard."""
        self._device = device
        self._num_engines = num_engines
        self._outside = outside
        self._numbered = (f"{names}-{number}" for number in itertools.count())
        self._first: list[str] = []
        self._has_workers = asyncio.Event()
        self._replacements_left = REPLACEMENTS
        self._proofs: dict[str, str] = {}
        """Checksum of weights → `Engine.proof` under them."""
        self._lookout = Lookout(log)
        self._failures = Failures()

    # ── Starting and replacing ──────────────────────────────────────────────────────────────────────────────────────

    def next_name(self) -> str:
        """A name that no rollout worker of this session has had."""
        return next(self._numbered)

    def first_names(self, num_workers: int) -> list[str]:
        """Those of the session's first workers, the same ones each time."""
        while len(self._first) < num_workers:
            self._first.append(self.next_name())
        return self._first[:num_workers]

    def leaves_cores(self, num_ranks: int) -> bool:
        """Whether so many ranks of a trainer may start beside the engines, each with a core of this machine for what it
        imports; of an engine there are two processes."""
        return has_cores_for(2 * self._num_engines + num_ranks)

    async def start(self, name: str, *, version: int | None = None) -> str:
        """Load a policy, the due one by default, into a new worker's engine; returns the checksum of its weights.

        Empty if the engine serves an older policy because the live one is damaged. It produces once it joins.
        Raises `InvalidInput` if the run is to be reproducible and this engine computes other bits than another one.
        """
        path, num_gpus = "rollouts.production.worker:RolloutWorker", self.cluster.gpus_per_engine
        self.hosted[name] = hosted = await self.cluster.host(name, path, num_gpus=num_gpus)
        on = ""
        if not num_gpus:
            all_threads = int(os.environ["OMP_NUM_THREADS"])
            staleness, weights_bytes = self.config.max_staleness, self._weights_bytes()
            threads = engine_threads(
                all_threads, self._num_engines, max_staleness=staleness, weights_bytes=weights_bytes
            )
            on = f" with {threads} of {counted(all_threads, 'thread')}"
            await hosted.prepare({"OMP_NUM_THREADS": str(threads)})
        version = self.due_version() if version is None else version
        paths = {"store_uri": self.log.store.uri, "cache": str(cache_folder())}
        facts = {"name": name, "code_version": code_version(), "outside": self._outside, "version": version}
        async with self._device.starting(name, hosted):
            logger.info("starting the inference engine of %s%s", name, on)
            checksum = str(await hosted.call("open", self.config, **paths, **facts))
        if self.config.reproducible and checksum:
            proof = str(await hosted.call("proof"))
            if self._proofs.setdefault(checksum, proof) != proof:
                raise InvalidInput(
                    f"reproducible = true: the engine of {name} computes other bits than the one before it, from the "
                    "same weights; use nodes with one kind of processor"
                )
        return checksum

    def _weights_bytes(self) -> int:
        files = self.log.store.walk(self.log.state.policies[0].path)
        return sum(file.num_bytes for file in files if file.key.endswith(".safetensors"))

    async def take_part(self, names: Sequence[str]) -> None:
        """Started workers produce from now on, and divide what may be in flight among them."""
        for name in names:
            await self.hosted[name].call("join")
        self.workers |= {name: self.hosted[name] for name in names}
        if names:
            self._has_workers.set()

    async def join(self, name: str) -> None:
        """A started worker takes part from now on, with the newest policy that engines serve."""
        await self.take_part([name])
        if (served := self.served(refresh=True)) is not None:  # one may have been published while it was starting
            await self.workers[name].call("publish", served, wakes=False)

    async def leave(self, name: str, *, death: WorkerDied) -> bool:
        """Free a dead worker's prompts; returns whether another may start. Raises `death` when too many have died."""
        self.workers.pop(name, None)
        if not self.workers:
            self._has_workers.clear()
        withdraw(self.log, name, reason=str(death))
        await self.refresh()
        self._replacements_left -= 1
        if self._replacements_left >= 0:
            logger.warning("%s; its prompts run elsewhere, another worker takes its place", death)
            return True
        if not self.workers:
            raise death
        logger.warning("%s; %d in a row: the run goes on with %d workers", death, REPLACEMENTS, len(self.workers))
        return False

    async def release_silent(self) -> None:
        """Give the prompts of producers elsewhere to others after `rollout.lease_timeout` without a sign of life."""
        silent = self._lookout.silent(patience=self.config.rollout.lease_timeout)
        for name, seconds in silent.items():
            reason = f"no sign of life for {seconds:.0f} s"
            logger.warning("%s: %s; its prompts run elsewhere", name, reason)
            withdraw(self.log, name, reason=reason)
        if silent:
            await self.refresh()

    # ── Producing and evaluating ────────────────────────────────────────────────────────────────────────────────────

    async def collect(self, name: str) -> Shard | None:
        """The next shard of one worker; None when nothing could run."""
        shard: Shard | None = await self.workers[name].call("collect")
        self.arrivals.set()
        if shard is not None:
            self._replacements_left = REPLACEMENTS
            self._failures.add(await asyncio.to_thread(read_failures, self.log, [shard]))
            await self.refresh(but=name)  # what was rejected is room for all
        return shard

    async def refresh(self, *, but: str = "") -> None:
        """Let the workers look at the log again: it may leave room for more."""
        await _of_the_living(worker.call("refresh") for name, worker in self.workers.items() if name != but)

    async def wait_for_stragglers(self, *, version: int) -> None:
        """Let groups finish that the step on policy `version` would make too stale, while their engines are busy."""
        await _of_the_living(worker.call("wait_for_stragglers", version) for worker in self.workers.values())

    async def evaluate(self, *, version: int, settings: EvaluationSettings, adopt_tasks: bool = False) -> Evaluation:
        """The held-out score of a policy version, by the evaluator, or by a worker whose engine serves this version."""
        evaluation: Evaluation
        if self.evaluator is not None:
            evaluation = await self.evaluator.call("evaluate", settings, version, adopt_tasks=adopt_tasks)
        else:
            await self._has_workers.wait()
            evaluation = await next(iter(self.workers.values())).call("evaluate", settings)
        return evaluation

    # ── What they serve ─────────────────────────────────────────────────────────────────────────────────────────────

    def served(self, *, refresh: bool = False) -> Policy | None:
        """The policy that engines are to serve; None before the driver has said so."""
        state = self.log.refresh() if refresh else self.log.state
        alias = state.aliases.get(ROLLOUT_ALIAS)
        return None if alias is None else state.policies[alias.version]

    def due_version(self) -> int:
        """The policy that engines are to serve from now on; see `storage.log.claims.due_version`."""
        return due_version(self.log.refresh(), self.config)

    def unserved(self) -> list[Policy]:
        """Policies that engines are to serve next, one after another: the newest, or all since the served one in a
        fixed schedule. Policies inside an update, see `train.steps_per_update`, are never served, but for the last."""
        state, config, served = self.log.state, self.config, self.served()
        newest = state.newest_version
        first = newest if config.rollout.schedule == "free" or served is None else served.version + 1
        last, every = config.steps, config.train.steps_per_update
        versions = [v for v in range(first, newest + 1) if v % every == 0 or v == last]
        return [state.policies[v] for v in versions if served is None or v > served.version]

    def newest_is_served(self) -> bool:
        """Whether the alias `rollout` is on the live policy, and the store has that one whole."""
        live = self.log.state.live  # if it is damaged, a trainer that starts makes it anew
        return live is not None and self.served() == live and not PolicyReader(self.log, cache_folder()).damage_of(live)

    def mark_served(self, checksums: Sequence[str], *, version: int) -> None:
        """Put the alias `rollout` on this policy; warn when an engine holds other weights under its version."""
        recorded = self.log.refresh().aliases.get(ROLLOUT_ALIAS)
        is_recorded = recorded is not None and recorded.version == version
        if not checksums and not is_recorded:  # only producers elsewhere, which go by the alias
            self.log.append(Alias(name=ROLLOUT_ALIAS, version=version, checksum=""))
        serving = [checksum for checksum in checksums if checksum]
        if not serving:
            return  # each of them goes on to the live policy as soon as it can, or says why it cannot
        expected = recorded.checksum if recorded is not None and is_recorded else ""
        if _kind(expected) != _kind(serving[0]):  # recorded by an earlier version
            expected = ""
        if set(serving) != {expected or serving[0]}:
            logger.warning("an engine's checksum of policy %d differs from another's", version)
        self.log.append(Alias(name=ROLLOUT_ALIAS, version=version, checksum=serving[0]))
        logger.info("policy %d is served by %s", version, counted(len(serving), "engine"))

    async def publish(self, policy: Policy, trainer: TrainerHandle) -> None:
        """Swap the weights of every engine and move the alias `rollout`, by which engines elsewhere go."""
        if (updates := await self._broadcast(policy, trainer)) is None:
            updates = await self.swap(policy)
        if not updates:  # what takes the place of the dead starts with it, or hears of it by the alias
            self.log.append(Alias(name=ROLLOUT_ALIAS, version=policy.version, checksum=""))
        if carried_out := [update for update in updates if update is not None]:
            first = carried_out[0]
            self.log.append(
                Alias(
                    name=ROLLOUT_ALIAS,
                    version=policy.version,
                    checksum=first.checksum,
                    update_mode=first.mode,
                    cache_cleared=first.cache_cleared,
                    paused_seconds=max(update.paused_seconds for update in carried_out),
                    transfer=first.transfer,
                )
            )

    def check_transfer(self) -> None:
        """Raise `InvalidInput` when policies are to be broadcast by NCCL and GPUs cannot be joined by it."""
        own_gpus = self.cluster.gpus_per_worker >= 1 and self.config.train.device != "cpu"
        if self.config.engine.weight_transfer == "nccl" and not own_gpus:
            raise InvalidInput(
                "engine.weight_transfer = 'nccl' needs a GPU of its own for the trainer and for each engine; there are "
                f"{gpus_of(self.cluster.nodes):g}. Use 'gloo', or leave it out"
            )

    async def swap(self, policy: Policy) -> list[WeightUpdate | None]:
        """Serve a policy from the store; returns each living worker's reply. `produce` replaces the dead."""
        return await _of_the_living(worker.call("publish", policy) for worker in self.workers.values())

    async def _broadcast(self, policy: Policy, trainer: TrainerHandle) -> list[WeightUpdate | None] | None:
        """`swap`, with the weights straight from the trainer. None when not all can take part at once."""
        workers, engine = list(self.workers.values()), self.config.engine
        if engine.weight_transfer == "store" or not workers:
            return None
        ready = [trainer.call("can_send", policy.version), *(worker.call("can_receive") for worker in workers)]
        if any(reply is not True for reply in await asyncio.gather(*ready, return_exceptions=True)):
            return None
        try:
            host, port = await trainer.rendezvous()
        except WorkerDied:
            return None
        broadcast = Broadcast(
            host=host,
            port=port,
            backend=engine.weight_transfer,
            version=policy.version,
            weights_sha256=policy.weights_sha256,
            num_receivers=len(workers) * engine.num_gpus,
        )
        receiving = (
            worker.call("receive", policy, dataclasses.replace(broadcast, first_rank=1 + number * engine.num_gpus))
            for number, worker in enumerate(workers)
        )
        _, replies = await asyncio.gather(
            asyncio.gather(trainer.call("send_policy", broadcast), return_exceptions=True), _of_the_living(receiving)
        )
        return replies

    # ── Where they stand ────────────────────────────────────────────────────────────────────────────────────────────

    async def report(self) -> str:
        """Workers, queue, versions, oldest episode, and what each task of each worker is waiting for."""
        state = self.log.state
        live = state.live.version if state.live else "none"
        ready = f"{counted(state.pending_accepted, 'group')} ready, {len(state.leased)} leased"
        queue = f"step {state.step}, live policy {live}, {ready}"
        if elsewhere := [join.holder for join in state.producers.values() if join.outside]:
            queue += f", producers elsewhere: {', '.join(elsewhere)}"
        elif not self.workers:
            produce = command("produce", self.log.run_id, store=self.log.store.uri)
            queue += f"; nothing produces: `{produce}` on another machine starts a producer"
        hosted = [*self.workers.values(), *([self.evaluator] if self.evaluator else [])]
        return "\n".join([queue, *await asyncio.gather(*map(_report, hosted))])

    async def num_finished(self) -> int:
        """Groups that all workers have finished so far; a worker that does not answer adds nothing."""
        return sum(await asyncio.gather(*map(_progress, self.workers.values())))

    async def close(self) -> None:
        """Let every process of the session end, the trainer's and Ray's too."""
        await self.cluster.close()


async def _of_the_living(calls: Iterable[Awaitable[Result]]) -> list[Result]:
    """The replies of living workers. Raises the first other error."""
    replies = await asyncio.gather(*calls, return_exceptions=True)
    for reply in replies:
        if isinstance(reply, BaseException) and not isinstance(reply, WorkerDied):
            raise reply
    return [reply for reply in replies if not isinstance(reply, BaseException)]


def _kind(checksum: str) -> str:
    """How a checksum was made: what it begins with."""
    return checksum.rpartition(":")[0]


async def _report(worker: Hosted) -> str:
    try:
        return f"{worker.name}: {await asyncio.wait_for(worker.call('report'), _ANSWER_SECONDS)}"
    except TimeoutError:
        return f"{worker.name} does not answer: see the stacks in its log, {worker.log_file}"
    except WorkerDied as death:
        return str(death)


async def _progress(worker: Hosted) -> int:
    with contextlib.suppress(TimeoutError, WorkerDied):
        return int(await asyncio.wait_for(worker.call("progress"), _ANSWER_SECONDS))
    return 0
