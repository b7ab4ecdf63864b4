"""What MLflow charts of a log entry, by the names of docs/metrics.md.

In: a log entry. Out: metrics by name, and their place on the axis of steps.
"""

from __future__ import annotations

from storage.log.entries import Evaluation, LogEntry, Step

SYSTEM = "system/"
"""Prefix of the metrics of a machine; MLflow shows them on a page of their own."""


def metrics_of(entry: LogEntry) -> dict[str, float]:
    """What MLflow shows as metrics: `loss` of a step is `train/loss`, `system/…` is itself."""
    match entry.body:
        case Step(metrics=metrics):
            return {name if name.startswith(SYSTEM) else f"train/{name}": value for name, value in metrics.items()}
        case Evaluation() as evaluation:
            metrics = {"tasks": float(evaluation.num_tasks), "seconds": evaluation.seconds}
            if evaluation.n_samples:
                metrics["failed"] = evaluation.num_failed / (evaluation.num_tasks * evaluation.n_samples)
            if not evaluation.failed:  # the score 0 would look like a bad policy
                metrics |= {"score": evaluation.score, **{f"pass_at_{k}": p for k, p in evaluation.pass_at.items()}}
                if evaluation.standard_error is not None:
                    metrics["standard_error"] = evaluation.standard_error
            return {f"eval/{evaluation.split}/{name}": value for name, value in metrics.items()}
        case _:
            return {}


def axis_of(entry: LogEntry) -> int:
    """The step at which its metrics are charted."""
    match entry.body:
        case Step() as step:
            return step.claim.step
        case Evaluation(version=version):
            return version
        case _:
            return 0
