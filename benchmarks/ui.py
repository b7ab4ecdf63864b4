"""How long the page of `millrace ui` takes to open a long run, and what following it costs.

In: nothing; a synthetic run in a store, its shards as small as they can be. Out: a table, and JSON.

    python -m benchmarks.ui [--steps 2000] [--attempts 500] [--seconds 120] [--json FILE]

A server that has just started is asked for what the run's page shows at first, over HTTP. Then Chromium, if it is
installed, opens the page at a server that is new too: until every picture on the screen is drawn. At last the run
takes a step every few seconds while the page is open, and the processor time of server and browser is counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import psutil
import pyarrow as pa
import typer
from rich.table import Table

from benchmarks.run_log import ATTEMPTS, a_round
from benchmarks.workloads.trajectories import provenance_of
from cli.terminal.console import open_console
from cli.ui.metrics import described
from storage.log.entries import Evaluation, Policy, Session, Shard, Step
from storage.log.run_log import RunLog
from storage.log.runs import create_run, trainer_lock
from storage.objects.digests import sha256_of
from storage.objects.object_store import LocalStore
from storage.objects.tables import ipc_bytes
from storage.records import Message, RolloutGroup, Sampling, Task, Trajectory, Turn
from storage.shards.codec import COMPRESSION, shard_table

RUN = "benchmark"
SECONDS_PER_STEP = 5.0
"""How often the run that is followed takes a step."""
FIRST_PARTS = ("overview", "steps", "environments")
"""What the page asks for before its reader scrolls."""
_DRAWN = """
const plots = [...document.querySelectorAll(".plot")];
const shown = plots.filter(plot => plot.getBoundingClientRect().top < innerHeight);
plots.length > 9 && shown.length && shown.every(plot => plot.childElementCount) ? performance.now() : 0
"""
MOST_SECONDS = 60.0
"""Until the page is drawn."""


class Writer:
    """Writes a run step by step: one shard of two-token attempts each, rewards that rise, every metric of a step."""

    def __init__(self, store: LocalStore, *, attempts: int) -> None:
        self.log = create_run(store, RUN, {"workflow": "benchmark:None", "seed": 0})
        self.log.append(Session(id="s", code_version="benchmark", steps=10**6))
        self.log.append(Policy(version=0, path="models/base", weights_sha256="0" * 64, parent=None))
        self._num_groups = -(-attempts // ATTEMPTS)
        self._table = shard_table(
            [_group(place) for place in range(self._num_groups)],
            provenance=provenance_of("template", run_id=RUN),
            sampling=Sampling(max_tokens=2),
        )
        names = [metric["match"] for section in described() for metric in section["metrics"]]
        self._metrics = [re.sub(r"\(\.\+\)", "0", name) for name in names if not name.startswith("pass")]
        self._draw = np.random.default_rng(0)

    def step(self) -> None:
        """Commit the next step's shard, the step, its registration and alias; an evaluation every hundredth time."""
        number = self.log.state.step + 1
        shard, step, *rest = a_round(number, self._num_groups)
        assert isinstance(shard, Shard) and isinstance(step, Step)
        data = self._shard(shard)
        self.log.store.put(self.log.shard_key(shard.id), data)
        shard = dataclasses.replace(shard, sha256=sha256_of(data), num_bytes=len(data))
        values = self._draw.random(len(self._metrics))
        metrics = {**dict(zip(self._metrics, values.tolist(), strict=True)), "peak_memory_bytes": 2.0**32}
        step = dataclasses.replace(step, metrics=metrics, shard_sha256={shard.id: shard.sha256}, state_path=None)
        for body in (shard, step, *rest):
            self.log.append(body)
        if number % 100 == 0:
            score = Evaluation(
                version=number, split="test", score=number / (number + 500), num_tasks=200, num_failed=0,
                shard_id=f"e{number}", seconds=1.0, standard_error=0.02,
            )  # fmt: skip
            self.log.append(score)

    def _shard(self, shard: Shard) -> bytes:
        """The template under other names: 10⁶ attempts one by one would take longer than what is measured."""
        rows = len(self._table)
        version = pa.array(np.full(rows, shard.head_version, dtype=np.int32))
        ids = {"group_id": [group.id for group in shard.groups], "prompt_id": [g.prompt_id for g in shard.groups]}
        columns: dict[str, pa.Array] = {name: pa.array(np.repeat(values, ATTEMPTS)) for name, values in ids.items()}
        columns |= {"head_version": version, "tail_version": version}
        columns["reward"] = pa.array(self._draw.integers(0, 2, rows).astype(np.float32))
        versions = np.tile(np.array([-1, shard.head_version, shard.head_version], dtype=np.int32), rows)
        offsets = pa.array(np.arange(0, 3 * rows + 1, 3, dtype=np.int32))
        columns["weight_versions"] = pa.ListArray.from_arrays(offsets, pa.array(versions))
        table = self._table
        for name, column in columns.items():
            table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), column)
        return ipc_bytes(table, compression=COMPRESSION)


