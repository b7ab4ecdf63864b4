"""What `reproducible = true` costs: an engine with it and one without, by turns, on a random model of a real shape.

In: nothing. Out: a table, the ratio first, and the same numbers as JSON.

    python -m benchmarks.reproducible [--dtype bfloat16] [--requests 96] [--repetitions 5] [--json FILE]

Both engines are up all the time, and the idle one takes no processor. A round is the same requests at once on one, then
on the other; which is first alternates. The ratio is the median over rounds of tokens per second with it to those
without. Beside it stands how many replies each engine gives again, bit for bit, when the requests come in eights.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.table import Table

from cli.terminal.console import open_console
from rollouts.engines.engine import Generation
from rollouts.engines.vllm.vllm_engine import VllmEngine
from settings.engine import EngineSettings
from storage.objects.digests import seal_folder
from storage.records import Sampling

REPLY_TOKENS = 48
PROMPT_TOKENS = (16, 80)
"""Shortest and longest."""
SHAPES: dict[str, dict[str, int]] = {
    "135M": {"hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536, "vocab_size": 49152},
    "30M": {"hidden_size": 576, "num_hidden_layers": 6, "intermediate_size": 1536, "vocab_size": 16384},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 256, "vocab_size": 512},
}
"""SmolLM2-135M's, six layers of it, and about that of the examples."""


def make_model(folder: Path, *, shape: str, dtype: str) -> Path:
    """A random Llama."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = SHAPES[shape]
    torch.manual_seed(0)
    heads = sizes["hidden_size"] // 64 if shape != "tiny" else 2
    config = LlamaConfig(
        **sizes,
        num_attention_heads=heads,
        num_key_value_heads=heads // 3 or 1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    seal_folder(folder)
    return folder


async def replies(engine: VllmEngine, prompts: list[list[int]], *, at_once: int) -> list[Generation]:
    """One seeded reply to each prompt, `at_once` at a time."""
    done: list[Generation] = []
    for first in range(0, len(prompts), at_once):
        asked = [
            engine.generate(
                prompt,
                sampling=Sampling(max_tokens=REPLY_TOKENS, seed=first + number),
                request_id=f"{time.perf_counter_ns()}-{number}",
            )
            for number, prompt in enumerate(prompts[first : first + at_once])
        ]
        done += await asyncio.gather(*asked)
    return done


def _cpu_seconds() -> float:
    """Processor time of this process's children so far: the engines."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in times)


async def measure(*, shape: str, dtype: str, requests: int, repetitions: int) -> dict[str, Any]:
    """Everything, as the JSON it is saved as."""
    draws = random.Random(0)
    prompts = [
        [draws.randrange(3, SHAPES[shape]["vocab_size"]) for _ in range(draws.randint(*PROMPT_TOKENS))]
        for _ in range(requests)
    ]
    speeds: dict[bool, list[float]] = {True: [], False: []}
    costs: dict[bool, list[float]] = {True: [], False: []}
    equal, seconds_to_start, engines = {}, {}, {}
    arguments = {"dtype": dtype, "enforce_eager": True, "enable_prefix_caching": False}
    settings = EngineSettings(max_model_len=256, vllm=arguments)
    with tempfile.TemporaryDirectory(prefix="millrace-") as scratch:
        model = make_model(Path(scratch) / "model", shape=shape, dtype=dtype)
        try:
            for exact in (True, False):
                engines[exact] = VllmEngine(settings, seed=0, reproducible=exact)
                begun = time.perf_counter()
                await engines[exact].start(model, 0)
                seconds_to_start[exact] = time.perf_counter() - begun
                together = await replies(engines[exact], prompts, at_once=requests)  # also the warm-up
                apart = await replies(engines[exact], prompts, at_once=8)
                equal[exact] = sum(
                    (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
                    for one, other in zip(together, apart, strict=True)
                )
            for repetition in range(repetitions):
                for exact in (True, False) if repetition % 2 else (False, True):
                    begun, cpu_begun = time.perf_counter(), _cpu_seconds()
                    done = await replies(engines[exact], prompts, at_once=requests)
                    tokens = sum(len(reply.token_ids) for reply in done)
                    speeds[exact].append(tokens / (time.perf_counter() - begun))
                    costs[exact].append((_cpu_seconds() - cpu_begun) / tokens)
        finally:
            for engine in engines.values():
                await engine.stop()
    return {
        "ratio": statistics.median(on / off for on, off in zip(speeds[True], speeds[False], strict=True)),
        "cpu_ratio": statistics.median(on / off for on, off in zip(costs[True], costs[False], strict=True)),
        "model": {"shape": shape, "dtype": dtype, **SHAPES[shape]},
        "requests": requests,
        "reply_tokens": REPLY_TOKENS,
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        **{
            name: {
                "tokens_per_second": speeds[exact],
                "cpu_seconds_per_token": costs[exact],
                "equal_in_eights": equal[exact],
                "seconds_to_start": seconds_to_start[exact],
            }
            for name, exact in (("reproducible", True), ("free", False))
        },
    }


def show(numbers: dict[str, Any], console: Console) -> None:
    """The ratio first, then what it is of."""
    about = f"{numbers['model']['shape']}, {numbers['model']['dtype']}, {numbers['requests']} requests at once"
    ratios = f"tokens/s {numbers['ratio']:.3f}, processor time per token {numbers['cpu_ratio']:.3f}"
    table = Table(title=f"reproducible / free: {ratios} ({about})", title_justify="left")
    for column in ("", "tokens/s", "lowest", "highest", "CPU µs/token", "equal in eights"):
        table.add_column(column, justify="right" if column else "left")
    for side in ("reproducible", "free"):
        speeds = numbers[side]["tokens_per_second"]
        figures = [f"{figure:,.0f}" for figure in (statistics.median(speeds), min(speeds), max(speeds))]
        cpu = statistics.median(numbers[side]["cpu_seconds_per_token"]) * 1e6
        table.add_row(side, *figures, f"{cpu:,.0f}", f"{numbers[side]['equal_in_eights']} of {numbers['requests']}")
    console.print(table)


def main(
    shape: Annotated[str, typer.Option(help=f"of the model: {', '.join(SHAPES)}")] = "135M",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    requests: Annotated[int, typer.Option(min=8)] = 96,
    repetitions: Annotated[int, typer.Option(min=1, help="rounds of each side")] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="where to save the numbers")] = None,
) -> None:
    """Measure, print, and save when asked."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    numbers = asyncio.run(measure(shape=shape, dtype=dtype, requests=requests, repetitions=repetitions))
    show(numbers, open_console())
    if json_file is not None:
        json_file.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
