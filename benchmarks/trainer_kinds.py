"""Where the seconds of a training step go, by kind of operation, and how far that is from what the machine can do.

In: a model folder or GGUF; random groups of the lengths of `examples/smollm2`. Out: a ratio, a table, and JSON.

    python -m benchmarks.trainer_kinds MODEL [--steps 3] [--threads 2] [--json FILE]

The machine's peak is the fastest of a few products of 2048 × 2048 matrices in the step's type. What the step needs is
6 multiplications and additions per weight and computed token of the groups that can move the policy, of the output
matrix per predicted token. `before` is the same step with arithmetic 1 (`trainers.data.samples.ARITHMETIC`) and a
forward pass over the groups without signal, as it was taken until then; the two take turns.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.profiler import profile

from benchmarks.workloads.trainer import config_of, random_groups, samples_of
from cli.terminal.console import open_console
from trainers.data.operations import Operations
from trainers.data.samples import Samples

KINDS = {
    "matrix products": ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul"),
    "attention": ("scaled_dot_product",),
    "copies and casts": (
        *("copy_", "clone", "cat", "fill_", "zero_", "index", "embedding", "gather", "scatter", "empty", "new_"),
        *("_to_copy", "contiguous", "resize", "repeat_interleave", "split", "allgather", "reduce_scatter"),
    ),
    "softmax and the like": ("exp", "log", "amax", "softmax", "silu", "sigmoid", "rsqrt"),
    "optimizer and norms of gradients": ("adam", "vector_norm", "_foreach", "stack"),
    "other arithmetic": ("mul", "add", "sub", "div", "neg", "sum", "mean", "pow", "where", "masked", "sin", "cos"),
}
"""Parts of the names of torch's operations; the first kind that has one counts."""
REST = "Python and the rest"
SHARE_WITHOUT_SIGNAL = 0.4375
"""Share of a step's groups in `examples/smollm2`, the median over its run."""


def kind_of(operation: str) -> str:
    """What an operation of torch is.

    >>> kind_of("aten::_scaled_dot_product_flash_attention_for_cpu"), kind_of("aten::addmm"), kind_of("aten::add_")
    ('attention', 'matrix products', 'other arithmetic')
    """
    name = operation.removeprefix("aten::")
    for kind, parts in KINDS.items():
        if (name in parts) if kind == "matrix products" else any(part in name for part in parts):
            return kind
    return REST


def workload(*, num_groups: int, attempts: int) -> Samples:
    """Prompts of 50 to 74 tokens, replies of 26 on average and at most 48; some groups of equal rewards."""
    groups = random_groups(
        num_groups=num_groups,
        attempts=attempts,
        prompt_length=lambda draw: int(draw.integers(50, 75)),
        reply_length=lambda draw: min(48, 1 + int(draw.geometric(1 / 25))),
    )
    samples = samples_of(groups)
    flat_B = samples.groups_B < round(SHARE_WITHOUT_SIGNAL * num_groups)
    return dataclasses.replace(samples, rewards_B=np.where(flat_B, np.float32(1), samples.rewards_B))


def peak_flops(dtype: torch.dtype) -> float:
    """Multiplications and additions a second in a product of large matrices."""
    size, seconds = 2048, []
    left, right = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    for _ in range(6):
        started = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / min(seconds)


def needed_flops(trainer: Any, samples: Samples, rows: np.ndarray) -> float:
    """Operations in the matrix products of a step's passes over these rows; each shared token counts once."""
    operations, flops = Operations.of(trainer.model.causal_lm), 0.0
    for pack in trainer._packs(samples, rows, mask_T=samples.mask_T, values={}):
        flops += 3 * operations.forward(computed=pack.layout.num_computed, predicted=pack.num_predicted, pairs=0)
    return flops


def timed(step: Callable[[], Any]) -> dict[str, float]:
    """Wall and processor seconds of a call."""
    started, cpu_started = time.perf_counter(), time.process_time()
    step()
    return {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu_started}


def by_kind(step: Callable[[], Any]) -> dict[str, float]:
    """The seconds of a call by kind of operation; they add up to it."""
    started = time.perf_counter()
    with profile() as profiled:
        step()
        took = time.perf_counter() - started
    seconds: defaultdict[str, float] = defaultdict(float)
    for event in profiled.key_averages():
        if event.key.startswith("aten::"):
            seconds[kind_of(event.key)] += event.self_cpu_time_total / 1e6
    seconds[REST] += max(0.0, took - sum(seconds.values()))
    return {kind: seconds[kind] for kind in (*KINDS, REST)}


