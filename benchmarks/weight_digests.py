"""What it costs to verify an engine's weights after a swap: by vLLM's checksums, and by digests made where they lie.

In: nothing; two random policies of a model in bfloat16. Out: a table, and JSON.

    python -m benchmarks.weight_digests [--layers 24] [--hidden 1024] [--swaps 5] [--json docs/weight_digests.json]

A real engine of vLLM, on whatever device it is built for, takes the two policies by turns. The swap is the time that
generation is paused, the verification in it. Beside it, both verifications of the same weights, asked of the same
worker. Where the policies lie in the page cache, as here, a swap is at its fastest.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from rollouts.engines.vllm.vllm_engine import VllmEngine
from rollouts.engines.vllm.worker_extension import results
from settings.engine import EngineSettings
from storage.objects.digests import seal_folder


def policies(folder: Path, *, layers: int, hidden: int) -> tuple[list[Path], int]:
    """Two random policies, and the bytes of one."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=4096,
        tie_word_embeddings=False,
        eos_token_id=1,
    )
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        made.append(folder / str(seed))
        model.save_pretrained(made[-1])
        seal_folder(made[-1])
    return made, sum(2 * weight.numel() for weight in model.parameters())


async def measure(folders: list[Path], *, swaps: int) -> dict[str, list[float]]:
    """Seconds of each swap, and of both verifications after it."""
    arguments = {"dtype": "bfloat16", "enforce_eager": True, "max_num_seqs": 8}
    engine = VllmEngine(EngineSettings(max_model_len=256, vllm=arguments), seed=0)
    seconds: dict[str, list[float]] = {"swap": [], "digests": [], "checksums": []}
    await engine.start(folders[0], 0)
    try:
        checksums: dict[Path, str] = {}
        for version in range(1, swaps + 3):
            folder = folders[version % 2]
            update = await engine.load_policy(folder, version)
            assert checksums.setdefault(folder, update.checksum) == update.checksum
            started = time.perf_counter()
            results(await engine.llm.collective_rpc("weight_digests"))
            digested = time.perf_counter()
            await engine.llm.compute_weight_checksums()
            if version > 2:  # the first of each reads its file, and compares with nothing
                seconds["swap"].append(update.paused_seconds)
                seconds["digests"].append(digested - started)
                seconds["checksums"].append(time.perf_counter() - digested)
        assert len(set(checksums.values())) == 2
    finally:
        await engine.stop()
    return seconds


def main(
    layers: Annotated[int, typer.Option(help="Of the model.")] = 24,
    hidden: Annotated[int, typer.Option(help="Its width.")] = 1024,
    swaps: Annotated[int, typer.Option(help="Swaps measured.")] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers here.")] = None,
) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="millrace-digests-") as scratch:
        folders, num_bytes = policies(Path(scratch), layers=layers, hidden=hidden)
        seconds = asyncio.run(measure(folders, swaps=swaps))
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    before = medians["swap"] - medians["digests"] + medians["checksums"]
    report: dict[str, Any] = {
        "bytes": num_bytes,
        "swaps": swaps,
        "cores": len(os.sched_getaffinity(0)),
        "swap_seconds": round(medians["swap"], 4),
        "digests_seconds": round(medians["digests"], 4),
        "digests_share_of_swap": round(medians["digests"] / medians["swap"], 4),
        "vllm_checksums_seconds": round(medians["checksums"], 4),
        "swap_seconds_with_vllm_checksums": round(before, 4),
        "vllm_checksums_share_of_that": round(medians["checksums"] / before, 4),
    }
    for name, value in report.items():
        print(f"{name:36} {value}")
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
