"""What recording costs, and how long a change of weights holds generation up, on a real vLLM.

In: nothing; a random Qwen2-architecture model made on the spot. Out: tables, ratios first, and the same numbers as
JSON.

    python -m benchmarks.rollout_speed [--groups 64] [--repetitions 11] [--json FILE]

Speed: the same prompts with the same sampling on the same engine, alternately through vLLM's own `generate`, all at
once, and through the executor: chats, rewards, records, and a committed shard. The ratio of tokens per second is the
median over pairs of neighbouring runs. Beside it stands the processor time of this process, which is the steadier on a
busy machine (vLLM's core and worker are others).

Updates: a stream of requests that never runs dry, one change of weights each time a round of them has finished.
`paused` is the share of the wall-clock from asking the engine to pause until it went on; for `wait` that is mostly the
drain, in which the engine works, less and less.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import platform
import statistics
import string
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from cli.terminal.console import open_console
from rollouts.chat.chat import Chat
from rollouts.chat.chat_tokens import ChatTokens
from rollouts.engines.engine import UpdateMode, WeightUpdate
from rollouts.engines.vllm.vllm_engine import VllmEngine
from rollouts.production.attempts import Player
from rollouts.production.executor import Executor
from rollouts.production.prompts import Prompt, PromptOrder
from rollouts.production.quota import Quota
from rollouts.rewards.scoring import RewardPool
from rollouts.workflow import Score, Workflow
from settings.engine import EngineSettings
from settings.run_file import make_config
from storage.log.entries import Shard
from storage.log.runs import create_run
from storage.objects.opening import open_store
from storage.records import Message, Sampling, Task
from storage.shards.codec import Provenance
from storage.shards.shards import commit_shard

ATTEMPTS = 8
ROUND = 48
"""Groups between two updates."""
MODES: Sequence[UpdateMode] = ("keep", "abort", "wait")
CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " "


class Continue(Workflow):
    """Every prompt another string; the reward is cheap, so that what is measured is the machinery."""

    def __init__(self, num_tasks: int) -> None:
        super().__init__()
        self.num_tasks = num_tasks

    def tasks(self, split: str) -> Sequence[Task]:
        return [
            Task(id=f"{number}", prompt=f"Problem {number}: say something about {number * 7919}.")
            for number in range(self.num_tasks)
        ]

    async def run(self, task: Task, chat: Chat) -> Score:
        reply = await chat.ask(task.prompt)
        return Score(reward=float(len(set(reply)) % 2))


class Bench:
    """One engine, and both ways through it."""

    def __init__(self, folder: Path, engine: VllmEngine, groups: int, sampling: Sampling) -> None:
        self.engine, self.sampling, self.num_groups = engine, sampling, groups
        self.tokens = ChatTokens.load(folder)
        self.workflow = Continue(groups)
        self.rewards = RewardPool(num_processes=1, timeout=10.0)
        self.log = create_run(open_store(str(folder.parent / "store")), "benchmark", {})
        self._requests = self._shards = self._positions = 0

    async def raw(self) -> dict[str, float]:
        """All requests at once, and nothing kept but their tokens."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            temperature=self.sampling.temperature,
            max_tokens=self.sampling.max_tokens,
            logprobs=0,
            stop_token_ids=[self.tokens.end_id],
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

        async def one(prompt: list[int]) -> int:
            self._requests += 1
            async for output in self.engine.llm.generate(
                TokensPrompt(prompt_token_ids=prompt), parameters, f"raw{self._requests}"
            ):
                final = output
            return len(final.outputs[0].token_ids)

        prompts = [
            self.tokens.prompt([Message(role="user", content=task.prompt)]) for task in self.workflow.tasks("train")
        ]
        started = _now()
        num_tokens = sum(await asyncio.gather(*(one(prompt) for prompt in prompts for _ in range(ATTEMPTS))))
        return _speed(num_tokens, started)

    async def recorded(self) -> dict[str, float]:
        """Through the executor, into a committed shard."""
        executor = self._executor(self.num_groups, total_groups=self.num_groups, max_concurrent=self.num_groups)
        started = _now()
        groups = await executor.prepare_batch()
        shard = await asyncio.to_thread(self._commit, groups)
        speed = _speed(shard.num_tokens, started)
        assert len(groups) == self.num_groups, f"{len(groups)} of {self.num_groups} groups: {executor.report()}"
        assert shard.num_rows == self.num_groups * ATTEMPTS, executor.report()
        return speed

    async def stream(self, policies: Sequence[Path], *, rounds: int, mode: UpdateMode) -> dict[str, float]:
        """Rounds of groups, half a round more of them always under way; weights change after each round."""
        self.engine.update_mode = mode
        executor = self._executor(ROUND, total_groups=ROUND * (rounds + 3), max_concurrent=ROUND * 3 // 2)
        await executor.prepare_batch()  # as many are half done now as will be at the end
        updates: list[WeightUpdate] = []
        num_tokens, started = 0, _now()
        for number in range(rounds):
            updates.append(await self.engine.load_policy(policies[number % 2], number + 1))
            shard = await asyncio.to_thread(self._commit, await executor.prepare_batch())
            num_tokens += shard.num_tokens
        speed = _speed(num_tokens, started)
        await executor.close()
        return {
            **speed,
            "round_seconds": speed["seconds"] / rounds,
            "update_seconds": statistics.median(update.paused_seconds for update in updates),
            "paused": sum(update.paused_seconds for update in updates) / speed["seconds"],
        }

    async def close(self) -> None:
        await self.rewards.close()
        await self.engine.stop()

    def _executor(self, batch_size: int, *, total_groups: int, max_concurrent: int) -> Executor:
        config = make_config(
            {
                "workflow": "benchmarks.rollout_speed:none",
                "n_samples": ATTEMPTS,
                "batch_size": batch_size,
                "steps": math.ceil(total_groups / batch_size),
                "max_staleness": total_groups,  # only `max_concurrent` bounds what runs
                "sampling": {"temperature": self.sampling.temperature, "max_tokens": self.sampling.max_tokens},
                "engine": {"max_model_len": 1024},
                "rollout": {"max_concurrent": max_concurrent, "min_usable": 1, "retries": 0}
                | {"shard_bytes": 2**30, "shard_seconds": 3600.0},
            },
            source="benchmark",
        )
        player = Player(
            workflow=self.workflow, engine=self.engine, tokens=self.tokens, rewards=self.rewards, config=config
        )
        quota = Quota(config)
        prompts = PromptOrder(self.workflow.tasks("train"), seed=0)
        left = total_groups

        async def lease() -> list[Prompt]:
            nonlocal left
            wanted = min(left, quota.wanted)
            left -= wanted
            self._positions += wanted
            return [prompts.at(position) for position in range(self._positions - wanted, self._positions)]

        return Executor(player=player, lease=lease, quota=quota, config=config)

    def _commit(self, groups: list[Any]) -> Shard:
        self._shards += 1
        provenance = Provenance(
            run_id=self.log.run_id,
            shard_id=f"shard{self._shards}",
            producer="rollout-0",
            tokenizer_sha256=self.tokens.tokenizer_sha256,
            chat_template_sha256=self.tokens.chat_template_sha256,
            config_sha256="",
            code_version="",
        )
        return commit_shard(self.log, groups, provenance=provenance, sampling=self.sampling)


def _now() -> tuple[float, float]:
    """Wall-clock, and the processor time of this process."""
    return time.perf_counter(), time.process_time()


def _speed(num_tokens: int, started: tuple[float, float]) -> dict[str, float]:
    seconds, cpu_seconds = (now - then for now, then in zip(_now(), started, strict=True))
    return {
        "tokens": float(num_tokens),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "tokens_per_second": num_tokens / seconds,
        "cpu_microseconds_per_token": cpu_seconds / num_tokens * 1e6,
    }


def make_policies(folder: Path, *, hidden_size: int, num_layers: int) -> list[Path]:
    """Two random models of one architecture, with a tokenizer of ASCII characters."""
    from settings.warmup import WarmupSettings
    from trainers.model.warmup import make_base_model

    settings = WarmupSettings(
        hidden_size=hidden_size, num_layers=num_layers, num_steps=1, batch_size=2, learning_rate=1e-4
    )
    chat = [Message(role="user", content="?"), Message(role="assistant", content=CHARACTERS, is_completion=True)]
    policies = [folder / f"policy{seed}" for seed in range(2)]
    for seed, policy in enumerate(policies):
        make_base_model(policy, [chat] * 2, settings, seed=seed)
    return policies


async def measure(*, groups: int, repetitions: int, rounds: int, hidden_size: int, num_layers: int) -> dict[str, Any]:
    """Everything, as the JSON it is saved as."""
    with tempfile.TemporaryDirectory(prefix="millrace-") as scratch:
        policies = make_policies(Path(scratch), hidden_size=hidden_size, num_layers=num_layers)
        arguments = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 256}
        engine = VllmEngine(EngineSettings(max_model_len=256, vllm=arguments), seed=0)
        await engine.start(policies[0], 0)
        bench = Bench(policies[0], engine, groups, Sampling(max_tokens=192))
        try:
            await bench.raw()  # the first generation compiles
            await bench.recorded()
            raw, recorded = [], []
            for _ in range(repetitions):
                raw.append(await bench.raw())
                recorded.append(await bench.recorded())
            streams = {mode: await bench.stream(policies, rounds=rounds, mode=mode) for mode in MODES}
        finally:
            await bench.close()
    ratios = [r["tokens_per_second"] / w["tokens_per_second"] for r, w in zip(recorded, raw, strict=True)]
    return {
        "model": {"hidden_size": hidden_size, "num_layers": num_layers},
        "requests": groups * ATTEMPTS,
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "vllm": _vllm_version()},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "raw": raw,
        "recorded": recorded,
        "round_requests": ROUND * ATTEMPTS,
        "updates": streams,
    }


