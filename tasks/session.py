"""One start of a run: the log it folds, the workers it holds, and what has to be tidied up at the end.

In: the run's settings. Out: a `RunSession` that the flow's tasks share. Nothing here outlives the process:
what must survive is in the run's log.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from infra.environment import home, prepare_environment, store_uri, tracking_uri
from infra.fleet import Fleet, Hosted, HostedGroup
from infra.memory import PeakMemory
from infra.structured_logs import log_driver, logs_are_json
from infra.user_code import source_sha256
from settings.engine import WeightTransfer
from settings.run_file import RunConfig
from settings.train import TrainSettings
from storage.log.entries import Session
from storage.log.producers import Lookout
from storage.log.run_log import RunLog
from storage.log.runs import create_run, open_run, trainer_lock
from storage.objects.opening import open_store
from storage.retention.retention import reading
from storage.tracking.system_metrics import SystemMetrics
from tasks.prefect.outages import say_outages_once

logger = logging.getLogger("millrace.session")

REPLACEMENTS = 3
"""Workers that may die in a row, without a shard in between, before a run gives up."""


class RunSession:
    """What the tasks of one flow run share. A plain object on purpose: Prefect would walk into a dataclass."""

    def __init__(
        self,
        *,
        log: RunLog,
        fleet: Fleet,
        memory: PeakMemory,
        session_id: str,
        tracking: str,
        num_engines: int = 1,
        names: str = "rollout",
        outside: bool = False,
    ) -> None:
        """Rollout workers are called `names` and a number; `outside` are those of another process than the driver's."""
        self.log = log
        self.fleet = fleet
        self.num_engines = num_engines
        """How many engines this session means to run at the same time."""
        self.memory = memory
        self.session_id = session_id
        self.tracking = tracking_uri(tracking)
        self.tracking_log = RunLog(log.store, log.run_id)
        """The same log, for tracking alone: it is folded in a thread, under `tracking_lock`."""
        self.tracking_lock = threading.Lock()
        self.tracked_at = 0.0
        """`time.monotonic()` when tracking was last called."""
        self.tracking_is_away = False
        """True from a call that MLflow did not take in to the next that it does."""
        self.mlflow_run = ""
        """The run's page, from MLflow's address on, once MLflow has the run."""
        self.cache = home() / "cache"
        self.arrivals = asyncio.Event()
        """Set whenever this session's own producer has committed a shard."""
        self.publish_seconds = 0.0
        """How long publications have taken in this round."""
        self.waited_seconds = 0.0
        """How long this round has waited for its batch."""
        self.system = SystemMetrics()
        self.warned_of_gap = False
        """True once this session has said that engine and trainer disagree."""
        self.refusals = 0
        """Claims in a row, up to now, that were refused because of their shards."""
        self.hosted: dict[str, Hosted] = {}
        """Every process of this session with an engine, by name."""
        self.workers: dict[str, Hosted] = {}
        """The rollout workers that produce, by name."""
        self.has_workers = asyncio.Event()
        """Set while there is one of them."""
        self.replacements_left = REPLACEMENTS
        """How many dead workers may be replaced before the next shard is committed."""
        self.evaluator: Hosted | None = None
        """The worker that does nothing but evaluate; null where a rollout worker does it beside its own work."""
        self.trainer: Hosted | HostedGroup
        self.config: RunConfig
        """What the trainer was started with, for the one that takes its place."""
        self.weight_transfer: WeightTransfer = "store"
        """How policies come from the trainer to this session's engines."""
        self.parts_per_engine = 1
        """vLLM's workers in each."""
        self.outside = outside
        self.loaded_version = -1
        """What these were last told to load, where somebody else has published it."""
        self.lookout = Lookout(log)
        """Watches the rollout workers that the driver has not started."""
        self._names = (f"{names}-{number}" for number in itertools.count())

    async def host(self, name: str, path: str, *, arguments: dict[str, Any]) -> Hosted:
        """Start a worker in a process of its own; on CPUs, engines divide the threads among themselves, all but one,
        which vLLM's front end and the trainer need meanwhile."""
        hosted = await self.fleet.host(name, path, arguments=arguments, num_gpus=self.fleet.gpus_per_engine)
        if not self.fleet.num_gpus:
            threads = max(1, (int(os.environ["OMP_NUM_THREADS"]) - 1) // self.num_engines)
            await hosted.prepare({"OMP_NUM_THREADS": str(threads)})
        self.hosted[name] = hosted
        return hosted

    async def host_trainer(self, name: str, path: str, *, arguments: dict[str, Any], settings: TrainSettings) -> None:
        """Start `session.trainer`, in `train.num_ranks` processes of `train.num_threads`."""
        num_gpus = 0.0 if settings.device == "cpu" else self.fleet.gpus_per_worker
        self.trainer = await self.fleet.host_group(
            name, path, arguments=arguments, num_ranks=settings.num_ranks, num_gpus=num_gpus
        )
        if settings.num_threads:
            await self.trainer.prepare({"OMP_NUM_THREADS": str(settings.num_threads)})

    def next_worker_name(self) -> str:
        """A name no rollout worker of this session has had."""
        return next(self._names)


@contextlib.asynccontextmanager
async def training_session(
    *,
    store: str,
    tracking: str,
    run_id: str,
    workflow: str,
    config: dict[str, Any],
    defaults: dict[str, Any],
    num_workers: int,
    gpus_per_engine: int,
    train: TrainSettings,
) -> AsyncIterator[RunSession]:
    """Create or reopen a run, take its trainer lock, and start the fleet, for `num_workers` engines and the trainer.

    `defaults` as in `storage.log.runs.create_run`.

    Raises `storage.log.runs.RunExists`, `storage.log.runs.RunBusy`, `storage.objects.object_store.StoreError`, and
    `ValueError` for too few GPUs, before anything heavy starts.
    """
    prepare_environment()
    say_outages_once(os.environ.get("PREFECT_API_URL", "its address in this process"))
    log = create_run(open_store(store_uri(store)), run_id, config, defaults=defaults)
    with trainer_lock(log), PeakMemory() as memory:
        session = Session(
            id=uuid.uuid4().hex[:12],
            code_version=code_version(),
            reward_sha256=source_sha256(workflow),
            steps=config["steps"],
        )
        log.append(session)
        if log.state.step:
            logger.info("continuing run %s after step %d", run_id, log.state.step)
        if logs_are_json():
            log_driver(lambda: {"run": run_id, "session": session.id, "step": log.state.step + 1}, sys.stderr)
        async with _fleet(run_id, num_workers=num_workers, gpus_per_engine=gpus_per_engine, train=train) as fleet:
            yield RunSession(
                log=log,
                fleet=fleet,
                memory=memory,
                session_id=session.id,
                tracking=tracking,
                num_engines=num_workers,
            )


@contextlib.asynccontextmanager
async def reading_session(
    *,
    store: str,
    tracking: str,
    run_id: str,
    what: str,
    gpus_per_engine: int = 1,
    train: TrainSettings | None = None,
) -> AsyncIterator[RunSession]:
    """Open an existing run beside whoever trains it; nothing is locked, and retention waits for `what` to be over.

    The fleet has room for one engine, or for a trainer of these settings. Raises `FileNotFoundError` for an unknown
    run, `ValueError` for too few GPUs.
    """
    prepare_environment()
    log = open_run(open_store(store_uri(store)), run_id)
    with reading(log, what), PeakMemory() as memory:
        async with _fleet(run_id, num_workers=0 if train else 1, gpus_per_engine=gpus_per_engine, train=train) as fleet:
            yield RunSession(log=log, fleet=fleet, memory=memory, session_id="", tracking=tracking)


@contextlib.asynccontextmanager
async def producing_session(*, store: str, run_id: str, name: str, gpus_per_engine: int) -> AsyncIterator[RunSession]:
    """Open an existing run to work for whoever trains it, perhaps on another machine; only the store is shared.

    Retention does not wait for it: it reads policies that have the alias `rollout`. Its workers are called `name` and
    something random, because no two that live may have one name. Raises `FileNotFoundError` for an unknown run.
    """
    prepare_environment()
    log = open_run(open_store(store_uri(store)), run_id)
    names = f"{name}-{uuid.uuid4().hex[:6]}"
    with PeakMemory() as memory:
        async with _fleet(run_id, num_workers=1, gpus_per_engine=gpus_per_engine, train=None) as fleet:
            yield RunSession(log=log, fleet=fleet, memory=memory, session_id="", tracking="", names=names, outside=True)


@contextlib.asynccontextmanager
async def _fleet(
    run_id: str, *, num_workers: int, gpus_per_engine: int, train: TrainSettings | None
) -> AsyncIterator[Fleet]:
    """Processes with GPUs are the engines, and the trainer's ranks unless they compute on the CPU."""
    num_ranks = train.num_ranks if train is not None and train.device != "cpu" else 0
    shares = max(1, num_workers * gpus_per_engine + num_ranks)
    folder = home() / "logs" / run_id
    async with Fleet(log_folder=folder, num_workers=shares, gpus_per_engine=gpus_per_engine) as fleet:
        fleet.check_ranks(num_ranks)
        yield fleet


def code_version() -> str:
    """The commit of this checkout, with `+changes` when it has uncommitted ones; the package version elsewhere."""
    folder = Path(__file__).parent
    try:
        commit = _git(folder, "rev-parse", "--short=12", "HEAD")
        return commit + ("+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return version("millrace")


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()
