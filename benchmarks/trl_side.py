"""One run of TRL's `GRPOTrainer`, timed: the other side of `benchmarks.trl_speed`, in a process of its own.

In: a workload's name, its model, the number of steps and a file. Out: the file, with when each step ended.

    python -m benchmarks.trl_side W MODEL_FOLDER 10 out.json [key=value of GRPOConfig, as JSON, ...]

What TRL is given to be fast: a step's samples in one batch of generation with its key-value cache, no log, no
checkpoint, no evaluation but ours, no gradient checkpointing, and a micro-batch that has not been searched for yet.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROCESS_STARTED = time.time()

import torch  # noqa: E402 - the imports are a part of the whole run's time
from datasets import Dataset  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from benchmarks.workloads.trl import Workload, reward_of, workload_of  # noqa: E402
from infra.user_code import load_object  # noqa: E402


class Clock(TrainerCallback):
    """Notes when training began and each step ended; scores the held-out problems if the workload asks for it."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.trainer: GRPOTrainer
        self.started = 0.0
        self.step_ends: list[float] = []
        self.scores: list[tuple[int, float, float]] = []
        """Step, when it was over, share of held-out problems its policy answers as wanted."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.started = time.time()
        self.evaluate(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.workload.num_minibatches == 0:
            self.step_ends.append(time.time())
            self.evaluate(state.global_step // self.workload.num_minibatches)

    def evaluate(self, step: int) -> None:
        workload = self.workload
        if not workload.evaluate_every or step % workload.evaluate_every:
            return
        tasks = load_object(workload.workflow)(None).tasks("test")[: workload.num_held_out]
        model, tokenizer = self.trainer.model, self.trainer.processing_class
        chats = [[{"role": "user", "content": task.prompt}] for task in tasks]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, return_tensors="pt", padding=True, padding_side="left", return_dict=True
        )
        model.eval()
        with torch.inference_mode():
            ids = model.generate(**inputs, do_sample=False, max_new_tokens=workload.max_tokens)
        model.train()
        replies = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        rewards = [reward_of(workload, reply, task) for reply, task in zip(replies, tasks, strict=True)]
        self.scores.append((step, self.step_ends[-1] if step else self.started, sum(rewards) / len(rewards)))


def run(workload: Workload, model: Path, *, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train; returns seconds and counts."""
    num_tokens: list[int] = []

    def reward(
        prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], number: list[int], **_: Any
    ) -> list[float]:
        num_tokens.extend(len(ids) for ids in completion_ids)
        return [
            reward_of(workload, completion[0]["content"], tasks[each])
            for completion, each in zip(completions, number, strict=True)
        ]

    tasks = load_object(workload.workflow)(None).tasks("train")
    dataset = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": task.prompt}], "number": n} for n, task in enumerate(tasks)]
    )
    clock = Clock(workload)
    with tempfile.TemporaryDirectory(prefix="millrace-") as scratch:
        trainer = GRPOTrainer(
            model=str(model),
            reward_funcs=reward,
            train_dataset=dataset,
            callbacks=[clock],
            args=GRPOConfig(**_arguments(workload, scratch, steps=steps, options=options)),
        )
        clock.trainer = trainer
        trainer.train()
    return {
        "step_ends": [end - clock.started for end in clock.step_ends],
        "training_began": clock.started - PROCESS_STARTED,
        "tokens_per_sample": sum(num_tokens) / len(num_tokens),
        "truncated": sum(length >= workload.max_tokens for length in num_tokens) / len(num_tokens),
        "scores": [[step, at - clock.started, score] for step, at, score in clock.scores],
    }


def _arguments(workload: Workload, folder: str, *, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    samples = workload.samples_per_step
    given = {**workload.trl, **options}
    per_update = samples // workload.num_minibatches
    accumulation = per_update // given["per_device_train_batch_size"]
    return {
        "output_dir": folder,
        "model_init_kwargs": {"dtype": workload.dtype},
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": accumulation * workload.num_minibatches,
        "num_generations": workload.n_samples,
        "max_completion_length": workload.max_tokens,
        "max_steps": steps * workload.num_minibatches,
        "temperature": workload.temperature,
        "learning_rate": workload.learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.99,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "loss_type": "dapo",
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.0,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 0,
        **given,
    }


def main() -> None:
    name, model, steps, out, *rest = sys.argv[1:]
    options = {key: json.loads(value) for key, _, value in (option.partition("=") for option in rest)}
    numbers = run(workload_of(name), Path(model), steps=int(steps), options=options)
    Path(out).write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
