"""One start of a run: the log, and the parts that work on it.

    RunSession ─┬─ log        what is true about the run
                ├─ fleet      rollout workers, evaluator, what they serve
                ├─ trainer    the trainer's processes
                ├─ device     whose turn it is on a GPU that engine and trainer share
                ├─ clock      where the time of a round went
                ├─ progress   lines on the flow run's page in Prefect
                ├─ mirror     MLflow, kept up to the log
                ├─ housekeeping  what the store need not keep goes
                └─ page       the run's page in Prefect

In: the run's settings. Out: a session that the flow's tasks share. What must outlive the process is in the run's log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, TypeVar

from infra.devices import num_gpus
from infra.environment import code_version, prepare_environment
from infra.ray.cluster import Cluster
from infra.ray.placement import check_shares
from infra.structured_logs import log_driver, logs_are_json
from infra.user_code import source_sha256
from rollouts.production.prompts import task_set
from settings.errors import DiskFull, failure_text, is_disk_full
from settings.places.state_folder import home, store_uri
from settings.redaction import redact_error
from settings.run_file import RunConfig, default_values
from storage.log.entries import End, Outcome, Session
from storage.log.run_log import RunLog
from storage.log.runs import create_run, open_run, trainer_lock
from storage.objects.opening import open_store
from storage.retention.retention import reading
from tasks.checks.gpu_share import with_share
from tasks.checks.memory_plan import Memory, memory_plan, planned, with_engine_share
from tasks.checks.preflight import about_model
from tasks.clock import PeakMemory, RoundClock
from tasks.fleet import Fleet
from tasks.maintain import Housekeeping
from tasks.mirror import TrackingMirror
from tasks.phases import SharedDevice
from tasks.prefect.outages import prefect_answers, say_outages_once
from tasks.prefect.own_flow_run import cancellable, is_stop
from tasks.prefect.run_logs import Progress
from tasks.prefect.run_page import RunPage
from tasks.prefect.task_runs import cut_off_is_cancelled, expect_task_runs
from tasks.trainer import TrainerHandle

logger = logging.getLogger("millrace.session")

Result = TypeVar("Result")

LAST_WORDS_SECONDS = 8.0
"""How long MLflow has to answer when a run stops or fails: Prefect kills a process 30 s after Cancel."""


class RunSession:
    """What the tasks of one flow run share. A plain object on purpose: Prefect would walk into a dataclass."""

    def __init__(
        self,
        log: RunLog,
        cluster: Cluster,
        config: RunConfig,
        *,
        memory: PeakMemory,
        id: str = "",
        tracking: str = "",
        num_engines: int = 1,
        names: str = "rollout",
        outside: bool = False,
        planned: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """`id` is that of the `Session` entry in the log, empty if it does not train; for `planned` see `RoundClock`,
        for the rest `Fleet`."""
        self.id = id
        self.log = log
        self.trainer = trainer = TrainerHandle(log, cluster)
        self.device = SharedDevice(
            lambda: trainer if trainer.is_open else None,
            in_phases=config.engine.share == "phases",
            seconds=config.rollout.stall_timeout,
        )
        engines: dict[str, Any] = {"num_engines": num_engines, "names": names, "outside": outside}
        self.fleet = Fleet(log, cluster, config=config, device=self.device, **engines)
        self.clock = RoundClock(memory, planned)
        self.progress = Progress(config.steps)
        mirror = self.mirror = TrackingMirror(log, tracking=tracking, is_trainer=bool(id))
        self.housekeeping = Housekeeping(mirror.log, config)
        self.page = RunPage(log, steps=config.steps, tracking=mirror.uri, mlflow_run=lambda: mirror.run_page)
        self._before_flow_run = False
        self._begun: dict[str, asyncio.Future[Any]] = {}
        self._is_over = False

    def once(self, name: str, work: Callable[[], Awaitable[Result]]) -> Awaitable[Result]:
        """The work of a Prefect task. If it began before the flow run, the task waits for what has begun; if that has
        failed, the task's next try does the work anew."""
        begun = self._begun.pop(name, None)
        if not self._before_flow_run:
            return work() if begun is None else begun
        self._begun[name] = asyncio.ensure_future(work())
        return self._begun[name]

    @contextlib.contextmanager
    def before_flow_run(self) -> Iterator[None]:
        """What is done by `once` inside is kept for the tasks of the flow run."""
        self._before_flow_run = True
        try:
            yield
        finally:
            self._before_flow_run = False

    def end(self, outcome: Outcome, reason: str = "") -> None:
        """Say in the log how this session ended; only its first word counts."""
        self.log.append(End(session_id=self.id, outcome=outcome, reason=reason))

    @contextlib.asynccontextmanager
    async def ending(self) -> AsyncIterator[None]:
        """After the body, and what it started, is over: say how in the log, and bring MLflow and Prefect's page to it.

        A session that does not train says nothing. When the run stops or fails, MLflow has `LAST_WORDS_SECONDS`. Of one
        inside another the inner one says it.
        """
        try:
            yield
            if self.id and not self._is_over:
                self.end("finished")
        except BaseException as error:
            redact_error(error)
            if self.id and not self._is_over:
                await self._give_up(error)
            raise
        finally:
            if not self._is_over and await prefect_answers() and self.id:
                await self.page.update(finished=True)
            self._is_over = True

    async def _give_up(self, error: BaseException) -> None:
        try:
            self.end(*(("stopped",) if is_stop(error) else ("failed", failure_text(error))))
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                await self.mirror.tell()
        except Exception as problem:  # noqa: BLE001 - the error itself is what a person has to hear of
            if isinstance(problem, DiskFull) and is_disk_full(error):
                return  # the command says it
            why = f"no answer in {LAST_WORDS_SECONDS:g} s" if isinstance(problem, TimeoutError) else repr(problem)
            logger.warning("the end of this session could not be told to everyone (%s); the next start tells it", why)


