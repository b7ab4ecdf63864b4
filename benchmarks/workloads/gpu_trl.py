"""TRL's side of `benchmarks/gpu_loop.py`.

In: prompts, a reward, a model's folder, and how much is to be done. Out: samples per second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def run_trl(
    asked: Sequence[str],
    reward: Callable[[str], float],
    model: Path,
    scratch: Path,
    *,
    skipped: int,
    rounds: int,
    prompts: int,
    attempts: int,
    max_tokens: int,
) -> dict[str, float]:
    """The same work by TRL's `GRPOTrainer` with vLLM in its process, asleep while it trains."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.time())

    samples = prompts * attempts
    arguments = GRPOConfig(
        output_dir=str(scratch),
        use_vllm=True,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=True,
        vllm_gpu_memory_utilization=0.6,
        max_completion_length=max_tokens,
        num_generations=attempts,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=samples // 32,
        max_steps=rounds,
        learning_rate=1e-6,
        beta=0.0,
        bf16=True,
        report_to="none",
        save_strategy="no",
    )
    rows = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in asked]
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=lambda completions, **_: [reward(completion[0]["content"]) for completion in completions],
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock()],
        args=arguments,
    )
    trainer.train()
    seconds = ends[-1] - ends[skipped - 1]
    return {"samples_per_second": (len(ends) - skipped) * samples / seconds}
