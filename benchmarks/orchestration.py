"""What Prefect, Ray, MLflow, the log and the store cost per round, where engine and model cost next to nothing.

In: nothing; a run of `millrace train` with a scripted engine and a two-layer model, in a folder of its own.
Out: tables, and the same as JSON.

    python -m benchmarks.orchestration [--rounds 1000] [--json FILE]

A round's overhead is its wall-clock less what was generated, rewarded and trained: claims, task runs, calls to the
workers, commits, the policy's files, their publication, and MLflow's part of a core that is needed elsewhere. It is the
same for any model but for the files of larger ones. `max_staleness` is 0, so nothing of it is hidden behind training.

| bar | is |
|---|---|
| overhead | median of the rounds after the first ten ≤ 300 ms, and ≤ 1 % of a round of 30 s |
| task runs | ≤ 10 per round, those at start and end included |
| memory | no process grows by more than 10 % in 1,000 rounds, by the line through looks every 100 rounds from 200 on |
| bytes | the driver by at most 10 MB in 1,000 rounds, worker and trainer by 5 MB, by the same line |
| store | what retention removes from does not grow: policies, states and shards by at most 5 MB in 1,000 rounds |
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.table import Table

from cli.terminal.console import open_console
from storage.log.entries import LogEntry, Step
from storage.log.run_log import RunLog
from storage.objects.object_store import LocalStore

ROOT = Path(__file__).parents[1]
RUN = "orchestration"
SKIPPED = 10
"""Rounds at the start that are not counted: first calls compile and allocate."""
EVERY = 100
"""Rounds between two looks at memory and processor time; fewer if the run is short."""
SETTLED = 200
"""Rounds until caches are full and allocators have what they keep; memory before is shown, and not judged."""
MOST_SECONDS, MOST_TASK_RUNS, MOST_SHARE, MOST_GROWTH = 0.3, 10.0, 0.01, 0.1
MOST_BYTES = {"driver": 10e6, "rollout-0": 5e6, "trainer-0": 5e6}
REMOVED_FROM, MOST_STORE_BYTES = ("policies", "state", "shards"), 5e6
MOST_COLUMNS = 6
"""Looks that a table has room for; the JSON has all."""
USUAL_ROUND = 30.0
"""Seconds a round of a real run takes, at least."""


@dataclass(frozen=True)
class Sample:
    """A look at one process after so many rounds."""

    rounds: int
    process: str
    rss_bytes: int
    cpu_seconds: float


def measure(rounds: int, scratch: Path, *, every: int) -> dict[str, Any]:
    """Train that many rounds; every number of the report."""
    home, model = scratch / "home", scratch / "model"
    make_model(model)
    run_file = scratch / "run.toml"
    run_file.write_text(_run_file(model, rounds))
    environment = {**os.environ, "MILLRACE_HOME": str(home), "PYTHONPATH": str(ROOT)}
    environment.pop("PREFECT_API_URL", None)  # Prefect starts a server for this run alone
    with open(scratch / "output.txt", "w") as output:
        training = subprocess.Popen(
            [sys.executable, "-m", "millrace", "train", str(run_file)],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=output,
        )
    log = RunLog(LocalStore(home / "store"), RUN)
    try:
        samples, disk = _watched(training, log, home, rounds=rounds, every=every)
    finally:
        training.terminate()
        code = training.wait()
    if code:
        raise RuntimeError(f"millrace train ended with {code}:\n{(scratch / 'output.txt').read_text()[-4000:]}")
    log.refresh()
    return report(log.entries, samples, task_runs=_num_task_runs(home), disk=disk)


def make_model(folder: Path) -> None:
    """The smallest there is; in a process of its own, so that this one stays light."""
    make = (
        "import sys; from pathlib import Path; from examples.arithmetic import Arithmetic; "
        "from settings.warmup import WarmupSettings; from trainers.model.warmup import make_base_model; "
        "settings = WarmupSettings(hidden_size=32, target_loss=0.1, num_steps=2, batch_size=16, learning_rate=1e-3); "
        "make_base_model(Path(sys.argv[1]), Arithmetic().demonstrations(200, seed=0), settings, seed=0)"
    )
    subprocess.run([sys.executable, "-c", make, str(folder)], cwd=ROOT, check=True, capture_output=True)


def _run_file(model: Path, rounds: int) -> str:
    return f"""
