"""One optimizer step by our trainer and by padded Hugging Face: the same model, samples, loss, optimizer and threads.

In: nothing; a random Qwen2 of 2.4M parameters and random samples. Out: a table, ratios first, and JSON.

    python -m benchmarks.trainer_speed [--pairs 5] [--threads 2] [--json FILE]

The step: 32 prompts × 8 attempts, replies of geometric length (mean 64, cut at 256), float32, GRPO advantages, the
clipped loss averaged over tokens, entropy as a metric, the gradient clipped to norm 1, AdamW. Ours is `Trainer.step`
on what `gather_samples` read, in packs of 1,024 tokens. The other side is what TRL's GRPOTrainer does with
transformers: prompts padded on the left and replies on the right, SDPA, the logits of a micro-batch's replies in
memory. What we are compared with is padded to the longest of the step, as TRL pads, at the smallest micro-batch whose
processor time is within a tenth of the least: the one a user short of memory would choose. Padding to the longest of
each micro-batch is measured too, with a ratio of its own: at few rows per micro-batch it pads little, which a CPU can
afford and a GPU cannot.

Each side is a process that lives through the benchmark, and the sides take turns; the ratio is the median over pairs of
neighbouring steps. Tokens per second count a step's prompt and reply tokens, not the padding.

Memory: the highest resident memory during a step, less the resident memory before it, when model, optimizer state and
samples are there and a step of one group has loaded what libraries load. Gradients and activations are what is left.

Losses and gradient norms of each pair must agree to 1e-4, or there is no result.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.workloads.trainer import LEARNING_RATE, config_of, groups_of_w, model_folder, samples_of
from cli.terminal.console import open_console
from trainers.data.samples import Samples

PaddedTo = Literal["step", "micro-batch"]
OUR_TOKENS = 1024
"""Tokens of our packs; the step is measured at the default too, which is somewhat faster and takes more memory."""
MICRO_BATCHES: dict[PaddedTo, tuple[int, ...]] = {"step": (8, 16, 32), "micro-batch": (2, 8)}
"""Rows, by what they are padded to. Fewer rows padded to the longest of the step only take longer."""
AS_FAST = 1.1
"""Micro-batches of up to this times the least processor time count as equally fast; the smallest of them is chosen."""
TRIES = 3
TOLERANCE = 1e-4


class Ours:
    """`Trainer`."""

    def __init__(self, folder: Path, **settings: object) -> None:
        from trainers.trainer import Trainer

        self.trainer = Trainer(folder, config_of(max_tokens=256, **settings))
        self.trainer.step_without_gradient(step=1)

    def step(self, samples: Samples) -> dict[str, float]:
        metrics = self.trainer.step(samples, step=1, base_version=0, max_staleness=0)
        return {"loss": metrics["loss"], "grad_norm": metrics["grad_norm"]}

    def drop_gradients(self) -> None:
        self.trainer.optimizer.zero_grad(set_to_none=True)


class Padded:
    """A plain implementation with transformers."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        self.model.config.use_cache = False
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, betas=(0.9, 0.99), fused=True
        )
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, samples: Samples, *, micro_batch: int, padded_to: PaddedTo) -> dict[str, float]:
        self.drop_gradients()
        advantages_B = _advantages(samples)
        num_tokens = int(samples.mask_T.sum())
        order = np.random.default_rng(0).permutation(samples.num_rows)
        prompts_B = np.add.reduceat(~samples.mask_T, samples.offsets[:-1])
        replies_B = np.add.reduceat(samples.mask_T, samples.offsets[:-1])
        loss = 0.0
        for rows in np.array_split(order, math.ceil(len(order) / micro_batch)):
            longest = order if padded_to == "step" else rows
            widths = int(prompts_B[longest].max()), int(replies_B[longest].max())
            ids, attended, mask, sampled = _padded(samples, rows, *widths)
            logits = self.model(input_ids=ids, attention_mask=attended, logits_to_keep=widths[1] + 1).logits[:, :-1]
            log_p = logits.log_softmax(-1)
            logprobs = log_p.gather(-1, ids[:, widths[0] :, None])[..., 0]
            with torch.no_grad():
                entropy = -(log_p.exp() * log_p).sum(-1)
                _ = float((entropy * mask).sum())
            ratio = (torch.where(mask > 0, logprobs - sampled, 0)).exp()
            advantages = torch.from_numpy(advantages_B[rows])[:, None]
            surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
            share = -(surrogate * mask).sum() / num_tokens
            share.backward()
            loss += float(share.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
        self.optimizer.step()
        return {"loss": loss, "grad_norm": norm}


def _padded(samples: Samples, rows: np.ndarray, prompt_width: int, reply_width: int) -> tuple[torch.Tensor, ...]:
    """Ids and attention mask of [rows, prompt + reply]; mask and recorded log-probabilities of [rows, reply]."""
    width = prompt_width + reply_width
    ids, attended = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width), np.int64)
    mask, sampled = (np.zeros((len(rows), reply_width), np.float32) for _ in range(2))
    for place, row in enumerate(rows):
        tokens = slice(samples.offsets[row], samples.offsets[row + 1])
        length = int(samples.mask_T[tokens].sum())
        begin = prompt_width - (tokens.stop - tokens.start - length)
        ids[place, begin : prompt_width + length] = samples.input_ids_T[tokens]
        attended[place, begin : prompt_width + length] = 1
        mask[place, :length] = 1
        sampled[place, :length] = samples.logprobs_T[tokens][-length:]
    ids_BT, attended_BT, mask_BT, sampled_BT = (torch.from_numpy(array) for array in (ids, attended, mask, sampled))
    return ids_BT, attended_BT, mask_BT, sampled_BT


