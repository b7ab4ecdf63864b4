"""One start of a run: the log, and the four parts that work on it.

    RunSession ─┬─ log        what is true about the run
                ├─ fleet      rollout workers, evaluator, what they serve
                ├─ trainer    the trainer's processes
                ├─ clock      where the time of a round went
                └─ mirror     MLflow, kept up to the log

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
from collections.abc import AsyncIterator
from typing import Any

from infra.cluster import Cluster
from infra.environment import code_version, prepare_environment
from infra.placement import check_shares
from infra.structured_logs import log_driver, logs_are_json
from infra.user_code import source_sha256
from settings.errors import UserError, failure_text, in_one_line
from settings.places.state_folder import home, store_uri
from settings.run_file import RunConfig, default_values
from storage.log.entries import End, Session
from storage.log.run_log import RunLog
from storage.log.runs import create_run, open_run, trainer_lock
from storage.objects.opening import open_store
from storage.retention.retention import reading
from tasks.clock import PeakMemory, RoundClock
from tasks.fleet import Fleet
from tasks.mirror import TrackingMirror
from tasks.prefect.outages import say_outages_once
from tasks.trainer import TrainerHandle

logger = logging.getLogger("millrace.session")
SECONDS_TO_RECORD = 5.0


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
    ) -> None:
        """`id` is that of the `Session` entry in the log, empty if it does not train; for the rest see `Fleet`."""
        self.id = id
        self.log = log
        self.fleet = Fleet(log, cluster, config=config, num_engines=num_engines, names=names, outside=outside)
        self.trainer = TrainerHandle(log, cluster)
        self.clock = RoundClock(memory)
        self.mirror = TrackingMirror(log, tracking=tracking, is_trainer=bool(id))


def run_log(*, store: str, run: str) -> RunLog:
    """The log of an existing run. Raises `NotFound` for an unknown run."""
    return open_run(open_store(store_uri(store)), run)


@contextlib.asynccontextmanager
async def training_session(config: RunConfig) -> AsyncIterator[RunSession]:
    """Create or reopen a run, take its trainer lock, and make room for its engines and the trainer.

    Raises `RunExists`, `RunBusy`, `StoreError`, and `InvalidInput` for too few GPUs, before anything heavy starts.
    """
    prepare_environment()
    say_outages_once(os.environ.get("PREFECT_API_URL", "its address in this process"))
    store = open_store(store_uri(config.store))
    log = create_run(store, config.run, config.model_dump(mode="json"), defaults=default_values())
    with trainer_lock(log):
        entry = Session(
            id=uuid.uuid4().hex[:12],
            code_version=code_version(),
            reward_sha256=source_sha256(config.workflow),
            steps=config.steps,
            host=platform.node(),
        )
        log.append(entry)
        if log.state.step:
            logger.info("continuing run %s after step %d", log.run_id, log.state.step)
        if logs_are_json():
            log_driver(lambda: {"run": log.run_id, "session": entry.id, "step": log.state.step + 1}, sys.stderr)
        num_engines = config.rollout.num_workers + config.evaluation.own_engine
        options: dict[str, Any] = {"id": entry.id, "tracking": config.tracking, "num_engines": num_engines}
        # The inner one writes before processes are ended, which takes its time; the outer one knows of a failed start.
        recorded = _end_recorded(log, entry), _end_recorded(log, entry)
        async with recorded[0], _session(log, config, trains=True, **options) as session, recorded[1]:
            yield session


@contextlib.asynccontextmanager
async def _end_recorded(log: RunLog, session: Session) -> AsyncIterator[None]:
    """Write into the log why a session ends before its last step; the second call of this does nothing."""
    try:
        yield
    except BaseException as error:
        text = in_one_line(failure_text(error)) if isinstance(error, Exception) else ""  # else it was stopped
        try:
            async with asyncio.timeout(SECONDS_TO_RECORD):
                await asyncio.to_thread(log.append, End(session_id=session.id, error=text))
        except (OSError, UserError) as unwritten:  # the store may be what failed
            logger.warning("the log of run %s does not say how this session ended: %r", log.run_id, unwritten)
        raise


@contextlib.asynccontextmanager
async def reading_session(
    config: RunConfig, *, store: str, what: str, tracking: str = "", trains: bool = False
) -> AsyncIterator[RunSession]:
    """Open an existing run beside the process that trains it, without a lock; retention waits until `what` is over.

    There is room for one engine, or for a trainer if it `trains`. Raises `NotFound` for an unknown run.
    """
    prepare_environment()
    log, num_engines = run_log(store=store, run=config.run), 0 if trains else 1
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
    prepare_environment()
    log = run_log(store=store, run=config.run)
    return _session(log, config, trains=False, names=f"{name}-{uuid.uuid4().hex[:6]}", outside=True)


@contextlib.asynccontextmanager
async def _session(
    log: RunLog, config: RunConfig, *, trains: bool, num_engines: int = 1, **options: Any
) -> AsyncIterator[RunSession]:
    """Processes with GPUs are the engines, and the trainer's ranks unless they compute on the CPU."""
    num_ranks = config.train.num_ranks if trains and config.train.device != "cpu" else 0
    gpus_per_engine = config.engine.num_gpus if num_engines else 1
    shares = max(1, num_engines * gpus_per_engine + num_ranks)
    places = {"log_folder": home() / "logs" / log.run_id, "home": home()}
    cluster = Cluster(**places, num_workers=shares, gpus_per_engine=gpus_per_engine)
    with PeakMemory() as memory:
        async with cluster:
            check_shares(cluster.nodes, num_workers=shares, gpus_per_engine=gpus_per_engine, num_ranks=num_ranks)
            yield RunSession(log, cluster, config, memory=memory, num_engines=max(1, num_engines), **options)