workflow = "examples.arithmetic:Arithmetic"
run = {json.dumps(RUN)}
model = {json.dumps(str(model))}
steps = {rounds}
batch_size = 4
n_samples = 4
[sampling]
max_tokens = 8
[evaluation]
every = 0
[engine]
kind = "scripted"
max_model_len = 64
[train]
checkpoint_every = 10
"""


def _watched(
    training: subprocess.Popen[bytes], log: RunLog, home: Path, *, rounds: int, every: int
) -> tuple[list[Sample], dict[int, dict[str, int]]]:
    """Looks at all processes, and at the disk, from the first counted round to the last; not while the run ends."""
    due = SKIPPED
    samples: list[Sample] = []
    disk: dict[int, dict[str, int]] = {}
    while training.poll() is None:
        time.sleep(0.5)
        reached = log.refresh().step
        if due <= reached < rounds:
            samples += _look(training.pid, reached)
            disk[reached] = disk_usage(home)
            due = (reached // every + 1) * every
    return samples, disk


def disk_usage(home: Path) -> dict[str, int]:
    """Bytes in a state folder with a store, by what is there: allocated blocks, as `du` counts them."""
    places: Counter[str] = Counter()
    for folder, _, names in os.walk(home):
        parts = Path(folder).relative_to(home).parts
        place = " ".join(parts[3:4]) if parts[:2] == ("store", "runs") else parts[0] if parts else ""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                places[place or name.partition("-")[0]] += 512 * os.lstat(Path(folder, name)).st_blocks
    return dict(places)


def _look(pid: int, rounds: int) -> Iterator[Sample]:
    this = psutil.Process(pid)
    for process in [this, *this.children(recursive=True)]:
        try:
            name = "driver" if process.pid == pid else _name_of(process)
            if name:
                times = process.cpu_times()
                yield Sample(rounds, name, process.memory_info().rss, times.user + times.system)
        except psutil.Error:
            continue  # it ended while we looked


def _name_of(process: psutil.Process) -> str:
    """What a process is to us; empty for the small ones of Ray."""
    command = " ".join(process.cmdline())
    if "prefect.server" in command:
        return "Prefect server"
    if "reward_process" in command:
        return "reward process"
    if command.startswith("ray::Host"):
        return Path(os.readlink(f"/proc/{process.pid}/fd/1")).stem  # each writes into a log of its name
    return ""


def _num_task_runs(home: Path) -> int:
    import sqlite3

    with sqlite3.connect(home / "prefect" / "prefect.db") as database:
        [(count,)] = database.execute("select count(*) from task_run").fetchall()
    return int(count)


def report(
    entries: Sequence[LogEntry],
    samples: Sequence[Sample],
    *,
    task_runs: int,
    disk: Mapping[int, Mapping[str, int]] | None = None,
) -> dict[str, Any]:
    """Numbers from a run's log and from the looks at its processes, and at the disk by rounds and place."""
    steps = [(entry.written_at, entry.body.metrics) for entry in entries if isinstance(entry.body, Step)]
    rounds = [
        {"round": after - before, **_parts(metrics)}
        for (before, _), (after, metrics) in zip(steps[SKIPPED - 1 :], steps[SKIPPED:], strict=False)
    ]
    for one in rounds:
        one["overhead"] = one["round"] - one["generate"] - one["reward"] - one["train"]
    overheads = sorted(one["overhead"] for one in rounds)
    overhead = statistics.median(overheads)
    processes = {name: _line(samples, name) for name in dict.fromkeys(sample.process for sample in samples)}
    growth = {name: line["growth_per_1000_rounds"] for name, line in processes.items()}
    looks = disk or {}
    places = {place: _grown(looks, place) for place in sorted({place for look in looks.values() for place in look})}
    return {
        "rounds": len(steps),
        "median_seconds": {part: statistics.median(one[part] for one in rounds) for part in rounds[0]},
        "overhead_seconds": {"median": overhead, "p90": overheads[int(0.9 * (len(overheads) - 1))]},
        "share_of_usual_round": overhead / USUAL_ROUND,
        "task_runs_per_round": task_runs / len(steps),
        "processes": processes,
        "disk": places,
        "met": {
            "overhead": overhead <= MOST_SECONDS,
            "share": overhead / USUAL_ROUND <= MOST_SHARE,
            "task_runs": task_runs / len(steps) <= MOST_TASK_RUNS,
            # Two looks make no line: nothing is known yet.
            "memory": None if None in growth.values() else all(g <= MOST_GROWTH for g in growth.values() if g),
            "bytes": _within({name: processes.get(name) for name in MOST_BYTES}, MOST_BYTES),
            "store": _within(
                {name: places.get(name) for name in REMOVED_FROM}, dict.fromkeys(REMOVED_FROM, MOST_STORE_BYTES)
            ),
        },
    }


def _parts(metrics: dict[str, float]) -> dict[str, float]:
    names = ("generate", "reward", "commit", "wait", "load", "train", "save", "publish", "idle")
    return {name: metrics.get(f"{name}_seconds", 0.0) for name in names}


def _line(samples: Sequence[Sample], name: str) -> dict[str, Any]:
    """Memory over rounds of one process, the slope of the line through it, and processor time per round."""
    mine = [sample for sample in samples if sample.process == name]
    rss = {sample.rounds: sample.rss_bytes for sample in mine}
    slope, first, last = _slope(rss), mine[0], mine[-1]
    cpu = (last.cpu_seconds - first.cpu_seconds) / max(1, last.rounds - first.rounds)
    return {
        "rss_bytes": rss,
        "slope_bytes_per_1000_rounds": slope,
        "growth_per_1000_rounds": slope and slope / next(size for at, size in rss.items() if at >= SETTLED),
        "cpu_seconds_per_round": cpu,
    }


