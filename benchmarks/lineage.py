"""How long lineage takes at a million trajectories: within a process, and as a whole command.

In: nothing; a synthetic run in a store. Out: a table, and JSON.

    python -m benchmarks.lineage [--entries 100000] [--repeats 5] [--json FILE]

The run is that of `benchmarks.run_log`: 25,000 steps, 10⁶ trajectories, log entries without files. On top of it comes
one more step with a real shard, of 64 groups of eight attempts of 200 tokens, and a sealed policy folder of 10 MB: what
`--verify` and `--trajectory` read.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from benchmarks.run_log import write_run
from benchmarks.workloads.trajectories import provenance_of
from cli.terminal.console import open_console
from storage.log.entries import Claim, ClaimedGroup, Policy, Registration, Step
from storage.log.run_log import RunLog
from storage.log.runs import open_run
from storage.objects.digests import DIGEST_FILE, seal_folder
from storage.objects.object_store import ObjectStore
from storage.objects.opening import open_store
from storage.records import Message, RolloutGroup, Sampling, Task, Trajectory, Turn
from storage.shards.shards import commit_shard
from storage.views.lineage import find_version, policy_lineage, prompt_lineage, trajectory_lineage

RUN = "big"
GROUPS, ATTEMPTS, TOKENS = 64, 8, 200
WEIGHT_BYTES = 10_000_000


def add_real_step(log: RunLog, scratch: Path) -> str:
    """One step with real files behind the synthetic ones; returns the id of one of its groups."""
    live = log.state.live
    assert live is not None
    first = max(log.state.positions) + 1
    groups = [_group(position, version=live.version) for position in range(first, first + GROUPS)]
    shard = commit_shard(log, groups, provenance=provenance_of("real", run_id=log.run_id), sampling=Sampling())
    folder, path = scratch / "policy", log.key(f"policies/{live.version + 1}-real")
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(random.Random(0).randbytes(WEIGHT_BYTES))
    digest = seal_folder(folder)
    log.store.put_folder(folder, path, last=DIGEST_FILE)
    trained = [ClaimedGroup(shard_id=shard.id, group_id=group.id) for group in groups]
    number, version = log.state.step + 1, live.version
    log.append(
        Step(
            claim=Claim(step=number, base_version=version, trained=trained, stale=[], filtered=[], failed=[]),
            policy=Policy(version=version + 1, path=path, weights_sha256=digest, parent=version),
            shard_sha256={shard.id: shard.sha256},
            metrics={"loss": 0.0},
            state_path=None,
            session_id="s",
        )
    )
    log.append(Registration(version=version + 1, model_name=log.run_id, registry_version=str(version + 2)))
    return groups[0].id


def _group(position: int, *, version: int) -> RolloutGroup:
    draw = random.Random(position)
    attempts = [
        Trajectory(
            attempt=attempt,
            turns=[
                Turn(
                    context_ids=[draw.randrange(50_000) for _ in range(20)],
                    sampled_ids=[draw.randrange(50_000) for _ in range(TOKENS)],
                    logprobs=[-draw.random() for _ in range(TOKENS)],
                    weight_versions=[version] * TOKENS,
                    finish_reason="stop",
                )
            ],
            messages=[Message(role="user", content=f"task {position}")],
            status="ok",
            reward=draw.random(),
        )
        for attempt in range(ATTEMPTS)
    ]
    task = Task(id=f"task{position}", prompt=f"task {position}")
    return RolloutGroup(
        id=f"0.{task.id}", task=task, position=position, epoch=0, expected=ATTEMPTS, trajectories=attempts
    )


def questions(log: RunLog, real_group: str) -> dict[str, tuple[Callable[[RunLog], object], list[str]]]:
    """What is asked, as a function of an open log and as arguments of the command."""
    step = log.state.step
    middle = step // 2
    early = next(iter(log.state.steps[0].claim.trained)).group_id
    prompt = log.state.groups[early].prompt_id
    return {
        "policy in the middle, by registry version": (
            lambda log: policy_lineage(log, find_version(log, str(middle + 1)) or 0),
            [f"{RUN}@{middle + 1}"],
        ),
        "newest policy, every digest checked": (
            lambda log: policy_lineage(log, step, verify=True),
            [RUN, "--policy", str(step), "--verify"],
        ),
        f"trajectory of the first step, {step} policies influenced": (
            lambda log: trajectory_lineage(log, f"{early}/3"),
            [RUN, "--trajectory", f"{early}/3"],
        ),
        "trajectory of the newest step, row read": (
            lambda log: trajectory_lineage(log, f"{real_group}/3"),
            [RUN, "--trajectory", f"{real_group}/3"],
        ),
        "all groups of a prompt": (lambda log: prompt_lineage(log, prompt), [RUN, "--prompt", prompt]),
    }


def measure(store: ObjectStore, real_group: str, repeats: int) -> dict[str, dict[str, float]]:
    """Median seconds per question: on an open log, with opening it, and as a command."""
    numbers = {}
    for name, (ask, arguments) in questions(open_run(store, RUN), real_group).items():
        asking, opening, commanding = [], [], []
        for _ in range(repeats):
            started = time.perf_counter()
            log = open_run(store, RUN)
            opened = time.perf_counter()
            ask(log)
            finished = time.perf_counter()
            asking.append(finished - opened)
            opening.append(finished - started)
            commanding.append(_command_seconds([*arguments, "--store", store.uri, "--json"]))
        numbers[name] = {
            "query_seconds": statistics.median(asking),
            "with_opening_seconds": statistics.median(opening),
            "command_seconds": statistics.median(commanding),
        }
    return numbers


def _command_seconds(arguments: list[str]) -> float:
    command = [sys.executable, "-m", "cli.main", "lineage", *arguments]
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=Path(__file__).parent.parent, env=os.environ)
    return time.perf_counter() - started


def main(
    entries: Annotated[int, typer.Option(min=4, help="Entries in the synthetic part of the log.")] = 100_000,
    repeats: Annotated[int, typer.Option(min=1, help="Times every question is asked; the median counts.")] = 5,
    output: Annotated[Path | None, typer.Option("--json", help="Write the numbers here.")] = None,
) -> None:
    """Write the run (minutes), ask every question, print the table."""
    with tempfile.TemporaryDirectory() as scratch:
        store = open_store(f"{scratch}/store")
        write_run(store, RUN, entries)
        log = open_run(store, RUN)
        real_group = add_real_step(log, Path(scratch))
        trajectories, steps = log.state.num_trajectories, log.state.step
        answers = measure(store, real_group, repeats)
    table = Table(title=f"lineage in a run of {trajectories} trajectories and {steps} steps")
    for column in ("question", "query", "with opening the log", "whole command"):
        table.add_column(column, justify="left" if column == "question" else "right")
    for name, seconds in answers.items():
        table.add_row(
            name,
            f"{1000 * seconds['query_seconds']:.1f} ms",
            f"{seconds['with_opening_seconds']:.2f} s",
            f"{seconds['command_seconds']:.2f} s",
        )
    open_console().print(table)
    if output:
        numbers = {"trajectories": trajectories, "steps": steps, "entries": entries, "questions": answers}
        output.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
