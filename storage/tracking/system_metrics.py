"""What the machine was doing during a round, measured by MLflow's own monitors and named as they name it.

In: nothing. Out: metrics for the step's log entry. From there they reach MLflow like all others: none is lost while the
server is away, and none is sent twice.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from storage.tracking.entry_metrics import SYSTEM
from storage.tracking.registry import import_mlflow

logger = logging.getLogger("millrace.system_metrics")


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
        """By names such as `system/cpu_utilization_percentage`."""
        values: dict[str, float] = {}
        for monitor in self._monitors:
            monitor.collect_metrics()
            values |= monitor.aggregate_metrics()
            monitor.clear_metrics()
        return {f"{SYSTEM}{name}": float(value) for name, value in values.items()}
