"""What MLflow charts of a log entry, by the names of docs/metrics.md.

In: a log entry. Out: metrics by name, and their place on the axis of steps.
"""

from __future__ import annotations

from storage.log.entries import Evaluation, LogEntry, Step

SYSTEM = "system/"
"""Prefix of the metrics of a machine; MLflow shows them on a page of their own."""


def charted(entry: LogEntry) -> tuple[int, dict[str, float]]:
    """The step at which MLflow charts an entry, and its metrics: `loss` is `train/loss`, `system/…` is itself."""
    match entry.body:
        case Step(claim=claim, metrics=values):
            metrics = {name if name.startswith(SYSTEM) else f"train/{name}": value for name, value in values.items()}
            return claim.step, metrics
        case Evaluation() as evaluation:
            metrics = {"tasks": float(evaluation.num_tasks), "seconds": evaluation.seconds}
            if evaluation.n_samples:
                metrics["failed"] = evaluation.num_failed / (evaluation.num_tasks * evaluation.n_samples)
            if not evaluation.failed:  # the score 0 would look like a bad policy
                metrics |= {"score": evaluation.score, **{f"pass_at_{k}": p for k, p in evaluation.pass_at.items()}}
                if evaluation.standard_error is not None:
                    metrics["standard_error"] = evaluation.standard_error
            return evaluation.version, {f"eval/{evaluation.split}/{name}": value for name, value in metrics.items()}
        case _:
            return 0, {}
