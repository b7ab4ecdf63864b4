"""How long it takes to open a run, from its entries one by one and from its segments.

In: nothing; a synthetic log in a store. Out: a table, and JSON.

    python -m benchmarks.run_log [--entries 100000] [--store URI] [--json FILE]

Every four entries are a shard of five groups of eight attempts, the step that trains it, its registration and its
alias: 100,000 entries are a run of 25,000 steps and 10⁶ trajectories.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
import timeit
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from cli.terminal.console import open_console
from storage.log.entries import (
    Alias,
    Claim,
    ClaimedGroup,
    Entry,
    GroupSummary,
    Policy,
    Registration,
    Session,
    Shard,
    Step,
)
from storage.log.history import decode_entry, encode_entry
from storage.log.run_log import RunLog
from storage.log.runs import create_run
from storage.objects.object_store import LocalStore, ObjectStore
from storage.objects.opening import open_store

GROUPS, ATTEMPTS = 5, 8
LARGE = 64
"""Groups in the entry whose JSON is timed."""


def write_run(store: ObjectStore, run_id: str, num_entries: int) -> None:
    """Commit a synthetic run through the log itself, segments included."""
    log = create_run(store, run_id, {"seed": 0})
    log.append(Session(id="s", code_version="benchmark"))
    log.append(Policy(version=0, path="models/base", weights_sha256="0" * 64, parent=None))
    for step in range(1, -(-(num_entries - 2) // 4) + 1):
        for body in a_round(step)[: num_entries - log.state.entries]:
            log.append(body)


def a_round(step: int, num_groups: int = GROUPS) -> list[Entry]:
    shard_id = f"{step:06d}-rollout-0"
    groups = [
        GroupSummary(
            id=f"0.task{position}",
            prompt_id=f"task{position}",
            position=position,
            epoch=0,
            expected=ATTEMPTS,
            usable=ATTEMPTS,
            rows=ATTEMPTS,
            accepted=True,
            reject_reason="",
            failures={},
            head_version=step - 1,
            tail_version=step - 1,
            mean_reward=(position % 9) / 8,
        )
        for position in range(num_groups * (step - 1), num_groups * step)
    ]
    shard = Shard(
        id=shard_id,
        sha256=f"{step:064x}",
        num_rows=num_groups * ATTEMPTS,
        num_tokens=num_groups * ATTEMPTS * 100,
        num_bytes=num_groups * ATTEMPTS * 1000,
        head_version=step - 1,
        tail_version=step - 1,
        is_eval=False,
        groups=groups,
        producer="rollout-0",
        seconds={"generate": 1.0, "reward": 0.1, "commit": 0.01},
    )
    trained = [ClaimedGroup(shard_id=shard_id, group_id=group.id) for group in groups]
    made = Step(
        claim=Claim(step=step, base_version=step - 1, trained=trained, stale=[], filtered=[], failed=[]),
        policy=Policy(version=step, path=f"policies/{step}", weights_sha256=f"{step:064x}", parent=step - 1),
        shard_sha256={shard_id: shard.sha256},
        metrics={f"metric_{number}": step / (number + 3) for number in range(25)},
        state_path=f"state/{step}" if step % 10 == 0 else None,
        session_id="s",
    )
    registration = Registration(version=step, model_name="run", registry_version=str(step + 1))
    return [shard, made, registration, Alias(name="rollout", version=step, checksum="c" * 64)]


def json_microseconds() -> tuple[float, float]:
    """Best wall-clock of writing and of reading the JSON of a shard's entry with `LARGE` groups."""
    shard = a_round(1, LARGE)[0]
    document = encode_entry(shard, number=0, written_at=1.0)
    write = timeit.repeat(lambda: encode_entry(shard, number=0, written_at=1.0), number=100)
    read = timeit.repeat(lambda: decode_entry(document, number=0), number=100)
    return 1e4 * min(write), 1e4 * min(read)


def delete_run(store: ObjectStore, run_id: str) -> None:
    """Leave nothing of a synthetic run in a store that others may use."""
    store.delete([file.key for file in store.walk(f"runs/{run_id}")])
    if isinstance(store, LocalStore):
        shutil.rmtree(store.root / "runs" / run_id, ignore_errors=True)  # folders that are empty now


def open_seconds(store: ObjectStore, run_id: str, repeats: int) -> float:
    """Median wall-clock of opening the log and looking at its newest step."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        log = RunLog(store, run_id)
        assert log.refresh().steps[-1].claim.step == log.state.step
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def main(
    entries: Annotated[int, typer.Option(min=4, help="Entries in the log.")] = 100_000,
    store: Annotated[str, typer.Option(help="Where to put it; a temporary folder by default.")] = "",
    output: Annotated[Path | None, typer.Option("--json", help="Write the numbers here.")] = None,
) -> None:
    """Write a log, open it from its segments, remove them, open it entry by entry, and delete it."""
    with tempfile.TemporaryDirectory() as scratch:
        place = open_store(store or scratch)
        run_id = f"benchmark-{time.time_ns()}"
        try:
            started = time.perf_counter()
            write_run(place, run_id, entries)
            append_ms = 1000 * (time.perf_counter() - started) / entries
            with_segments = open_seconds(place, run_id, 5)
            segments = place.walk(f"runs/{run_id}/log/segments")
            place.delete([file.key for file in segments])
            one_by_one = open_seconds(place, run_id, 1)
            write_us, read_us = json_microseconds()
            numbers = {
                "ratio": one_by_one / with_segments,
                "entries": entries,
                "trajectories": entries // 4 * GROUPS * ATTEMPTS,
                "store": "s3" if store.startswith("s3:") else "local",
                "open_seconds": with_segments,
                "open_seconds_without_segments": one_by_one,
                "append_milliseconds": append_ms,
                "write_entry_microseconds": write_us,
                "read_entry_microseconds": read_us,
                "segment_megabytes": sum(file.num_bytes for file in segments) / 1e6,
            }
        finally:
            delete_run(place, run_id)
    table = Table(title=f"opening a run of {entries} entries, {numbers['trajectories']} trajectories")
    for column in (
        "entry by entry / segments",
        "segments",
        "entry by entry",
        "append",
        "write, read JSON",
        "segments on disk",
    ):
        table.add_column(column, justify="right")
    table.add_row(
        f"{numbers['ratio']:.0f}×",
        f"{with_segments:.2f} s",
        f"{one_by_one:.1f} s",
        f"{append_ms:.2f} ms",
        f"{write_us:.0f}, {read_us:.0f} µs",
        f"{numbers['segment_megabytes']:.0f} MB",
    )
    open_console().print(table)
    if output:
        output.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
