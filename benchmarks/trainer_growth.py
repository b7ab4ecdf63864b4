"""How the time of a trainer's step grows: with its tokens it should grow in proportion, with its shards not at all.

In: nothing; a small random model and random samples. Out: tables, and JSON.

    python -m benchmarks.trainer_growth [--rounds 5] [--threads 2] [--json FILE]

Tokens: sequences of 256 tokens, 4 to 256 of them, in one pack each time and in packs of the default size. Shards: the
same 64 groups, 16k tokens, cut into 1, 8 and 64 shards; timed from their tables in memory, as storage makes them, to
the end of the step, `gather_samples` included. Rounds go through all sizes in turn, and each figure is a median of
processor seconds, which other work on the machine disturbs least; wall-clock is in the JSON beside it.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.workloads.trainer import config_of, model_folder, random_groups, samples_of, shard_tables
from cli.terminal.console import open_console
from storage.records import RolloutGroup
from trainers.data.samples import gather_samples
from trainers.trainer import Trainer

TOKENS = (1024, 4096, 16_384, 65_536)
SHARDS = (1, 8, 64)
LENGTH, PROMPT, ATTEMPTS = 256, 32, 4
HIDDEN_SIZE, NUM_LAYERS = 128, 2


def fixed_groups(*, num_groups: int, attempts: int, length: int) -> list[RolloutGroup]:
    """Sequences of one length."""
    return random_groups(
        num_groups=num_groups,
        attempts=attempts,
        prompt_length=lambda _: PROMPT,
        reply_length=lambda _: length - PROMPT,
    )


def measure(*, rounds: int, threads: int) -> dict[str, Any]:
    """Everything, as the JSON it is saved as."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory(prefix="millrace-") as scratch:
        folder = model_folder(Path(scratch), hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYERS)
        whole = Trainer(folder, config_of(max_tokens=LENGTH, tokens_per_microbatch=max(TOKENS)))
        packed = Trainer(folder, config_of(max_tokens=LENGTH))
    actions: dict[str, Callable[[], float]] = {}
    for tokens in TOKENS:
        groups = fixed_groups(num_groups=tokens // LENGTH // ATTEMPTS, attempts=ATTEMPTS, length=LENGTH)
        actions[f"one pack/{tokens}"] = _step(whole, groups)
        actions[f"default packs/{tokens}"] = _step(packed, groups)
    groups = fixed_groups(num_groups=max(SHARDS), attempts=ATTEMPTS, length=LENGTH // 4)
    for shards in SHARDS:
        actions[f"shards/{shards}"] = _read_and_step(packed, groups, num_shards=shards)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in actions}
    for number in range(rounds + 1):
        for name, action in actions.items():
            started, cpu_started = time.perf_counter(), time.process_time()
            action()
            took = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu_started}
            if number:  # the first round allocates
                runs[name].append(took)
    growth = {
        way: {tokens: _median(runs[f"{way}/{tokens}"]) for tokens in TOKENS} for way in ("one pack", "default packs")
    }
    by_shards = {count: _median(runs[f"shards/{count}"]) for count in SHARDS}
    return {
        "slopes": {way: _slope(seconds) for way, seconds in growth.items()},
        "most_over_one_shard": max(by_shards.values()) / by_shards[1],
        "cpu_seconds_by_tokens": growth,
        "cpu_seconds_by_shards": by_shards,
        "tokens_of_shards": max(SHARDS) * ATTEMPTS * LENGTH // 4,
        "model": {"hidden_size": HIDDEN_SIZE, "num_layers": NUM_LAYERS, "sequence_length": LENGTH},
        "machine": {
            "cores": os.cpu_count(),
            "threads": threads,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "runs": runs,
    }


def _step(trainer: Trainer, groups: list[RolloutGroup]) -> Callable[[], float]:
    samples = samples_of(groups)
    return lambda: trainer.step(samples, step=1, base_version=0, max_staleness=0)["loss"]


def _read_and_step(trainer: Trainer, groups: list[RolloutGroup], *, num_shards: int) -> Callable[[], float]:
    claimed, tables = shard_tables(groups, num_shards=num_shards)
    return lambda: trainer.step(gather_samples(claimed, tables), step=1, base_version=0, max_staleness=0)["loss"]


def _median(runs: list[dict[str, float]]) -> float:
    return statistics.median(run["cpu_seconds"] for run in runs)


def _slope(seconds: dict[int, float]) -> float:
    """The slope of log seconds over log tokens, by least squares; 1 is in proportion."""
    return statistics.linear_regression(
        *zip(*((math.log(t), math.log(s)) for t, s in seconds.items()), strict=True)
    ).slope


def show(numbers: dict[str, Any], console: Console) -> None:
    """Slopes and ratios first."""
    slopes = numbers["slopes"]
    console.print(
        f"time ~ tokens^{slopes['one pack']:.2f} in one pack, tokens^{slopes['default packs']:.2f} in default packs; "
        f"the most over one shard's: {numbers['most_over_one_shard']:.2f}"
    )
    table = Table()
    for column in ("tokens", "one pack, CPU s", "µs/token", "default packs, CPU s", "µs/token"):
        table.add_column(column, justify="right")
    for tokens in TOKENS:
        both = [numbers["cpu_seconds_by_tokens"][way][tokens] for way in ("one pack", "default packs")]
        cells = [cell for seconds in both for cell in (f"{seconds:.3f}", f"{seconds / tokens * 1e6:.1f}")]
        table.add_row(f"{tokens:,}", *cells)
    console.print(table)
    table = Table()
    for column in ("shards", "CPU s"):
        table.add_column(column, justify="right")
    for count, seconds in numbers["cpu_seconds_by_shards"].items():
        table.add_row(str(count), f"{seconds:.3f}")
    console.print(table)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="times each size is measured")] = 5,
    threads: Annotated[int, typer.Option(min=1)] = os.cpu_count() or 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="where to save the numbers")] = None,
) -> None:
    """Measure, print, and save when asked."""
    numbers = measure(rounds=rounds, threads=threads)
    show(numbers, open_console())
    if json_file:
        json_file.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