def _grown(disk: Mapping[int, Mapping[str, int]], place: str) -> dict[str, Any]:
    """Bytes of one place over rounds, and the slope of the line through them once caches are full."""
    sizes = {rounds: look.get(place, 0) for rounds, look in disk.items()}
    return {"bytes": sizes, "slope_bytes_per_1000_rounds": _slope(sizes)}


def _slope(sizes: Mapping[int, int]) -> float | None:
    """Per 1,000 rounds, of the line through what was seen from `SETTLED` on; two looks make no line."""
    settled = {float(rounds): float(size) for rounds, size in sizes.items() if rounds >= SETTLED}
    if len(settled) < 3:
        return None
    return 1000 * statistics.linear_regression(list(settled), list(settled.values())).slope


def _within(lines: Mapping[str, Any], most: Mapping[str, float]) -> bool | None:
    """Whether each grows by at most so many bytes in 1,000 rounds; None as long as one has no line."""
    slopes = {name: line["slope_bytes_per_1000_rounds"] for name, line in lines.items() if line is not None}
    if not slopes or None in slopes.values():
        return None
    return all(slope <= most[name] for name, slope in slopes.items())


def show(numbers: dict[str, Any], console: Console) -> None:
    """The bars first, then where it goes."""
    bars = {
        "overhead": f"{1e3 * numbers['overhead_seconds']['median']:.0f} ms (≤ {1e3 * MOST_SECONDS:.0f})",
        "share": f"{numbers['share_of_usual_round']:.2%} of a round of {USUAL_ROUND:.0f} s (≤ {MOST_SHARE:.0%})",
        "task_runs": f"{numbers['task_runs_per_round']:.1f} task runs per round (≤ {MOST_TASK_RUNS:.0f})",
        "memory": f"no process grows by more than {MOST_GROWTH:.0%} in 1,000 rounds",
        "bytes": "MB that a process grows by in 1,000 rounds: "
        + ", ".join(f"{name} ≤ {most / 1e6:.0f}" for name, most in MOST_BYTES.items()),
        "store": f"what retention removes from grows by ≤ {MOST_STORE_BYTES / 1e6:.0f} MB in 1,000 rounds",
    }
    words = {True: "met", False: "MISSED", None: "needs more rounds"}
    for bar, text in bars.items():
        console.print(f"{words[numbers['met'][bar]]}: {text}")
    table = Table(title=f"milliseconds of a round, medians of {numbers['rounds']} rounds")
    for part in numbers["median_seconds"]:
        table.add_column(part, justify="right")
    table.add_row(*(f"{1e3 * seconds:.0f}" for seconds in numbers["median_seconds"].values()))
    console.print(table)
    table = Table(title="processes: resident memory after so many rounds, and processor time")
    every_look = list(next(iter(numbers["processes"].values()))["rss_bytes"])
    shown = range(0, len(every_look), max(1, len(every_look) // MOST_COLUMNS))
    looks = [every_look[number] for number in shown]
    for column in ("", *map(str, looks), "MiB / 1,000 rounds", "CPU ms / round"):
        table.add_column(column, justify="right" if column else "left")
    for name, line in numbers["processes"].items():
        memory = [f"{line['rss_bytes'].get(look, 0) / 2**20:.0f}" for look in looks]
        slope = line["slope_bytes_per_1000_rounds"]
        slope = "-" if slope is None else f"{slope / 2**20:+.0f}"
        table.add_row(name, *memory, slope, f"{1e3 * line['cpu_seconds_per_round']:.0f}")
    console.print(table)
    table = Table(
        "place", "MB at the end", "MB / 1,000 rounds", title="disk, by folder of the run and of its state folder"
    )
    for place, line in numbers["disk"].items():
        slope = line["slope_bytes_per_1000_rounds"]
        table.add_row(
            place, f"{[*line['bytes'].values()][-1] / 1e6:.1f}", "-" if slope is None else f"{slope / 1e6:+.1f}"
        )
    console.print(table)


def main(
    rounds: Annotated[int, typer.Option(min=SKIPPED + 2, help="rounds to train")] = 1000,
    json_file: Annotated[Path | None, typer.Option("--json", help="where to save the numbers")] = None,
) -> None:
    """Measure, print, and save when asked."""
    with tempfile.TemporaryDirectory(prefix="millrace-") as scratch:
        numbers = measure(rounds, Path(scratch), every=min(EVERY, max(1, rounds // 5)))
    show(numbers, open_console())
    if json_file:
        json_file.write_text(json.dumps(numbers, indent=1) + "\n")
    if False in numbers["met"].values():
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
