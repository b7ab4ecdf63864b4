"""Throughput of one run while producers come and go: it should follow their number.

In: nothing; `millrace train` that only trains, and up to four `millrace produce` beside it, in folders of their own.
Out: a table, and the same as JSON.

    python -m benchmarks.producers [--seconds 40] [--json FILE]

An attempt waits 2 s for a world that is slow to answer, and a producer has 32 of them in flight, so it makes 16 a
second at most, whatever the machine. One is started, three are added, one of them is killed (-9). What is counted is
attempts in shards that were committed in a window which opens when the last change has shown in the log. The bar: each
number of producers makes at least 0.8 times as much per producer as one alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.orchestration import make_model
from cli.terminal.console import open_console
from examples.arithmetic import Arithmetic
from rollouts.chat.chat import Chat
from rollouts.workflow import Score
from storage.log.entries import LogEntry, Release, Shard
from storage.log.run_log import RunLog
from storage.objects.object_store import LocalStore
from storage.records import Task

ROOT = Path(__file__).parents[1]
RUN = "producers"
NAMES = ("first", "second", "third", "fourth")
WORLD_SECONDS = 2.0
N_SAMPLES, GROUPS_IN_FLIGHT = 4, 8
MOST_PER_SECOND = N_SAMPLES * GROUPS_IN_FLIGHT / WORLD_SECONDS
"""Attempts of one producer."""
LEAST_SHARE = 0.8
PATIENCE = 300.0
"""Seconds without which a change that does not show has failed."""


class SlowWorld(Arithmetic):
    """Sums that take a while to be told right or wrong."""

    async def run(self, task: Task, chat: Chat) -> Score:
        reply = await chat.ask(task.prompt)
        await asyncio.sleep(WORLD_SECONDS)
        return Score(reward=float(reply[-1:] == task.answer[-1:]))


class Crowd:
    """A run and its producers, as processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._store = LocalStore(folder / "store")
        self._log = RunLog(self._store, RUN)
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def train(self, model: Path) -> None:
        run_file = self._folder / "run.toml"
        run_file.write_text(_run_file(model))
        self._start("driver", "train", str(run_file), f"store={self._store.uri}")
        self.until(lambda: self._store.exists(f"runs/{RUN}/run.json"))

    def produce(self, name: str) -> None:
        self._start(name, "produce", RUN, "--name", name, "--store", self._store.uri)

    def kill(self, name: str) -> None:
        process = self._running.pop(name)
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def end(self) -> None:
        for name in list(self._running):
            self.kill(name)

    def entries(self) -> Sequence[LogEntry]:
        self._log.refresh()
        return self._log.entries

    def has_committed(self, name: str) -> bool:
        shards = (entry.body for entry in self.entries() if isinstance(entry.body, Shard))
        return any(shard.producer.startswith(name) for shard in shards)

    def has_lost(self, name: str) -> bool:
        released = (entry.body for entry in self.entries() if isinstance(entry.body, Release))
        return any(release.holder.startswith(name) for release in released)

    def until(self, met: Callable[[], bool]) -> None:
        """Raises `RuntimeError` if a process ends meanwhile, or nothing happens for too long."""
        deadline = time.monotonic() + PATIENCE
        while not met():
            ended = [name for name, process in self._running.items() if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                outputs = [(self._folder / name / "output.txt").read_text()[-3000:] for name in ended]
                raise RuntimeError("\n".join([f"ended: {ended}, or nothing happened", *outputs]))
            time.sleep(0.1)

    def _start(self, name: str, *arguments: str) -> None:
        home = self._folder / name
        home.mkdir()
        environment = {**os.environ, "MILLRACE_HOME": str(home), "PYTHONPATH": str(ROOT)}
        environment.pop("PREFECT_API_URL", None)  # each with a server of its own, as machines apart have
        millrace = str(Path(sys.executable).with_name("millrace"))
        with open(home / "output.txt", "w") as output:
            self._running[name] = subprocess.Popen(
                [millrace, *arguments],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )


def _run_file(model: Path) -> str:
    return f"""
workflow = "benchmarks.producers:SlowWorld"
run = {json.dumps(RUN)}
model = {json.dumps(str(model))}
steps = 100000
batch_size = 16
n_samples = {N_SAMPLES}
max_staleness = 8
[sampling]
max_tokens = 8
[evaluation]
every = 0
[engine]
kind = "scripted"
max_model_len = 64
[rollout]
num_workers = 0
max_concurrent = {GROUPS_IN_FLIGHT}
lease_timeout = 6
shard_seconds = 2
[train]
checkpoint_every = 10
"""


def measure(scratch: Path, *, seconds: float, console: Console) -> list[dict[str, Any]]:
    """One producer, two, four, and three that are left of four."""
    make_model(scratch / "model")
    crowd = Crowd(scratch)
    windows: list[dict[str, Any]] = []

    def window(label: str, number: int) -> None:
        begin = time.time()
        crowd.until(lambda: time.time() >= begin + seconds)
        windows.append(rate(crowd.entries(), begin, begin + seconds) | {"producers": number, "label": label})
        console.print(f"{label}: {windows[-1]['attempts_per_second']:.1f} attempts/s")

    try:
        crowd.train(scratch / "model")
        for number, names in ((1, NAMES[:1]), (2, NAMES[1:2]), (4, NAMES[2:])):
            for name in names:
                crowd.produce(name)
            for name in names:
                crowd.until(lambda name=name: crowd.has_committed(name))  # type: ignore[misc]
            window(f"{' and '.join(names)} started", number)
        crowd.kill(NAMES[1])
        crowd.until(lambda: crowd.has_lost(NAMES[1]))
        window(f"{NAMES[1]} killed", 3)
    finally:
        crowd.end()
    return windows


def rate(entries: Sequence[LogEntry], begin: float, end: float) -> dict[str, Any]:
    """Attempts per second in shards committed from `begin` to `end`, and rows by producer."""
    by: dict[str, int] = {}
    for entry in entries:
        if isinstance(entry.body, Shard) and begin <= entry.written_at < end:
            by[entry.body.producer] = by.get(entry.body.producer, 0) + entry.body.num_rows
    return {"attempts_per_second": sum(by.values()) / (end - begin), "rows_of": by}


def main(
    seconds: Annotated[float, typer.Option(min=10, help="length of each window")] = 40.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="where to save the numbers")] = None,
) -> None:
    """Measure, print, and save when asked."""
    console = open_console()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    with tempfile.TemporaryDirectory(prefix="millrace-") as scratch:
        windows = measure(Path(scratch), seconds=seconds, console=console)
    alone = windows[0]["attempts_per_second"]
    for one in windows:
        one["times_one"] = one["attempts_per_second"] / alone
    met = all(one["times_one"] >= LEAST_SHARE * one["producers"] for one in windows)
    console.print(f"{'met' if met else 'MISSED'}: at least {LEAST_SHARE} times as much per producer as one alone")
    table = Table(title=f"attempts in committed shards; a producer can make {MOST_PER_SECOND:.0f} a second")
    for column in ("", "producers", "times one", "attempts/s"):
        table.add_column(column, justify="right" if column else "left")
    for one in windows:
        numbers = f"{one['times_one']:.2f}", f"{one['attempts_per_second']:.1f}"
        table.add_row(one["label"], str(one["producers"]), *numbers)
    console.print(table)
    if json_file:
        json_file.write_text(json.dumps({"met": met, "seconds": seconds, "windows": windows}, indent=1) + "\n")
    if not met:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
