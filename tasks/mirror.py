"""MLflow as a mirror of the run's log: whatever is new in the log is told there, now or by a later call.

    log ──▶ each follower's `sync`, in one thread ──▶ MLflow: metrics, versions, lineage, aliases, traces
                                                ├──▶ the log: which versions are registered
                                                └──▶ TensorBoard, Trackio, W&B, if `tracking.also` names them: metrics

In: the log. Out: the same content elsewhere, and the report beside the MLflow run at the end. A service may be down:
that is one warning, and nothing of a run waits for it. A follower is added in `TrackingMirror.__init__`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from prefect import task

from infra.environment import give_back_freed_memory, tracking_uri
from infra.user_code import own_command
from settings.errors import UserError, counted
from settings.places.hints import command
from settings.redaction import without_secrets
from storage.log.entries import Registration
from storage.log.run_log import RunLog
from storage.log.runs import is_training, teller_lock
from storage.tracking.follower import Follower
from storage.tracking.mlflow_run import RegistryUnavailable
from storage.tracking.registry import Registry
from storage.tracking.trackers import Tracker

logger = logging.getLogger("millrace.track")

Made = TypeVar("Made", bound=Follower)

LEAST_PAUSE = 10.0
"""Seconds between two calls during training: rounds may be short, and each call costs MLflow's whole transaction."""
LONGEST_REPORT = 300.0
"""Seconds; a run's end does not wait for ever for a page that can be made at any time."""


class _Following(Generic[Made]):
    """One follower, made anew after each outage, and whether it is away."""

    def __init__(self, make: Callable[[], Made]) -> None:
        self._make = make
        self.follower = make()
        self.is_away = False
        self.num_entries = 0
        """Entries of the log that the place had at the last contact."""

    def tell(self) -> Sequence[Registration]:
        """Call its `sync`; an outage is said once, and whatever else goes wrong is no reason to end a training."""
        follower = self.follower
        try:
            registrations = follower.sync()
        except UserError as error:  # it is away, or the run's store is
            logger.log(
                logging.DEBUG if self.is_away else logging.WARNING,
                "%s did not take everything in; the log keeps it for later: %s",
                follower.name,
                without_secrets(str(error)),
            )
        except Exception:
            logger.exception("%s could not be told what is new; the log keeps it for later", follower.name)
        else:
            if self.is_away:
                logger.info("%s has everything again that it missed", follower.name)
            self.is_away, self.num_entries = False, follower.num_entries
            return registrations
        self.num_entries = max(self.num_entries, follower.num_entries)
        self.is_away, self.follower = True, self._make()
        return ()


class TrackingMirror:
    """Tells MLflow, and what else follows the log, of one run."""

    def __init__(self, log: RunLog, *, tracking: str, is_trainer: bool) -> None:
        self.uri = tracking_uri(tracking)
        self.run_page = ""
        """The run's page, from MLflow's address on, once MLflow has the run."""
        self.log = RunLog(log.store, log.run_id)
        """The log as background threads fold it, under `teller_lock`."""
        self._is_trainer = is_trainer
        self._told_at = 0.0
        self._mlflow = _Following(lambda: Registry(self.log, tracking_uri=self.uri))
        self._following: list[_Following[Any]] = [self._mlflow]
        self._trackers: dict[str, _Following[Any]] = {}

    @property
    def is_due(self) -> bool:
        """False so soon after the last call that the next one had better take in several steps."""
        return time.monotonic() - self._told_at >= LEAST_PAUSE

    def missing(self) -> list[str]:
        """A sentence for each place that was away at the last call: how many of the run's steps it lacks."""
        steps = self.log.state.steps.numbers
        away = [each for each in (*self._following, *self._trackers.values()) if each.is_away]
        return [_missing(each.follower.name, each.num_entries, steps, self.log) for each in away]

    async def tell(self, *, is_last: bool = False) -> int:
        """Tell each follower what is new, after the last step with the report; returns how many versions are new."""
        self._told_at = time.monotonic()
        telling = asyncio.create_task(asyncio.to_thread(self._sync))
        if is_last and self._is_trainer:
            await self._attach_report(beside=telling)
        return await telling

    def _sync(self) -> int:
        log = self.log
        try:
            if not self._is_trainer and is_training(log):
                logger.info("run %s is being trained: its own session tells MLflow", log.run_id)
                return 0
            # Two that send the same entries at once would send them twice.
            with teller_lock(log):
                log.refresh()
                following = [*self._following, *self._others()]
                registrations = [registration for each in following for registration in each.tell()]
                self.run_page = self._mlflow.follower.run_page or self.run_page
                for registration in registrations:
                    log.append(registration)
            give_back_freed_memory()  # MLflow's transactions leave holes
        except UserError as error:  # the store is away, or full
            logger.warning("MLflow was not told what is new, the log keeps it for later: %s", error)
            return 0
        except Exception:  # whatever it is: a view of the run must not end its training
            logger.exception("MLflow could not be told what is new; the log keeps it for later")
            return 0
        return len(registrations)

    def _others(self) -> list[_Following[Any]]:
        """Those that the newest session names in `tracking.also`."""
        sessions = self.log.state.sessions
        for kind in sessions[-1].also if sessions else ():
            if kind not in self._trackers:
                self._trackers[kind] = _Following(functools.partial(Tracker, self.log, kind))
        return list(self._trackers.values())

    async def _attach_report(self, *, beside: asyncio.Task[int]) -> None:
        """The run as a web page beside the MLflow run. A command of its own makes it, with memory of its own, while
        MLflow is told of the last steps."""
        log = self.log
        with tempfile.TemporaryDirectory(prefix="millrace-") as folder:
            page = Path(folder) / "report.html"
            making = await asyncio.create_subprocess_exec(
                *_report_command(log, page), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            try:
                async with asyncio.timeout(LONGEST_REPORT):
                    output, _ = await making.communicate()
                if making.returncode:
                    raise RegistryUnavailable(output.decode(errors="replace").strip()[-500:])
                await beside
                if not self._mlflow.is_away:
                    await asyncio.to_thread(self._mlflow.follower.attach, page)
            except (TimeoutError, RegistryUnavailable) as error:
                reason = without_secrets(str(error)) or f"it took more than {LONGEST_REPORT:g} s"
                logger.warning(
                    "MLflow has no report of this run, `%s` makes it: %s",
                    command("report", log.run_id, store=log.store.uri),
                    reason,
                )
            finally:
                if making.returncode is None:
                    making.kill()
                    await making.wait()


def _missing(name: str, num_entries: int, steps: Sequence[int], log: RunLog) -> str:
    lacking = sum(number >= num_entries for number in steps)
    what = f"{lacking:,} of {counted(len(steps), 'step')}" if lacking else "how the run ended"
    at_most = "" if num_entries or not lacking else "up to "  # an earlier session may have been there
    sync = command("sync", log.run_id, store=log.store.uri)
    return f"{name} lacks {at_most}{what}; the next start or `{sync}` writes them"


@task(name="track", persist_result=False)
async def track(mirror: TrackingMirror, *, is_last: bool = False) -> int:
    """Log new metrics, versions, lineage, aliases and traces; at the end the report too. An outage is a warning."""
    return await mirror.tell(is_last=is_last)


def _report_command(log: RunLog, page: Path) -> list[str]:
    return [*own_command("cli.main:app"), "report", log.run_id, "--store", log.store.uri, "--out", str(page)]