def measure(folder: Path, *, steps: int, dtype: str, num_groups: int, attempts: int) -> dict[str, Any]:
    """Everything, as the JSON it is saved as."""
    from trainers.trainer import Trainer

    samples = workload(num_groups=num_groups, attempts=attempts)
    flat = np.flatnonzero(samples.groups_B < round(SHARE_WITHOUT_SIGNAL * num_groups))
    trainer = Trainer(folder, config_of(max_tokens=127, dtype=dtype))
    vocabulary = trainer.model.causal_lm.config.get_text_config().vocab_size
    samples = dataclasses.replace(samples, input_ids_T=samples.input_ids_T % vocabulary)

    def after() -> None:
        trainer.step(samples, step=1, base_version=0, max_staleness=0)

    def before() -> None:
        old = dataclasses.replace(samples, arithmetic=1)
        trainer.step(old, step=1, base_version=0, max_staleness=0)
        trainer._look(old, flat, {"logprobs"})

    after()  # moments, and what libraries load
    runs: dict[str, list[dict[str, float]]] = {"before": [], "after": []}
    for _ in range(steps):
        runs["before"].append(timed(before))
        runs["after"].append(timed(after))
    peak = peak_flops(getattr(torch, dtype))
    needed = needed_flops(trainer, samples, np.setdiff1d(np.arange(samples.num_rows), flat))
    kinds = {"before": by_kind(before), "after": by_kind(after)}
    ratios = {
        name: statistics.median(b[name] / a[name] for b, a in zip(runs["before"], runs["after"], strict=True))
        for name in ("seconds", "cpu_seconds")
    }
    return {
        "speed_ratio": ratios["seconds"],
        "cpu_ratio": ratios["cpu_seconds"],
        "peak_gflops": peak / 1e9,
        "needed_gflop": needed / 1e9,
        "needed_seconds": needed / peak,
        "share_of_peak": needed / peak / statistics.median(run["seconds"] for run in runs["after"]),
        "products_to_needed": kinds["after"]["matrix products"] / (needed / peak),
        "seconds_by_kind": kinds,
        "runs": runs,
        "groups": [num_groups, attempts],
        "dtype": dtype,
        "machine": {
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "load": os.getloadavg()[0],
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    }


def show(numbers: dict[str, Any], console: Console) -> None:
    """The ratio first, then what it is of."""
    console.print(
        f"{numbers['speed_ratio']:.2f} times as fast as before ({numbers['cpu_ratio']:.2f} by processor time); "
        f"{numbers['share_of_peak']:.0%} of the {numbers['peak_gflops']:.0f} GFLOP/s of a large product, "
        f"{numbers['products_to_needed']:.2f} times the seconds that the needed products take at that speed; "
        f"load {numbers['machine']['load']:.1f}"
    )
    table = Table()
    for column in ("seconds", "before", "after"):
        table.add_column(column, justify="left" if column == "seconds" else "right")
    kinds = numbers["seconds_by_kind"]
    for kind in kinds["after"]:
        table.add_row(kind, f"{kinds['before'][kind]:.2f}", f"{kinds['after'][kind]:.2f}")
    for name in ("seconds", "cpu_seconds"):
        medians = (statistics.median(run[name] for run in numbers["runs"][side]) for side in ("before", "after"))
        table.add_row(f"step, {name.replace('_', ' ')}", *(f"{median:.2f}" for median in medians))
    console.print(table)


def main(
    model: Annotated[str, typer.Argument(help="folder or GGUF file")],
    steps: Annotated[int, typer.Option(min=1, help="steps of each side")] = 3,
    threads: Annotated[int, typer.Option(min=1)] = os.cpu_count() or 1,
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    groups: Annotated[int, typer.Option(min=2)] = 16,
    attempts: Annotated[int, typer.Option(min=2)] = 8,
    json_file: Annotated[Path | None, typer.Option("--json", help="where to save the numbers")] = None,
) -> None:
    """Measure, print, and save when asked."""
    from trainers.model.fetch import folder_of_gguf

    torch.set_num_threads(threads)
    folder = folder_of_gguf(Path(model)) if model.endswith(".gguf") else Path(model)
    numbers = measure(folder, steps=steps, dtype=dtype, num_groups=groups, attempts=attempts)
    show(numbers, open_console())
    if json_file:
        json_file.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
