"""What the tests of the cluster host: an object that says where it runs, fails on one rank, or waits for the others."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from infra.user_code import load_object

USERS_CODE = """
import asyncio
import threading
from settings.errors import InvalidInput

class Mine(Exception):
    pass

class Two(Exception):
    def __init__(self, a, b):
        super().__init__(a)

async def number():
    int("x")

async def together():
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(number())

def fail(which):
    match which:
        case "number":
            int("x")
        case "own class":
            raise Mine("two\\nlines")
        case "own arguments":
            raise Two(1, 2)
        case "unpicklable":
            error = ValueError("locked")
            error.lock = threading.Lock()
            raise error
        case "two at once":
            asyncio.run(together())
        case "mendable":
            raise InvalidInput("write one of a, b")
"""
"""What a user's file may do."""


def raise_in_users_code(function: str, which: str) -> None:
    """Call the function of a user's file."""
    load_object(function)(which)


class FollowedError(RuntimeError):
    """Raised on a rank because another one failed."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message, rank)
        self.rank = rank


async def _leave() -> None:
    raise SystemExit(3)


class Counting:
    """Counts its calls."""

    opened = None

    @classmethod
    async def open(cls, *, start: int) -> Counting:
        """An object that counts from `start`."""
        return cls(start)

    async def leave_in_a_task(self) -> None:
        """Await a task that leaves Python, as a user's code may."""
        await asyncio.gather(_leave(), asyncio.Event().wait())

    def __init__(self, start: int) -> None:
        self._count = start
        self._rank = int(os.environ.get("RANK", "0"))

    def add(self, number: int, *, times: int = 1) -> int:
        """The sum so far."""
        self._count += number * times
        return self._count

    def environment(self) -> dict[str, str]:
        """What torch.distributed reads."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")
        return {name: os.environ[name] for name in names if name in os.environ}

    def meet(self) -> tuple[int, int]:
        """Sum of all ranks' numbers + 1, and how many ranks there are, by torch.distributed."""
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.tensor([self._rank + 1])
        dist.all_reduce(total)
        return int(total), dist.get_world_size()

    def fail(self) -> None:
        """The same failure on every rank."""
        raise ValueError(f"no rank can do this, says {self._rank}")

    def fail_together(self, rank: int) -> None:
        """One rank's own failure, which the others learn of."""
        if self._rank == rank:
            raise ValueError(f"rank {rank} cannot do this")
        raise FollowedError(f"rank {rank} failed", rank)

    def fail_alone(self, rank: int) -> None:
        """One rank fails and the others wait for it for ever."""
        if self._rank == rank:
            raise ValueError(f"rank {rank} cannot do this")
        threading.Event().wait()

    def die(self, rank: int) -> None:
        """One rank's process is killed and the others wait for it for ever."""
        if self._rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()

    def raise_in_users_code(self, function: str, which: str) -> None:
        """Call the function of a user's file, where no event loop runs."""
        with ThreadPoolExecutor(1) as pool:
            pool.submit(raise_in_users_code, function, which).result()

    async def warn(self, claim: Any) -> None:
        """A message in the log, from another thread."""
        await asyncio.to_thread(logging.getLogger("millrace.counting").warning, "in a thread")

    def process(self) -> int:
        """Process id of the first rank."""
        return os.getpid()

    def close(self) -> None:
        """Nothing to release."""