def _group(place: int) -> RolloutGroup:
    turn = Turn(
        context_ids=[2], sampled_ids=[12, 1], logprobs=[-0.5, -0.1], weight_versions=[0, 0], finish_reason="stop"
    )
    chat = [Message(role="user", content="3"), Message(role="assistant", content="7", is_completion=True)]
    attempts = [Trajectory(attempt=n, turns=[turn], messages=chat, status="ok", reward=1.0) for n in range(ATTEMPTS)]
    task = Task(id=f"task{place}", prompt="3")
    return RolloutGroup(
        id=f"0.task{place}", task=task, position=place, epoch=0, expected=ATTEMPTS, trajectories=attempts
    )


@contextlib.contextmanager
def serving(store: LocalStore) -> Iterator[tuple[psutil.Process, str]]:
    """A server in a process of its own, and its address; it has opened no run yet."""
    command = [sys.executable, "-m", "cli.main", "ui", "--port", "0", "--no-browser", "--store", store.uri]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[0]
        httpx.get(f"{address}api/metrics")
        try:
            yield psutil.Process(process.pid), address
        finally:
            process.terminate()


def open_seconds(address: str) -> dict[str, float]:
    """Wall-clock of each part that the page shows at first, one after another, from a server that has no run open."""
    seconds = {}
    with httpx.Client(base_url=address, timeout=120) as client:
        for name, path in {"page": "/", **{part: f"/api/runs/{RUN}/{part}" for part in FIRST_PARTS}}.items():
            started = time.perf_counter()
            client.get(path).raise_for_status()
            seconds[name] = time.perf_counter() - started
        started = time.perf_counter()
        client.get(f"/api/runs/{RUN}/trajectories").raise_for_status()
        seconds["newest trajectories"] = time.perf_counter() - started
    return seconds


class Browser:
    """Chromium with one page, spoken to by its DevTools protocol."""

    def __init__(self, chromium: str, scratch: Path) -> None:
        quiet = ["--no-first-run", "--disable-background-networking", "--disable-quic", "--disable-gpu", "--no-sandbox"]
        options = ["--headless", "--remote-debugging-port=0", f"--user-data-dir={scratch}", "--window-size=1400,1000"]
        command = [chromium, *options, *quiet, "about:blank"]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        line = next(line for line in self._process.stderr if "DevTools listening" in line)
        port = re.search(r"127\.0\.0\.1:(\d+)", line)
        assert port is not None
        pages = httpx.get(f"http://127.0.0.1:{port[1]}/json").json()
        self._socket = next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")
        self.process = psutil.Process(self._process.pid)

    def open(self, address: str) -> float:
        """Seconds from the navigation until every picture on the screen is drawn."""
        return asyncio.run(self._open(address)) / 1000

    async def _open(self, address: str) -> float:
        from websockets.asyncio.client import connect

        async with connect(self._socket, max_size=None) as socket:
            await socket.send(json.dumps({"id": 1, "method": "Page.navigate", "params": {"url": address}}))
            asked = {"expression": f"{{ {_DRAWN} }}", "returnByValue": True}
            async with asyncio.timeout(MOST_SECONDS):
                while True:
                    await socket.send(json.dumps({"id": 2, "method": "Runtime.evaluate", "params": asked}))
                    while (reply := json.loads(await socket.recv())).get("id") != 2:
                        pass
                    if milliseconds := reply.get("result", {}).get("result", {}).get("value"):
                        return float(milliseconds)
                    await asyncio.sleep(0.02)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def cpu_seconds(process: psutil.Process) -> float:
    """Processor seconds of a process and its children."""
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def follow(writer: Writer, watched: dict[str, psutil.Process], seconds: float) -> dict[str, float]:
    """Share of a core that each process uses while the run takes a step every `SECONDS_PER_STEP`."""
    before, started = {name: cpu_seconds(process) for name, process in watched.items()}, time.perf_counter()
    while time.perf_counter() - started < seconds:
        writer.step()
        time.sleep(SECONDS_PER_STEP)
    wall = time.perf_counter() - started
    return {name: (cpu_seconds(process) - before[name]) / wall for name, process in watched.items()}


