"""The metrics that MLflow charts, by the names of docs/metrics.md: those of a log entry, and those of the machine.

In: a log entry. Out: its metrics. In: nothing. Out: what the machine was doing, measured by MLflow's own monitors, for
the step's log entry. From there they reach MLflow like all others: none is lost while the server is away, and none is
sent twice.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
from typing import Any

from settings.errors import missing_package
from storage.log.entries import Evaluation, LogEntry, Step
from storage.log.scores import is_asked_by
from storage.objects.digests import sha256_of
from storage.tracking.follower import FollowerUnavailable

logger = logging.getLogger("millrace.system_metrics")

SYSTEM = "system/"
"""Prefix of the metrics of a machine; MLflow shows them on a page of their own."""

_LONGEST_NAME = 250
"""Characters, of a metric or a parameter in MLflow."""

_importing = threading.Lock()


def import_mlflow() -> Any:
    """The package, in a second. It breaks if two threads import it at the same time.

    Raises `FollowerUnavailable` if it is not installed, as where people only look at runs.
    """
    with _importing:
        try:
            import mlflow
        except ModuleNotFoundError as error:
            raise FollowerUnavailable(str(missing_package(error.name) or error)) from error
        # It prints the traceback of every error that it raises, and the error is said in a sentence.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
        return mlflow


BY_HAND = "eval-by-hand"
"""Where those are that a user has asked otherwise on the run's own split: they would be the run's newest score."""


def charted(entry: LogEntry, settings: dict[str, Any]) -> tuple[int, dict[str, float]]:
    """The step at which MLflow charts an entry, and its metrics: `loss` is `train/loss`, `system/…` is itself.

    `settings` are the run's `evaluation`.
    """
    match entry.body:
        case Step(claim=claim, metrics=values):
            metrics = {name if name.startswith(SYSTEM) else f"train/{name}": value for name, value in values.items()}
            return claim.step, metrics
        case Evaluation() as evaluation:
            metrics = {"tasks": float(evaluation.num_tasks), "seconds": evaluation.seconds}
            if evaluation.n_samples and evaluation.num_tasks:
                metrics["failed"] = evaluation.num_failed / (evaluation.num_tasks * evaluation.n_samples)
            if not evaluation.failed:  # the score 0 would look like a bad policy
                metrics["score"] = evaluation.score
                for name in ("pass_at", "pass_all", "maj_at"):
                    metrics |= {f"{name}_{k}": chance for k, chance in getattr(evaluation, name).items()}
                if evaluation.standard_error is not None:
                    metrics["standard_error"] = evaluation.standard_error
            is_own = evaluation.split != settings.get("split", "test") or is_asked_by(evaluation, settings)
            prefix = f"{'eval' if is_own else BY_HAND}/{evaluation.split}"
            return evaluation.version, {f"{prefix}/{name}": value for name, value in metrics.items()}
        case _:
            return 0, {}


@functools.cache
def accepted_name(name: str) -> str:
    """The name of a metric or setting as MLflow takes it; of one that it refuses, what can stay, and a digest."""
    parts = [re.sub(r"[^\w.\- :]", "_", part) for part in name.split("/")]
    clean = "/".join(part if part.strip(".") else f"_{part}" for part in parts)
    if clean == name and len(name) <= _LONGEST_NAME:
        return name
    clean = f"{clean[: _LONGEST_NAME - 8]}-{sha256_of(name.encode(errors='surrogatepass'))[:6]}"
    logger.warning("MLflow takes no name like %r; there it is %r", name, clean)
    return clean


def is_refusal(error: Any) -> bool:
    """True if MLflow refused the request itself: no outage, no missing permission, and the same next time."""
    return 400 <= error.get_http_status_code() < 500 and error.get_http_status_code() not in (401, 403, 408, 429)


class SystemMetrics:
    """Processors, memory, disk, network and GPUs. A `sample` covers the time since the last one.

    The first one imports MLflow, which takes a second: call it in a thread.
    """

    @functools.cached_property
    def _monitors(self) -> list[Any]:
        import_mlflow()
        from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
        from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
        from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
        from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

        monitors = []
        for kind in (CPUMonitor, DiskMonitor, NetworkMonitor, GPUMonitor):
            try:
                monitor = kind()
                monitor.collect_metrics()  # the first measurement only starts the next one
                monitor.clear_metrics()
                monitors.append(monitor)
            except (ImportError, RuntimeError, OSError, AttributeError) as error:
                logger.debug("%s measures nothing here: %s", kind.__name__, error)
        return monitors

    def sample(self) -> dict[str, float]:
        """What the monitors measured, by names such as `system/cpu_utilization_percentage`."""
        values: dict[str, float] = {}
        for monitor in self._monitors:
            monitor.collect_metrics()
            values |= monitor.aggregate_metrics()
            monitor.clear_metrics()
        return {f"{SYSTEM}{name}": float(value) for name, value in values.items()}
