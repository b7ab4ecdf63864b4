"""Prefect task: bring MLflow up to the run's log. MLflow may be down; then a later call catches up.

In: a session. Out: how many policy versions became visible.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from settings.redaction import without_secrets
from storage.log.entries import Registration
from storage.log.run_log import RunLog
from storage.log.runs import is_training, teller_lock
from storage.tracking.registry import Registry, RegistryUnavailable
from tasks.session import RunSession

logger = logging.getLogger("millrace.track")


LEAST_PAUSE = 10.0
"""Seconds between two calls during training: rounds may be short, and each call costs MLflow's whole transaction."""

LONGEST_REPORT = 300.0
"""Seconds; a run's end does not wait for ever for a page that can be made at any time."""


def tracking_is_due(session: RunSession) -> bool:
    """False so soon after the last call that the next one had better take in several steps."""
    return time.monotonic() - session.tracked_at >= LEAST_PAUSE


@task(name="track", cache_policy=NO_CACHE, persist_result=False)
async def track(session: RunSession, *, finished: bool = False) -> int:
    """Log new metrics, versions, lineage, aliases and traces; at the end the report too. An outage is a warning."""
    session.tracked_at = time.monotonic()
    registered = await asyncio.to_thread(_sync, session, finished)
    if finished and not session.tracking_is_away:
        await _attach_report(session)
    return len(registered)


def _sync(session: RunSession, finished: bool) -> list[Registration]:
    # A log of its own: folding is not thread-safe, and this runs beside the round.
    log, is_trainer = session.tracking_log, bool(session.session_id)
    try:
        if not is_trainer and is_training(log):
            logger.info("run %s is being trained: its own session tells MLflow", log.run_id)
            return []
        # Two that send the same entries at once would send them twice.
        with session.tracking_lock, teller_lock(log):
            log.refresh()
            registry = Registry(log, tracking_uri=session.tracking)
            registered = registry.sync(finished=finished or not is_trainer)
            session.mlflow_run = registry.run_page
            for registration in registered:
                log.append(registration)
    except RegistryUnavailable as error:
        logger.log(
            logging.DEBUG if session.tracking_is_away else logging.WARNING,  # an outage is said once
            "MLflow at %s did not take everything in; the log keeps it for later: %s",
            without_secrets(session.tracking),
            without_secrets(str(error)),
        )
        session.tracking_is_away = True
        return []
    except Exception:  # whatever it is: a view of the run must not end its training
        logger.exception("what is new could not be told to MLflow; the log keeps it for later")
        session.tracking_is_away = True
        return []
    if session.tracking_is_away:
        logger.info("MLflow has everything again that it missed")
    session.tracking_is_away = False
    return registered


async def _attach_report(session: RunSession) -> None:
    """The run as a web page beside the MLflow run. A command of its own makes it, with memory of its own."""
    log = session.tracking_log
    with tempfile.TemporaryDirectory(prefix="millrace-") as folder:
        page = Path(folder) / "report.html"
        making = await asyncio.create_subprocess_exec(
            *_report_command(log, page), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            async with asyncio.timeout(LONGEST_REPORT):
                said, _ = await making.communicate()
            if making.returncode:
                raise RegistryUnavailable(said.decode(errors="replace").strip()[-500:])
            await asyncio.to_thread(Registry(log, tracking_uri=session.tracking).attach, page)
        except (TimeoutError, RegistryUnavailable) as error:
            reason = without_secrets(str(error)) or f"it took more than {LONGEST_REPORT:g} s"
            logger.warning("MLflow has no report of this run, `millrace report %s` makes it: %s", log.run_id, reason)
        finally:
            if making.returncode is None:
                making.kill()
                await making.wait()


def _report_command(log: RunLog, page: Path) -> list[str]:
    return [sys.executable, "-m", "cli.main", "report", log.run_id, "--store", log.store.uri, "--out", str(page)]
