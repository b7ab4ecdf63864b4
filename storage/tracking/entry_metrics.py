"""What MLflow charts of a log entry, by the names of docs/metrics.md.

In: a log entry. Out: metrics by name, and where they stand on the axis of steps.
"""

from __future__ import annotations

from storage.log.entries import Evaluation, LogEntry, Step

SYSTEM = "system/"
"""Prefix of what a machine was doing, where MLflow has a page of its own for it."""


def metrics_of(entry: LogEntry) -> dict[str, float]:
    """What MLflow shows as metrics, by their names there."""
    match entry.body:
        case Step() as step:
            return {name_of(key): value for key, value in step.metrics.items()}
        case Evaluation() as evaluation:
            return {f"eval/{evaluation.split}/{key}": v for key, v in _evaluation_metrics(evaluation).items()}
        case _:
            return {}


def axis_of(entry: LogEntry) -> int:
    """Where its metrics stand on the axis of steps."""
    match entry.body:
        case Step() as step:
            return step.claim.step
        case Evaluation() as evaluation:
            return evaluation.version
        case _:
            return 0


def name_of(metric: str) -> str:
    """MLflow's name of a step's metric: `loss` is `train/loss`, `system/…` is itself."""
    return metric if metric.startswith(SYSTEM) else f"train/{metric}"


def _evaluation_metrics(evaluation: Evaluation) -> dict[str, float]:
    """What MLflow charts of an evaluation; no score where every attempt failed, for it would look like a bad policy."""
    metrics = {"tasks": float(evaluation.num_tasks), "seconds": evaluation.seconds}
    if evaluation.n_samples:
        metrics["failed"] = evaluation.num_failed / (evaluation.num_tasks * evaluation.n_samples)
    if evaluation.failed:
        return metrics
    metrics["score"] = evaluation.score
    if evaluation.standard_error is not None:
        metrics["standard_error"] = evaluation.standard_error
    return metrics | {f"pass_at_{k}": chance for k, chance in evaluation.pass_at.items()}
