"""`millrace exporter`: runs as Prometheus metrics, read from their logs at every scrape.

In: a store. Out: the gauges `millrace_…` of `_GAUGES` with the label `run`, in Prometheus' text format. No worker or
trainer is asked, so the numbers are there for dead runs too, and an exporter that is down loses none.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any
from weakref import WeakKeyDictionary

import typer

from cli.terminal.arguments import StoreOption, open_named_store
from cli.terminal.console import say
from settings.errors import InvalidInput

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

    from storage.log.run_log import RunLog
    from storage.objects.object_store import ObjectStore

logger = logging.getLogger("millrace.exporter")

_GAUGES = {
    "damaged": "1 for a run that cannot be read; the exporter logs why. It has no other metric.",
    "training": "1 while a process of this machine trains the run.",
    "steps": "Optimizer steps done.",
    "policy_version": "Newest policy.",
    "groups": "Prompt groups by outcome.",
    "trajectories": "Training attempts in committed shards.",
    "shards": "Committed shards.",
    "quarantined_shards": "Shards that must not be trained.",
    "phase_seconds": "Wall-clock of the last round by phase; all but `round` and `rollout` add up to it.",
    "step_metric": "Metrics of the last step, docs/metrics.md.",
    "suspicious_gap": "The value of `engine_gap` from which the run warns; it depends on `train.dtype`.",
    "score": "Held-out score of the newest policy that was asked as the run asks, by split.",
    "score_tasks": "Tasks that it is the mean over.",
    "champion_version": "Policy with the alias champion.",
    "last_entry_timestamp_seconds": "When the log grew last.",
    "last_step_timestamp_seconds": "When the last step was committed.",
}
_LABELS = {
    "groups": ["outcome"],
    "phase_seconds": ["phase"],
    "step_metric": ["metric"],
    "score": ["split"],
    "score_tasks": ["split"],
}


def exporter(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 9464,
    host: Annotated[str, typer.Option(help="Address to listen on; there is no password.")] = "127.0.0.1",
    store: StoreOption = "",
) -> None:
    """Serve the numbers of every run in the store to Prometheus, from the logs alone."""
    from prometheus_client import CollectorRegistry, start_http_server

    opened, registry = open_named_store(store), CollectorRegistry()
    registry.register(RunCollector(opened))
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise InvalidInput(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port or --host"
        ) from error
    address = f"http://{host}:{server.server_port}/metrics"
    try:
        say(f"{address} has the runs of {opened.uri}; Ctrl-C ends it")
        thread.join()
    except KeyboardInterrupt:
        server.shutdown()


class RunCollector:
    """Folds what is new in each run's log when it is asked. Of a damaged run there is only `millrace_damaged`; why is
    logged once."""

    def __init__(self, store: ObjectStore) -> None:
        from storage.log.runs import RunLogs

        self._runs = RunLogs(store)
        self._damaged: dict[str, str] = {}
        self._configs: WeakKeyDictionary[RunLog, dict[str, Any]] = WeakKeyDictionary()
        self._asking = threading.Lock()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Every gauge with the values of every run."""
        from prometheus_client.core import GaugeMetricFamily

        families = {
            name: GaugeMetricFamily(f"millrace_{name}", text, labels=["run", *_LABELS.get(name, [])])
            for name, text in _GAUGES.items()
        }
        with self._asking:
            values, damaged = self._runs.look(lambda log: [*_values(log, self._config(log))])
            for run, reason in damaged.items():
                values[run] = [("damaged", 1.0)]
                if self._damaged.get(run) != reason:
                    logger.warning("run %s is left out: %s", run, reason)
            self._damaged = damaged
        for run, of_run in values.items():
            for name, value, *labels in of_run:
                families[name].add_metric([run, *labels], value)
        yield from families.values()

    def _config(self, log: RunLog) -> dict[str, Any]:
        """Read once, as a run's configuration is frozen."""
        from storage.log.runs import run_config

        if log not in self._configs:
            self._configs[log] = run_config(log)
        return self._configs[log]


def _values(log: RunLog, config: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Name, value, and the label if it has one."""
    from settings.train import SUSPICIOUS_GAPS
    from storage.log.entries import Step
    from storage.log.promotion import CHAMPION
    from storage.log.runs import is_training
    from storage.log.scores import scores_by_split

    state = log.state
    yield "damaged", 0.0
    yield "suspicious_gap", SUSPICIOUS_GAPS[config.get("train", {}).get("dtype", "float32")]
    yield "training", float(is_training(log))
    yield "steps", state.step
    yield "trajectories", state.num_trajectories
    yield "shards", len(state.shards)
    if state.live is not None:
        yield "policy_version", state.newest_version
    counts = state.counters()
    yield "quarantined_shards", counts.pop("quarantined")
    for outcome, count in counts.items():
        yield "groups", count, outcome
    for split, scores in scores_by_split(state, config.get("evaluation", {})).items():
        yield "score", scores[-1].score, split
        yield "score_tasks", scores[-1].num_tasks, split
    if CHAMPION in state.aliases:
        yield "champion_version", state.aliases[CHAMPION].version
    for name, value in (state.steps[-1].metrics if state.steps else {}).items():
        kind = "phase_seconds" if name.endswith("_seconds") else "step_metric"
        yield kind, value, name.removesuffix("_seconds")
    if log.entries:
        yield "last_entry_timestamp_seconds", log.entries[-1].written_at
    if state.steps:  # else the search would go through the whole log, at every scrape
        last_step = next(entry for entry in reversed(log.entries) if isinstance(entry.body, Step))
        yield "last_step_timestamp_seconds", last_step.written_at