def _prepare() -> None:
    prepare_environment()
    say_outages_once(os.environ.get("PREFECT_API_URL", "its address in this process"))


OPENED: ContextVar[RunSession | None] = ContextVar("opened", default=None)
"""Set if a command has opened the session of the flow that it starts."""


@contextlib.asynccontextmanager
async def in_flow_run(opening: contextlib.AbstractAsyncContextManager[RunSession]) -> AsyncIterator[RunSession]:
    """The session of a flow run: the one that a command has opened, and begun to work with, or else `opening`'s."""
    opened = OPENED.get()
    cut_off_is_cancelled()
    own = opening if opened is None else contextlib.nullcontext(opened)
    async with own as session, cancellable(), session.ending():
        try:
            yield session
        finally:
            await session.fleet.close()
            expect_task_runs()


def run_log(*, store: str, run: str, appends: bool = False) -> RunLog:
    """The log of an existing run; `appends` as in `open_run`. Raises `NotFound` for an unknown run."""
    return open_run(open_store(store_uri(store)), run, appends=appends)


@contextlib.asynccontextmanager
async def training_session(
    config: RunConfig, *, tasks: Mapping[str, Sequence[Any]], adopt_tasks: bool = False
) -> AsyncIterator[RunSession]:
    """Create or reopen a run, take its trainer lock, and make room for its engines and the trainer.

    `tasks` are those of each split; see `rollouts.production.prompts.task_set`. Raises `RunExists`, `RunBusy`,
    `StoreError`, and `InvalidInput` for other tasks than before and for too few GPUs, before anything heavy starts.
    """
    _prepare()
    store = open_store(store_uri(config.store))
    document = config.model_dump(mode="json")
    log = create_run(store, config.run, document, defaults=default_values(document))
    with trainer_lock(log):
        sets = {
            split: task_set(log.state, members, run=log.run_id, split=split, adopt=adopt_tasks)
            for split, members in tasks.items()
        }
        entry = Session(
            id=uuid.uuid4().hex[:12],
            code_version=code_version(),
            reward_sha256=source_sha256(config.workflow),
            steps=config.steps,
            register=str(config.tracking.register),
            also=tuple(config.tracking.also),
            tasks=sets.pop("train"),
            held_out=sets,
            host=platform.node(),
        )
        is_known = bool(log.state.sessions)
        log.append(entry)
        if is_known:
            logger.info("continuing run %s after step %d", log.run_id, log.state.step)
        if logs_are_json():
            log_driver(lambda: {"run": log.run_id, "session": entry.id, "step": log.state.step + 1}, sys.stderr)
        num_engines = config.rollout.num_workers + config.evaluation.own_engine
        options: dict[str, Any] = {"id": entry.id, "tracking": config.tracking.uri, "num_engines": num_engines}
        async with _session(log, config, trains=True, **options) as session:
            yield session


@contextlib.asynccontextmanager
async def reading_session(
    config: RunConfig, *, store: str, what: str, tracking: str = "", trains: bool = False
) -> AsyncIterator[RunSession]:
    """Open an existing run beside the process that trains it, without a lock; retention waits until `what` is over.

    There is room for one engine, or for a trainer if it `trains`. Raises `NotFound` for an unknown run.
    """
    _prepare()
    log, num_engines = run_log(store=store, run=config.run, appends=not trains), 0 if trains else 1
    with reading(log, what):
        async with _session(log, config, trains=trains, tracking=tracking, num_engines=num_engines) as session:
            yield session


def producing_session(
    config: RunConfig, *, store: str, name: str
) -> contextlib.AbstractAsyncContextManager[RunSession]:
    """Open an existing run to work for its driver, perhaps on another machine; only the store is shared.

    Retention does not wait for it: it reads policies that have the alias `rollout`. Its workers are called `name` and
    something random, so that no two have one name. Raises `NotFound` for an unknown run.
    """
    _prepare()
    log = run_log(store=store, run=config.run, appends=True)
    return _session(log, config, trains=False, names=f"{name}-{uuid.uuid4().hex[:6]}", outside=True)


@contextlib.asynccontextmanager
async def _session(
    log: RunLog, config: RunConfig, *, trains: bool, num_engines: int = 1, **options: Any
) -> AsyncIterator[RunSession]:
    """Processes with GPUs are the engines, and the trainer's ranks unless they compute on the CPU."""
    num_ranks = config.train.num_ranks if trains and config.train.device != "cpu" else 0
    gpus_per_engine = config.engine.num_gpus if num_engines else 1
    shares = max(1, num_engines * gpus_per_engine + num_ranks)
    config = with_share(config, num_gpus(), trains=trains)
    about, here = about_model(config), Memory.of_this_machine()
    config = with_engine_share(config, about, here, trains=trains)
    options["planned"] = planned(memory_plan(config, about, here, trains=trains))
    places = {"log_folder": home() / "logs" / log.run_id, "home": home()}
    cluster = Cluster(**places, num_workers=shares, gpus_per_engine=gpus_per_engine)
    with PeakMemory() as memory:
        session = RunSession(log, cluster, config, memory=memory, num_engines=max(1, num_engines), **options)
        async with session.ending(), cluster:
            check_shares(cluster.nodes, num_workers=shares, gpus_per_engine=gpus_per_engine, num_ranks=num_ranks)
            yield session