def _median(runs: Sequence[dict[str, float]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def _vllm_version() -> str:
    import vllm

    return str(vllm.__version__)


def show(numbers: dict[str, Any], console: Console) -> None:
    """Ratios first, then what they are of."""
    raw, recorded, ratios = numbers["raw"], numbers["recorded"], numbers["ratios"]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    table = Table(
        title=f"recorded / raw: {numbers['ratio']:.3f}, middle half {low:.3f} to {high:.3f}, {len(ratios)} pairs of "
        f"{numbers['requests']} requests",
        title_justify="left",
    )
    for column in ("", "tokens/s", "seconds", "CPU µs/token"):
        table.add_column(column, justify="right" if column else "left")
    for name, runs in (("raw generate", raw), ("executor and shard", recorded)):
        keys = ("tokens_per_second", "seconds", "cpu_microseconds_per_token")
        table.add_row(name, *(f"{_median(runs, key):,.1f}" for key in keys))
    console.print(table)
    title = f"One change of weights per round of {numbers['round_requests']} requests, half as many more under way"
    table = Table(title=title, title_justify="left")
    for column in ("mode", "paused", "one update", "round", "tokens/s"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for mode, update in numbers["updates"].items():
        table.add_row(
            mode,
            f"{update['paused']:.1%}",
            f"{update['update_seconds'] * 1e3:.0f} ms",
            f"{update['round_seconds']:.1f} s",
            f"{update['tokens_per_second']:,.0f}",
        )
    console.print(table)


def main(
    groups: Annotated[int, typer.Option(min=2, help=f"prompts, each attempted {ATTEMPTS} times")] = 64,
    repetitions: Annotated[int, typer.Option(min=1, help="runs of each side")] = 11,
    rounds: Annotated[int, typer.Option(min=1, help="rounds per mode of update")] = 3,
    hidden_size: Annotated[int, typer.Option(min=32)] = 64,
    num_layers: Annotated[int, typer.Option(min=1)] = 2,
    json_file: Annotated[Path | None, typer.Option("--json", help="where to save the numbers")] = None,
) -> None:
    """Measure, print, and save when asked."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    numbers = asyncio.run(
        measure(groups=groups, repetitions=repetitions, rounds=rounds, hidden_size=hidden_size, num_layers=num_layers)
    )
    show(numbers, open_console())
    if json_file:
        json_file.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
