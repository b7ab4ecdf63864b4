"""How much faster a forward and backward pass is if what sequences share asks attention once.

In: nothing; a random model. Out: ratios of tokens per second, and the differences of loss and gradients, as a table and
JSON.

    python -m benchmarks.shared_prefixes [--rounds 5] [--hidden-size 256] [--num-layers 4] [--threads 2] [--json FILE]

Both sides compute what a pack's sequences begin with in common once in every linear layer. `before`
(`trainers.data.samples.ARITHMETIC` 2) gives attention a copy of each whole sequence; `now` (3) gives it each
sequence's keys, and queries only for what no sequence before it has. They take turns. Three packs:

    turns     8 attempts of 6 turns whose history was rendered anew each time: a sequence per turn
    prompts   8 attempts of 100 tokens at a prompt of 1,000
    nothing   8 sequences of 1,000 tokens that share none
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.table import Table

from benchmarks.workloads.trainer import VOCABULARY, model_folder
from cli.terminal.console import open_console
from trainers.data.packing import position_ids, shared_tokens
from trainers.model.layout import Layout
from trainers.model.model import PolicyModel, load_model

SIDES = {"before": 2, "now": 3}


def turns(draw: np.random.Generator, *, prompt: int = 512, turn: int = 128) -> list[np.ndarray]:
    begins, sequences = draw.integers(1, VOCABULARY, prompt), []
    for _ in range(8):
        history = begins
        for _ in range(6):
            sequences.append(np.concatenate([history, draw.integers(1, VOCABULARY, turn)]))
            # What is rendered anew differs at its end, as a template's mark of the last turn does.
            history = sequences[-1][:-1]
    return sequences


def prompts(draw: np.random.Generator) -> list[np.ndarray]:
    prompt = draw.integers(1, VOCABULARY, 1000)
    return [np.concatenate([prompt, draw.integers(1, VOCABULARY, 100)]) for _ in range(8)]


def nothing(draw: np.random.Generator) -> list[np.ndarray]:
    return [draw.integers(1, VOCABULARY, 1000) for _ in range(8)]


PACKS = {"turns": turns, "prompts": prompts, "nothing": nothing}


def run(model: PolicyModel, sequences: list[np.ndarray], arithmetic: int) -> tuple[float, float, torch.Tensor]:
    """Seconds of a forward and backward pass, the loss, and all gradients."""
    ids_T, lengths = np.concatenate(sequences), [len(sequence) for sequence in sequences]
    computed_T = shared_tokens(ids_T, lengths)
    layout = Layout(lengths, device=torch.device("cpu"), computed_T=computed_T, arithmetic=arithmetic)
    tokens = torch.from_numpy(ids_T)
    model.zero_grad()
    started = time.perf_counter()
    logprobs, _ = model(tokens, tokens.roll(-1), position_ids(lengths), layout, 1.0)
    loss = -logprobs.mean()
    loss.backward()
    seconds = time.perf_counter() - started
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return seconds, loss.item(), torch.cat(gradients)


def measure(*, rounds: int, hidden_size: int, num_layers: int) -> dict[str, Any]:
    """Numbers by pack."""
    numbers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="millrace-") as folder:
        model = load_model(model_folder(Path(folder), hidden_size=hidden_size, num_layers=num_layers))
    for name, make in PACKS.items():
        sequences = make(np.random.default_rng(0))
        lengths = [len(sequence) for sequence in sequences]
        computed_T = shared_tokens(np.concatenate(sequences), lengths)
        computed = sum(lengths) if computed_T is None else int(computed_T.max()) + 1
        results = {side: run(model, sequences, arithmetic) for side, arithmetic in SIDES.items()}  # warms up too
        (_, old_loss, old), (_, new_loss, new) = results.values()
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        for _ in range(rounds):
            for side, arithmetic in SIDES.items():
                seconds[side].append(run(model, sequences, arithmetic)[0])
        ratios = [before / now for before, now in zip(*seconds.values(), strict=True)]
        numbers[name] = {
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "tokens": sum(lengths),
            "shared": 1 - computed / sum(lengths),
            "tokens_per_second": {side: sum(lengths) / statistics.median(each) for side, each in seconds.items()},
            "loss_difference": abs(new_loss - old_loss) / abs(old_loss),
            "gradient_difference": float((new - old).norm() / old.norm()),
        }
    return numbers


def main(
    rounds: Annotated[int, typer.Option(min=1, help="of each side")] = 5,
    hidden_size: Annotated[int, typer.Option(min=64, help="of the model, a multiple of 64")] = 256,
    num_layers: Annotated[int, typer.Option(min=1)] = 4,
    threads: Annotated[int, typer.Option(min=1)] = os.cpu_count() or 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="where to save the numbers")] = None,
) -> None:
    """Measure, print, and save when asked."""
    torch.set_num_threads(threads)
    numbers = measure(rounds=rounds, hidden_size=hidden_size, num_layers=num_layers)
    table = Table(title=f"{num_layers} layers of {hidden_size}, {threads} threads; medians of {rounds}")
    for column in ("pack", "ratio", "tokens/s before", "now", "shared", "gradients differ by"):
        table.add_column(column, justify="left" if column == "pack" else "right")
    for name, pack in numbers.items():
        speeds = [f"{speed:,.0f}" for speed in pack["tokens_per_second"].values()]
        differ = f"{pack['gradient_difference']:.0e}"
        table.add_row(name, f"{pack['ratio']:.2f}×", *speeds, f"{100 * pack['shared']:.0f} %", differ)
    open_console().print(table)
    if json_file:
        machine = {"cores": os.cpu_count(), "threads": threads, "torch": torch.__version__}
        model = {"hidden_size": hidden_size, "num_layers": num_layers}
        json_file.write_text(json.dumps({"machine": machine, "model": model, "packs": numbers}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
