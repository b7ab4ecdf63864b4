"""Memory of a rank for one long row: computed by one rank alone, and divided among two and four (sequence parallel).

In: nothing; a small random model and one random row. Out: a ratio, a table, and JSON.

    python -m benchmarks.long_context [--tokens 2048] [--hidden-size 256] [--num-layers 4] [--json FILE]

Every figure is of the rank that takes most, of a step in processes of its own on gloo, one thread each. `kept` is what
the forward pass keeps for the backward pass, counted by hooks on the saved tensors, weights apart. `peak` is how far
resident memory rises above what it was before the step; it has the gradients too, and gathered layers. The model is
sharded (FSDP2) over as many ranks whether they share the row or not: with `sequence_parallel` 1 every rank computes it.
"""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.workloads.trainer import config_of, model_folder, random_groups, samples_of
from cli.terminal.console import open_console
from infra.ports import free_port
from trainers.data.samples import Samples
from trainers.trainer import Trainer

SIZES = (1, 2, 4)
SHORT = 64
"""Tokens of the row before it."""
PROMPT_SHARE = 8
"""One token of so many is the prompt's."""


def one_rank(
    *, folder: str, tokens: int, num_ranks: int, sequence_parallel: int, activation_checkpointing: bool
) -> dict[str, float]:
    """A step on the row; bytes and seconds of this rank, and what the step reports."""
    torch.set_num_threads(1)
    settings: dict[str, Any] = {
        "num_ranks": num_ranks,
        "sequence_parallel": sequence_parallel,
        "activation_checkpointing": activation_checkpointing,
        "tokens_per_microbatch": -(-tokens // sequence_parallel),
        "loss": {"kind": "sft", "min_reward": -1.0},  # one attempt has no other to be compared with
    }
    trainer = Trainer(Path(folder), config_of(max_tokens=tokens - 1, **settings))

    def row(length: int) -> Samples:
        prompt = length // PROMPT_SHARE
        groups = random_groups(
            num_groups=1, attempts=1, prompt_length=lambda _: prompt, reply_length=lambda _: length - prompt
        )
        return samples_of(groups)

    # What libraries allocate once, and the optimizer, is there before the step that is measured.
    trainer.step(row(SHORT), step=1, base_version=0, max_staleness=0)
    samples = row(tokens)
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter) and not isinstance(tensor._base, torch.nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    forward = trainer.model.forward

    def counted(*arguments: Any, **named: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            return forward(*arguments, **named)

    trainer.model.forward = counted  # type: ignore[method-assign]
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    started = time.perf_counter()
    metrics = trainer.step(samples, step=2, base_version=0, max_staleness=0)
    seconds = time.perf_counter() - started
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    peak = 1024 * int(status["VmHWM"].split()[0]) - before
    reported = {name: metrics[name] for name in ("loss", "grad_norm", "entropy", "trained_tokens")}
    return {"kept_bytes": float(sum(kept.values())), "peak_bytes": float(peak), "seconds": seconds, **reported}


def all_ranks(**arguments: Any) -> dict[str, float]:
    """`one_rank` on `num_ranks` processes; the most of each figure."""
    size = arguments["num_ranks"]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared = {**os.environ, **address, "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.long_context", "--one-rank", json.dumps(arguments)]
    ranks = [
        subprocess.Popen(command, env={**shared, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    try:
        texts = [rank.communicate()[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"a rank of {arguments} failed")
    results = [json.loads(text.splitlines()[-1]) for text in texts]
    return {name: max(result[name] for result in results) for name in results[0]}


def measure(*, tokens: int, hidden_size: int, num_layers: int) -> dict[str, Any]:
    """Everything, as the JSON it is saved as."""
    runs = []
    with tempfile.TemporaryDirectory(prefix="millrace-") as scratch:
        folder = model_folder(Path(scratch), hidden_size=hidden_size, num_layers=num_layers)
        for again in (False, True):
            for size in SIZES:
                how = {"num_ranks": max(2, size), "sequence_parallel": size, "activation_checkpointing": again}
                runs.append({**how, **all_ranks(folder=str(folder), tokens=tokens, **how)})
    alone = {run["activation_checkpointing"]: run for run in runs if run["sequence_parallel"] == 1}
    for run in runs:
        own = alone[run["activation_checkpointing"]]
        run |= {f"{name}_ratio": run[f"{name}_bytes"] / own[f"{name}_bytes"] for name in ("kept", "peak")}
        apart = {name: abs(run[name] - own[name]) / abs(own[name]) for name in ("loss", "grad_norm", "entropy")}
        run["furthest_apart"] = max(apart.values())
    ratios = {
        name: max(run[f"{name}_ratio"] for run in runs if run["sequence_parallel"] == 2) for name in ("kept", "peak")
    }
    return {
        "ratios_of_two_ranks": ratios,
        "furthest_apart": max(run["furthest_apart"] for run in runs),
        "tokens": tokens,
        "model": {"hidden_size": hidden_size, "num_layers": num_layers},
        "runs": runs,
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
    }


def show(numbers: dict[str, Any], console: Console) -> None:
    """Ratios first."""
    ratios = numbers["ratios_of_two_ranks"]
    console.print(
        f"a row of {numbers['tokens']:,} tokens on two ranks: each keeps {ratios['kept']:.2f} of what one rank keeps "
        f"for the backward pass, and rises by {ratios['peak']:.2f} of what one rises by; loss, gradient norm and "
        f"entropy are within {numbers['furthest_apart']:.0e}"
    )
    table = Table()
    for column in ("sequence_parallel", "checkpointing", "kept, MB", "of one", "peak, MB", "of one", "s", "apart"):
        table.add_column(column, justify="right")
    for run in numbers["runs"]:
        table.add_row(
            f"{run['sequence_parallel']} of {run['num_ranks']} ranks",
            "yes" if run["activation_checkpointing"] else "no",
            *(f"{run[name]:.2f}" if name.endswith("ratio") else f"{run[name] / 1e6:.1f}" for name in _COLUMNS),
            f"{run['seconds']:.1f}",
            f"{run['furthest_apart']:.0e}" if math.isfinite(run["furthest_apart"]) else "",
        )
    console.print(table)


_COLUMNS = ("kept_bytes", "kept_ratio", "peak_bytes", "peak_ratio")


def main(
    tokens: Annotated[int, typer.Option(min=64, max=4096, help="tokens of the row")] = 2048,
    hidden_size: Annotated[int, typer.Option(min=128)] = 256,
    num_layers: Annotated[int, typer.Option(min=1)] = 4,
    json_file: Annotated[Path | None, typer.Option("--json", help="where to save the numbers")] = None,
    one_rank_of: Annotated[str, typer.Option("--one-rank", hidden=True)] = "",
) -> None:
    """Measure, print, and save when asked."""
    if one_rank_of:
        print(json.dumps(one_rank(**json.loads(one_rank_of))))
        return
    numbers = measure(tokens=tokens, hidden_size=hidden_size, num_layers=num_layers)
    show(numbers, open_console())
    if json_file:
        json_file.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
