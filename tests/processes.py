"""Code that tests run in other processes: children of a process that has imported this, so each starts at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from storage.log.run_log import RunLog
from storage.log.runs import open_run, trainer_lock
from storage.objects.opening import open_store
from storage.shards.shards import commit_shard
from tests.builders import SAMPLING, a_group, provenance

_barrier: Any = None


def run_together(function: Callable[..., Any], num_processes: int, *arguments: Any) -> list[Any]:
    """Results of `function(rank, *arguments)` in as many fresh processes; `meet()` holds each until all are there."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    barrier = context.Barrier(num_processes)
    with context.Pool(num_processes, initializer=_start, initargs=(barrier, dict(os.environ))) as pool:
        calls = [pool.apply_async(function, (rank, *arguments)) for rank in range(num_processes)]
        return [call.get(timeout=400) for call in calls]


def meet() -> None:
    """Wait until every process of `run_together` is here."""
    _barrier.wait(timeout=60)


def race_for_keys(rank: int, uri: str, num_keys: int) -> list[int]:
    """Which keys this process won; all of them reach for the same key at the same moment."""
    store = open_store(uri)
    won = []
    for key in range(num_keys):
        meet()
        if store.put_if_absent(f"race/{key}", str(rank).encode()):
            won.append(key)
    return won


def write_in_turns(rank: int, uri: str, num_turns: int) -> list[str]:
    """Two processes write in turns; each says what the other one's last write did not look like right after it."""
    store = open_store(uri)
    wrong = []
    for turn in range(num_turns):
        if turn % 2 == rank:
            store.put("turn/replaced", str(turn).encode())
            store.put(f"turn/{turn}", b"new")
        meet()
        seen = (store.get("turn/replaced"), store.get_many([f"turn/{turn}"]), store.exists(f"turn/{turn}"))
        if seen != (str(turn).encode(), [b"new"], True) or str(turn) not in store.names("turn"):
            wrong.append(f"turn {turn}: {seen}")
        meet()
    return wrong


def commit_shards(rank: int, uri: str, run_id: str, num_shards: int) -> None:
    """Commit this process's shards, one group each, while the others commit theirs."""
    log = RunLog(open_store(uri), run_id)
    meet()
    for number in range(num_shards):
        shard_id = f"{rank}.{number}"
        group = a_group(rank * num_shards + number)
        commit_shard(log, [group], provenance=provenance(shard_id, run_id=run_id), sampling=SAMPLING)


def hold_trainer_lock(uri: str, run_id: str, held: Path) -> None:
    """Take the lock, say so by making the file `held`, and die by kill −9 once that file is gone."""
    with trainer_lock(open_run(open_store(uri), run_id)):
        held.write_text(str(os.getpid()))
        while held.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)


def has_imported(module: str) -> bool:
    """Whether this process has, without having been asked to."""
    return module in sys.modules


def _start(barrier: Any, environment: dict[str, str]) -> None:
    global _barrier
    _barrier = barrier
    os.environ.update(environment)


def num_new_pages(first: str = "pass") -> int:
    """Pages of memory that the kernel has to give a process anew for a second step of 64 MiB; `first` is what the
    process does before."""
    program = f"""
import resource, numpy
{first}

def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [numpy.ones(2**17) for _ in range(64)]
    del arrays
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

step()
print(step())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return int(done.stdout)