def measure(store: LocalStore, *, steps: int, attempts: int, seconds: float) -> dict[str, Any]:
    """All numbers; None for those of a browser without one."""
    writer, started = Writer(store, attempts=attempts), time.perf_counter()
    for _ in range(steps):
        writer.step()
    written = time.perf_counter() - started
    numbers: dict[str, Any] = {
        "steps": steps,
        "trajectories": writer.log.state.num_trajectories,
        "entries": len(RunLog(store, RUN).refresh().history),
        "megabytes": sum(file.num_bytes for file in store.walk(f"runs/{RUN}")) / 1e6,
        "written_seconds": written,
        "drawn_seconds": None,
        "browser_core_share": None,
    }
    with serving(store) as (server, address):
        before = cpu_seconds(server)
        numbers["first_seconds"] = open_seconds(address)
        numbers["open_cpu_seconds"] = cpu_seconds(server) - before
    numbers["open_seconds"] = sum(numbers["first_seconds"][part] for part in ("page", *FIRST_PARTS))
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with serving(store) as (server, address), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        watched = {"server": server}
        browser = Browser(chromium, Path(scratch)) if chromium else None
        try:
            if browser:
                numbers["drawn_seconds"] = browser.open(f"{address}#run={RUN}")
                watched["browser"] = browser.process
                time.sleep(2)
            with trainer_lock(writer.log):
                shares = follow(writer, watched, seconds)
        finally:
            if browser:
                browser.close()
    return numbers | {f"{name}_core_share": share for name, share in shares.items()}


def main(
    steps: Annotated[int, typer.Option(min=2, help="Steps of the run.")] = 2000,
    attempts: Annotated[int, typer.Option(min=8, help="Attempts per step, rounded up to groups of eight.")] = 500,
    seconds: Annotated[float, typer.Option(min=1, help="How long the run is followed.")] = 120.0,
    output: Annotated[Path | None, typer.Option("--json", help="Write the numbers here.")] = None,
) -> None:
    """Write a long run, open its page, follow it."""
    with tempfile.TemporaryDirectory() as scratch:
        numbers = measure(LocalStore(Path(scratch)), steps=steps, attempts=attempts, seconds=seconds)
    table = Table(title=f"the page of a run of {steps:,} steps and {numbers['trajectories']:,} trajectories")
    for column in ("data of the page", "CPU for it", "drawn", "newest trajectories", "following: server", "browser"):
        table.add_column(column, justify="right")
    drawn, browser = numbers["drawn_seconds"], numbers["browser_core_share"]
    table.add_row(
        f"{numbers['open_seconds']:.2f} s",
        f"{numbers['open_cpu_seconds']:.2f} s",
        "–" if drawn is None else f"{drawn:.2f} s",
        f"{numbers['first_seconds']['newest trajectories']:.2f} s",
        f"{100 * numbers['server_core_share']:.2f} %",
        "–" if browser is None else f"{100 * browser:.1f} %",
    )
    open_console().print(table)
    if output:
        output.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