def _advantages(samples: Samples) -> np.ndarray:
    """(r − mean of the group) / (standard deviation + 1e-4)."""
    advantages_B = np.zeros(samples.num_rows, np.float32)
    for group in np.unique(samples.groups_B):
        rewards = samples.rewards_B[samples.groups_B == group].astype(np.float64)
        advantages_B[samples.groups_B == group] = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    return advantages_B


def serve(side: str, folder: Path) -> None:
    """A side's process: a line of JSON with arguments of `step` in, a line with what it took out."""
    match side:
        case "ours":
            way: Any = Ours(folder, tokens_per_microbatch=OUR_TOKENS)
        case "defaults":
            way = Ours(folder)
        case _:
            way = Padded(folder)
    samples = samples_of(groups_of_w())
    small = samples_of(groups_of_w(num_groups=1))
    for line in sys.stdin:
        arguments = json.loads(line)
        if arguments.pop("is_first", False):
            way.step(small, **arguments)
        way.drop_gradients()
        before = _settled_bytes()
        started, cpu_started = time.perf_counter(), time.process_time()
        metrics = way.step(samples, **arguments)
        took = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu_started}
        tokens = {"tokens": len(samples.mask_T), "trained_tokens": int(samples.mask_T.sum())}
        print(json.dumps({**metrics, **took, **tokens, "peak_bytes": _status_bytes("VmHWM") - before}), flush=True)


