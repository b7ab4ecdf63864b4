"""One sentence per outage of Prefect's or MLflow's server, instead of one per message that did not get there.

In: nothing. Out: filters on the libraries' own loggers. Prefect's client sends its events once the server answers
again, and a later call brings MLflow up to the run's log.
"""

from __future__ import annotations

import logging
import time

logger = logging.getLogger("millrace.outages")

_COMPLAINING = ("prefect.events.clients", "prefect._internal.concurrency")
_COMPLAINTS = ("Unable to connect to", "Service %r failed to process item")
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
    complaining = [logging.getLogger(name) for name in _COMPLAINING]
    if any(isinstance(known, OncePerOutage) for known in complaining[0].filters):
        return
    once = OncePerOutage(prefect_server)
    for logger_of_prefect in complaining:
        logger_of_prefect.addFilter(once)
