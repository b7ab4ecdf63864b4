"""One sentence per outage of Prefect's or MLflow's server, instead of one per message that did not get there; and the
end of a run does not wait for a server that stays away.

In: nothing. Out: filters on the libraries' own loggers. Prefect's client sends its events once the server answers
again, and a later call brings MLflow up to the run's log.
"""

from __future__ import annotations

import asyncio
import logging
import time

from prefect._internal.concurrency.services import QueueService
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.events.clients import NullEventsClient
from prefect.events.worker import EventsWorker
from prefect.settings import get_current_settings

from tasks.prefect.own_flow_run import OwnFlowRun

logger = logging.getLogger("millrace.outages")

LONGEST_WAIT = 25.0
"""Seconds that the end of a run waits for a server that is away or busy; one that restarts takes 15."""
_COMPLAINING = ("prefect.events.clients", "prefect._internal.concurrency")
_COMPLAINTS = ("Unable to connect to", "Service %r failed")
_QUIET_SECONDS = 120.0
"""An outage is over when there was no complaint for so long; Prefect sends a heartbeat more often than that."""


class OncePerOutage(logging.Filter):
    """Lets none of Prefect's complaints about its server through, and says it once in our words."""

    def __init__(self, server: str) -> None:
        super().__init__()
        self._server = server
        self._complained_at = -_QUIET_SECONDS

    def filter(self, record: logging.LogRecord) -> bool:
        """False for a complaint about a server that is away."""
        if record.levelno < logging.WARNING or not str(record.msg).startswith(_COMPLAINTS):
            return True
        now = time.monotonic()
        if now - self._complained_at >= _QUIET_SECONDS:
            logger.warning(
                "Prefect at %s does not answer: training goes on, and what Prefect has missed is sent once it does",
                self._server,
            )
        self._complained_at = now
        return False


def say_outages_once(prefect_server: str) -> None:
    """Put the filters in place, in this process and once."""
    # Each of its retries is a warning; what comes of them is in the error that we report.
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
    logging.raiseExceptions = False  # with it, Prefect prints what it could not log
    complaining = [logging.getLogger(name) for name in _COMPLAINING]
    if any(isinstance(each, OncePerOutage) for each in complaining[0].filters):
        return
    once = OncePerOutage(prefect_server)
    for logger_of_prefect in complaining:
        logger_of_prefect.addFilter(once)


async def prefect_answers() -> bool:
    """At the end of a flow: whether Prefect's server is there, or comes back within `LONGEST_WAIT`.

    If it does not, what this process has for it is dropped: Prefect's client would try for a minute for each of the
    flow run's last states, and for 8 s for each event of a task run.
    """
    context, waited_until = FlowRunContext.get(), time.monotonic() + LONGEST_WAIT
    if context is None or context.flow_run is None:
        return True
    async with get_client() as client:
        flow_run = OwnFlowRun(client, context.flow_run.id)
        while await flow_run.state() is None:
            if time.monotonic() >= waited_until:
                _drop_what_is_unsent()
                return False
            await asyncio.sleep(0.5)
    return True


def _drop_what_is_unsent() -> None:
    get_current_settings().client.max_retries = 0
    EventsWorker.set_client_override(NullEventsClient)
    for service in list(QueueService._instances.values()):  # of events and of log lines
        if service._loop is not None and service._task is not None:
            service._loop.call_soon_threadsafe(service._task.cancel)