def _settled_bytes() -> int:
    """Resident memory when what was freed is given back; the peak is counted from here on."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


class Side:
    """A running process of one side."""

    def __init__(self, name: str, folder: Path, *, threads: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.trainer_speed", "--serve", name, "--model", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            cwd=Path(__file__).parents[1],
        )
        self._is_first = True

    def step(self, **arguments: Any) -> dict[str, float]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({**arguments, "is_first": self._is_first}) + "\n")
        self.process.stdin.flush()
        self._is_first = False
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a side ended with status {self.process.wait()}; its error is above")
        measured: dict[str, float] = json.loads(line)
        return measured

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(*, pairs: int, threads: int) -> dict[str, Any]:
    """Everything, as the JSON it is saved as. Raises `RuntimeError` unless the sides compute the same."""
    with tempfile.TemporaryDirectory(prefix="millrace-") as scratch:
        folder = model_folder(Path(scratch), hidden_size=256, num_layers=4)
        ours, defaults, padded = (Side(name, folder, threads=threads) for name in ("ours", "defaults", "padded"))
        try:
            tried: dict[str, list[dict[str, Any]]] = {}
            for padded_to, sizes in MICRO_BATCHES.items():
                tried[padded_to] = [
                    {"micro_batch": rows, **padded.step(micro_batch=rows, padded_to=padded_to)}
                    for _ in range(TRIES)
                    for rows in sizes
                ]
            for _ in range(TRIES * sum(map(len, MICRO_BATCHES.values()))):  # as many updates of its weights
                ours.step()
                defaults.step()
            best = {padded_to: _smallest_of_the_fastest(runs) for padded_to, runs in tried.items()}
            runs: dict[str, list[dict[str, float]]] = {"ours": [], "defaults": [], "padded": []}
            for _ in range(pairs):
                runs["padded"].append(padded.step(micro_batch=best["step"], padded_to="step"))
                runs["ours"].append(ours.step())
                runs["defaults"].append(defaults.step())
                _check(runs["ours"][-1], runs["padded"][-1])
                _check(runs["defaults"][-1], runs["padded"][-1])
        finally:
            for side in (ours, defaults, padded):
                side.close()
    return {
        "speed_ratio": _median_ratio(runs, "seconds"),
        "cpu_ratio": _median_ratio(runs, "cpu_seconds"),
        "memory_ratio": 1 / _median_ratio(runs, "peak_bytes"),
        "micro_batch": best["step"],
        "cpu_ratio_to_padded_micro_batches": statistics.median(
            run["cpu_seconds"] for run in tried["micro-batch"] if run["micro_batch"] == best["micro-batch"]
        )
        / statistics.median(run["cpu_seconds"] for run in runs["ours"]),
        "machine": {
            "cores": os.cpu_count(),
            "threads": threads,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
        },
        "runs": runs,
        "tried": tried,
    }


def _smallest_of_the_fastest(tried: list[dict[str, Any]]) -> int:
    """Rows of the micro-batch to be compared with."""
    seconds = {run["micro_batch"]: 0.0 for run in tried}
    for rows in seconds:
        seconds[rows] = statistics.median(run["cpu_seconds"] for run in tried if run["micro_batch"] == rows)
    return min(rows for rows, median in seconds.items() if median <= AS_FAST * min(seconds.values()))


def _check(ours: dict[str, float], padded: dict[str, float]) -> None:
    for name in ("loss", "grad_norm"):
        if not math.isclose(ours[name], padded[name], rel_tol=TOLERANCE, abs_tol=1e-6):
            raise RuntimeError(f"{name} is {ours[name]} by our trainer and {padded[name]} by the padded one")


def _median_ratio(runs: dict[str, list[dict[str, float]]], key: str) -> float:
    """Padded over ours."""
    return statistics.median(b[key] / a[key] for a, b in zip(runs["ours"], runs["padded"], strict=True))


def show(numbers: dict[str, Any], console: Console) -> None:
    """Ratios first, then what they are of."""
    console.print(
        f"{numbers['speed_ratio']:.2f} times the tokens per second ({numbers['cpu_ratio']:.2f} by processor time) and "
        f"{numbers['memory_ratio']:.2f} of the memory of transformers padded to the longest of the step; "
        f"{numbers['cpu_ratio_to_padded_micro_batches']:.2f} by processor time if it pads each micro-batch"
    )
    table = Table()
    for column in ("", "tokens/s", "seconds", "CPU seconds", "peak MB", "loss", "gradient norm"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)

    def add(name: str, runs: list[dict[str, float]]) -> None:
        median = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        table.add_row(
            name,
            f"{median['tokens'] / median['seconds']:,.0f}",
            f"{median['seconds']:.2f}",
            f"{median['cpu_seconds']:.2f}",
            f"{median['peak_bytes'] / 1e6:,.0f}",
            f"{runs[-1]['loss']:.6f}",
            f"{runs[-1]['grad_norm']:.6f}",
        )

    add(f"Trainer.step, packs of {OUR_TOKENS} tokens", numbers["runs"]["ours"])
    add("Trainer.step, default packs", numbers["runs"]["defaults"])
    add(f"padded to the step, {numbers['micro_batch']} rows", numbers["runs"]["padded"])
    for padded_to, tried in numbers["tried"].items():
        for rows in sorted({run["micro_batch"] for run in tried}):
            add(f"  to the {padded_to}, {rows} rows", [run for run in tried if run["micro_batch"] == rows])
    console.print(table)


def main(
    pairs: Annotated[int, typer.Option(min=1, help="steps of each side")] = 5,
    threads: Annotated[int, typer.Option(min=1)] = os.cpu_count() or 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="where to save the numbers")] = None,
    serve_side: Annotated[str, typer.Option("--serve", hidden=True)] = "",
    model: Annotated[Path, typer.Option(hidden=True)] = Path(),
) -> None:
    """Measure, print, and save when asked."""
    if serve_side:
        serve(serve_side, model)
        return
    numbers = measure(pairs=pairs, threads=threads)
    show(numbers, open_console())
    if json_file:
        json_file.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
