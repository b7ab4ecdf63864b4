"""What the executor itself costs: two thousand scripted episodes of several turns at once.

In: nothing. Out: a table, and JSON with `python -m benchmarks.episodes docs/episodes.json`. The engine answers at once,
so all CPU time is ours: executor, chat, recording, scoring in the loop. Memory is measured after a first round and
after many more: what is not bounded by the number of concurrent episodes would show.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from rich.table import Table

from cli.terminal.console import open_console
from rollouts.chat.chat import Chat
from rollouts.chat.chat_tokens import ChatTokens
from rollouts.engines.scripted_engine import ScriptedEngine
from rollouts.production.attempts import Player
from rollouts.production.executor import Executor
from rollouts.production.prompts import Prompt, PromptOrder
from rollouts.production.quota import Quota
from rollouts.rewards.scoring import RewardPool
from rollouts.workflow import Score, Workflow
from settings.run_file import make_config
from storage.records import Task

CONCURRENT = 2_000
N_SAMPLES = 8
TURNS = 6
REPLY_TOKENS = 32
ROUNDS = 10


class Talk(Workflow):
    """Says a few things and scores by length."""

    async def run(self, task: Task, chat: Chat) -> Score:
        for _ in range(TURNS):
            reply = await chat.ask(task.prompt)
        return Score(reward=float(len(reply)))


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One run of the benchmark."""

    milliseconds_per_turn: float
    """CPU time of this process per turn of an episode."""
    peak_concurrent: int
    """Requests at the engine at once."""
    episodes: int
    first_round_mib: float
    """Resident memory when the first round was over."""
    last_round_mib: float
    """And when the last one was."""


async def measure(tokens: ChatTokens) -> Figures:
    """Play `ROUNDS` rounds of `CONCURRENT` episodes."""
    engine = ScriptedEngine(lambda *_: [*([5] * (REPLY_TOKENS - 1)), 1])
    groups = CONCURRENT // N_SAMPLES
    config = make_config(
        {
            "workflow": "benchmarks.episodes:Talk",
            "n_samples": N_SAMPLES,
            "batch_size": groups,
            "steps": ROUNDS,
            "sampling": {"max_tokens": REPLY_TOKENS},
            "engine": {"max_model_len": 4096},
            "rollout": {
                "max_concurrent": groups,
                "min_usable": 1,
                "retries": 0,
                "shard_bytes": 2**40,
                "shard_seconds": 1e9,
            },
        },
        source="benchmark",
    )
    player = Player(
        workflow=Talk(),
        engine=engine,
        tokens=tokens,
        rewards=RewardPool(num_processes=1, timeout=10),
        config=config,
    )
    order = PromptOrder([Task(id=str(n), prompt=str(n)) for n in range(1000)], seed=0)
    leased, quota = 0, Quota(config)

    async def lease() -> list[Prompt]:
        nonlocal leased
        first, leased = leased, leased + quota.wanted
        return [order.at(position) for position in range(first, leased)]

    executor = Executor(player=player, lease=lease, quota=quota, config=config)
    process, memory, played = psutil.Process(), [], 0
    started = time.process_time()
    for round_number in range(ROUNDS):
        quota.rebase(version=round_number, committed=round_number * groups)
        executor.admit()
        batch = await executor.prepare_batch()
        executor.mark_committed(batch)
        played += sum(len(group.trajectories) for group in batch)
        del batch
        memory.append(process.memory_info().rss / 2**20)
    seconds = time.process_time() - started
    return Figures(
        milliseconds_per_turn=seconds / (played * TURNS) * 1e3,
        peak_concurrent=engine.peak_running,
        episodes=played,
        first_round_mib=memory[0],
        last_round_mib=memory[-1],
    )


def main() -> None:
    """Measure, print, and write JSON if a path is given."""
    from trainers.model.warmup import character_tokenizer

    with tempfile.TemporaryDirectory(prefix="millrace-") as folder:
        character_tokenizer(set("0123456789")).save_pretrained(folder)
        figures = asyncio.run(measure(ChatTokens.load(Path(folder))))
    table = Table("CPU ms per turn", "requests at once", "episodes", "MiB after round 1", f"MiB after round {ROUNDS}")
    table.add_row(
        f"{figures.milliseconds_per_turn:.3f}",
        f"{figures.peak_concurrent:,}",
        f"{figures.episodes:,}",
        f"{figures.first_round_mib:.0f}",
        f"{figures.last_round_mib:.0f}",
    )
    open_console().print(table)
    if len(sys.argv) > 1:
        setting = {"turns": TURNS, "n_samples": N_SAMPLES, "reply_tokens": REPLY_TOKENS, "rounds": ROUNDS}
        Path(sys.argv[1]).write_text(json.dumps({**asdict(figures), **setting}, indent=1) + "\n")


if __name__ == "__main__":
    main()
