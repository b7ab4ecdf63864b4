"""`millrace status`: what a run's log says, and nothing else: no MLflow, no Prefect, no torch.

In: a run's log. Out: a dictionary of plain numbers, or the same as a table.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from cli.terminal.formatting import one_line
from storage.log.entries import Step
from storage.log.run_log import RunLog


def run_status(log: RunLog, *, peak_memory_bytes: int | None = None) -> dict[str, Any]:
    """The run in numbers; null where it has none yet. Accuracies are held-out scores, 0 to 1.

    Whoever asks again and again hands in the peak it knows: else every step is looked at each time.
    """
    state = log.state
    if peak_memory_bytes is None:
        peak_memory_bytes = peak_memory(state.steps)
    live = state.live
    evaluations = sorted((e for e in state.evaluations if not e.failed), key=lambda evaluation: evaluation.version)
    last = evaluations[-1] if evaluations else None
    registration = state.registrations.get(live.version) if live else None
    return {
        "run": log.run_id,
        "store": log.store.uri,
        "step": state.step,
        "weight_version": live.version if live else None,
        "weights_sha256": live.weights_sha256 if live else None,
        "policy": f"{log.store.uri}/{live.path}" if live else None,
        "accuracy_before": evaluations[0].score if evaluations else None,
        "accuracy_after": last.score if last else None,
        "accuracy_standard_error": last.standard_error if last else None,
        "pass_at": last.pass_at if last else None,
        "failed_evaluations": len(state.evaluations) - len(evaluations),
        "wall_seconds": round(state.worked_seconds, 1),
        "peak_memory_bytes": peak_memory_bytes,
        "mlflow_model": registration.model_name if registration else None,
        "mlflow_version": registration.registry_version if registration else None,
        "paused": state.paused or None,
        "sessions": len(state.sessions),
        "shards": len(state.shards),
        "trajectories": state.num_trajectories,
        **state.counters(),
    }


def peak_memory(steps: Iterable[Step]) -> int:
    """Most bytes that any of the steps held; 0 without one."""
    return int(max((step.metrics["peak_memory_bytes"] for step in steps), default=0))


def status_table(status: dict[str, Any]) -> Group:
    """The same for people."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column(overflow="fold")
    for key, value in status.items():
        if key == "peak_memory_bytes":
            key, value = "peak memory", f"{value / 2**30:.2f} GiB"
        elif key == "pass_at":
            key, value = "pass@k", ", ".join(f"{k}: {chance:.3f}" for k, chance in (value or {}).items()) or None
        elif isinstance(value, float):
            value = f"{value:.3f}" if "accuracy" in key else f"{value:.1f}"
        table.add_row(f"[dim]{key.replace('_', ' ')}[/]", Text("-" if value is None else one_line(str(value))))
    groups = "submitted = trained + filtered + stale + failed + cancelled + pending"
    return Group(table, Text(f"prompt groups: {groups}", style="dim"))


def print_status(status: dict[str, Any], console: Console) -> None:
    """Print that table."""
    console.print(status_table(status))
