"""MLflow as a mirror of the run's log: whatever is new in the log is told there, now or by a later call.

In: the log. Out: metrics, versions, lineage, aliases and traces in MLflow, and the report at the end. MLflow may be
down: that is one warning, and nothing of a run waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import tempfile
import time
from pathlib import Path

from prefect import task

from infra.environment import tracking_uri
from infra.user_code import own_command
from settings.places.hints import command
from settings.redaction import without_secrets
from storage.log.run_log import RunLog
from storage.log.runs import is_training, teller_lock
from storage.tracking.registry import Registry, RegistryUnavailable

logger = logging.getLogger("millrace.track")

LEAST_PAUSE = 10.0
"""Seconds between two calls during training: rounds may be short, and each call costs MLflow's whole transaction."""
LONGEST_REPORT = 300.0
"""Seconds; a run's end does not wait for ever for a page that can be made at any time."""


class TrackingMirror:
    """Tells one MLflow server of one run."""

    def __init__(self, log: RunLog, *, tracking: str, is_trainer: bool) -> None:
        self.uri = tracking_uri(tracking)
        self.run_page = ""
        """The run's page, from MLflow's address on, once MLflow has the run."""
        self._log = RunLog(log.store, log.run_id)  # its own: it is folded in a thread, under the lock
        self._is_trainer = is_trainer
        self._told_at = 0.0
        self._is_away = False

    @property
    def is_due(self) -> bool:
        """False so soon after the last call that the next one had better take in several steps."""
        return time.monotonic() - self._told_at >= LEAST_PAUSE

    async def tell(self, *, finished: bool = False) -> int:
        """Tell MLflow what is new, at the end with the report; returns the number of registered versions."""
        self._told_at = time.monotonic()
        num_registered = await asyncio.to_thread(self._sync, finished)
        if finished and not self._is_away:
            await self._attach_report()
        return num_registered

    def _sync(self, finished: bool) -> int:
        log = self._log
        try:
            if not self._is_trainer and is_training(log):
                logger.info("run %s is being trained: its own session tells MLflow", log.run_id)
                return 0
            # Two that send the same entries at once would send them twice.
            with teller_lock(log):
                log.refresh()
                registry = Registry(log, tracking_uri=self.uri)
                registrations = registry.sync(finished=finished or not self._is_trainer)
                self.run_page = registry.run_page
                for registration in registrations:
                    log.append(registration)
        except RegistryUnavailable as error:
            logger.log(
                logging.DEBUG if self._is_away else logging.WARNING,  # an outage is said once
                "MLflow at %s did not take everything in; the log keeps it for later: %s",
                without_secrets(self.uri),
                without_secrets(str(error)),
            )
        except Exception:  # whatever it is: a view of the run must not end its training
            logger.exception("what is new could not be told to MLflow; the log keeps it for later")
        else:
            if self._is_away:
                logger.info("MLflow has everything again that it missed")
            self._is_away = False
            return len(registrations)
        self._is_away = True
        return 0

    async def _attach_report(self) -> None:
        """The run as a web page beside the MLflow run. A command of its own makes it, with memory of its own."""
        log = self._log
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
                await asyncio.to_thread(Registry(log, tracking_uri=self.uri).attach, page)
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


@task(name="track", persist_result=False)
async def track(mirror: TrackingMirror, *, finished: bool = False) -> int:
    """Log new metrics, versions, lineage, aliases and traces; at the end the report too. An outage is a warning."""
    return await mirror.tell(finished=finished)


def _report_command(log: RunLog, page: Path) -> list[str]:
    return [*own_command("cli.main:app"), "report", log.run_id, "--store", log.store.uri, "--out", str(page)]
