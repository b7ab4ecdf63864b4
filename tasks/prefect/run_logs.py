"""The messages of a flow on its flow run's page in Prefect, and a training's progress among them.

In: our loggers, from INFO on, and the steps and evaluations of a training. Out: lines on the page. Prefect's handler
sends them from a thread of its own: training waits for no server, and what one misses is in the run's log.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import sys
from collections.abc import Iterator
from logging.handlers import MemoryHandler

from prefect.context import FlowRunContext
from prefect.logging.handlers import APILogHandler

from infra.environment import prepare_environment
from settings.errors import all_of
from settings.redaction import redact_error
from storage.log.entries import Evaluation, Step
from tasks.prefect.task_runs import CUT_OFF

progress = logging.getLogger("millrace.progress")
"""Pages and JSON logs have its messages; a terminal shows the run's log as a table instead."""

MOST_LINES = 100
"""About steps, on the page of one run."""
_SHOWN = {"reward": "reward", "loss": "loss", "staleness_mean": "staleness", "tokens_per_second": "tokens/s"}
"""Metrics of a line, by the names of docs/metrics.md."""


class _OfFlowRun(logging.Filter):
    """Says whose message it is, for threads that Prefect's context has not reached."""

    def __init__(self, flow_run_id: str) -> None:
        super().__init__()
        self._flow_run_id = flow_run_id

    def filter(self, record: logging.LogRecord) -> bool:
        record.flow_run_id = self._flow_run_id
        return True


def is_no_end(record: logging.LogRecord) -> bool:
    """False for what Prefect says of a task that was cut off: it calls that a crash, with an error."""
    return CUT_OFF not in record.getMessage()


def is_no_error_of_a_user(record: logging.LogRecord) -> bool:
    """True, and makes what Prefect says of a flow run that a user has ended a message: it calls that an error."""
    if record.getMessage().startswith("Finished in state Cancelled"):
        record.levelno, record.levelname = logging.INFO, "INFO"
    return True


@contextlib.contextmanager
def kept_for_prefect() -> Iterator[None]:
    """Keep our messages for the page of a flow run that is to begin inside, see `log_to_prefect`."""
    _replace_handler(keeping := MemoryHandler(capacity=sys.maxsize, flushLevel=sys.maxsize))
    try:
        yield
    finally:
        logging.getLogger("millrace").removeHandler(keeping)


def log_to_prefect() -> None:
    """Show our messages on the page of the flow run this is called in, instead of an earlier one's, and those before
    that were kept."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    handler = APILogHandler(level=logging.INFO)
    handler.addFilter(_OfFlowRun(str(context.flow_run.id)))
    for kept in _replace_handler(handler):
        if isinstance(kept, MemoryHandler):
            kept.setTarget(handler)
            kept.close()
    logging.getLogger("millrace").setLevel(logging.INFO)
    logging.getLogger("prefect.task_runs").addFilter(is_no_end)
    logging.getLogger("prefect.flow_runs").addFilter(is_no_error_of_a_user)


@contextlib.contextmanager
def outside_session() -> Iterator[None]:
    """What a flow does without a session, such as its checks: warnings are on the page of the flow run, and neither
    they nor an error, which Prefect records, say a secret."""
    prepare_environment()
    log_to_prefect()
    try:
        yield
    except BaseException as error:
        redact_error(error)
        raise


def _replace_handler(handler: logging.Handler) -> list[logging.Handler]:
    """Add a handler of our messages in the place of those that this, or Prefect, has added, which are returned.

    Prefect's own is for its level, which is WARNING to keep every task out, and is only there with one of our pools.
    """
    ours = logging.getLogger("millrace")
    replaced = [each for each in ours.handlers if isinstance(each, APILogHandler | MemoryHandler)]
    ours.handlers = [*(each for each in ours.handlers if each not in replaced), handler]
    return replaced


class Progress:
    """A line about every so many steps, with means over them: at most `MOST_LINES` for a run of `steps`."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        sizes = (digit * 10**power for power in range(12) for digit in (1, 2, 5))
        self._every = next(size for size in sizes if steps <= MOST_LINES * size)
        self._taken: list[Step] = []

    def took(self, step: Step) -> None:
        """Count a step, and write the line if it is due: the run's last step has one in any case."""
        self._taken.append(step)
        number = step.claim.step
        if number % self._every and number != self._steps:
            return
        first = self._taken[0].claim.step
        facts = [f"step {number} of {self._steps}" if first == number else f"steps {first}-{number} of {self._steps}"]
        for name, shown in _SHOWN.items():
            if values := [step.metrics[name] for step in self._taken if name in step.metrics]:
                facts.append(f"{shown} {statistics.fmean(values):.4g}")
        progress.info("%s", ", ".join(facts))
        self._taken = []


def log_evaluation(evaluation: Evaluation) -> None:
    """The line of an evaluation."""
    if evaluation.failed:
        progress.error("policy %d: %s failed", evaluation.version, all_of(evaluation.num_failed, "attempt"))
        return
    error = "" if evaluation.standard_error is None else f" ± {evaluation.standard_error:.3f}"
    score = f"policy {evaluation.version} scored {evaluation.score:.3f}{error} on {evaluation.split!r}"
    progress.info("%s: %d tasks, %.1f s", score, evaluation.num_tasks, evaluation.seconds)
