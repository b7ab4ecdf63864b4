"""Handles to objects in other processes: one, or the same in several that compute as one.

In: Ray actors of `worker_process.Host`. Out: what their methods return, and errors that say which process and where.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.ray.liveness import RayLost, Watch
from infra.ray.placement import Placement
from settings.errors import UserError, disk_full, failure_text_of_output, in_one_line, is_disk_full
from settings.places.state_folder import written_places
from settings.redaction import redact_error, without_secrets

logger = logging.getLogger("millrace.cluster")

LAG_SECONDS = 10.0
"""How long after one rank has failed the others may take to fail too."""

_HEADER = "Traceback (most recent call last):"
_BETWEEN = r"python/ray/|[^\"]*/(?:site-packages/ray/|concurrent/futures/_base\.py|infra/ray/worker_process\.py)"
_CALLERS_FRAME = re.compile(rf'^((?: *\|)?) +File "(?:{_BETWEEN}).*\n(?:\1 {{4}}.*\n)*', re.MULTILINE)
"""A frame of Ray's or ours between the process's start and the method that was called, with its lines of code."""


class WorkerDied(UserError):
    """A hosted worker's process is gone; the message names it and its log file."""


class StartFailed(UserError):
    """A hosted object could not be opened; the message has its error and its log file."""


class RaisedInWorker(Exception):
    """What a worker raised was of a class that cannot come to this process; the message has its name and words."""


@dataclass(eq=False)
class Hosted:
    """A handle to an object in another process, and to the place that is given back when the process ends."""

    name: str
    log_file: Path
    _actor: Any
    _watch: Watch
    _placement: Placement | None = None

    async def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Await `method(*arguments, **keywords)` of the object.

        Raises what it raised, as its own type, with its traceback as a note; `RaisedInWorker` if that type cannot come
        to this process; `StartFailed` if it is no `UserError` and `open` raised it; `WorkerDied` when the process is
        gone; `RayLost` when Ray is.
        """
        try:
            return await self._awaited(self._actor.call.remote(method, arguments, keywords), method)
        except Exception as error:
            if method != "open" or isinstance(error, UserError):
                raise
            cause = in_one_line(failure_text_of_output(error.__notes__[-1]), whole=True)
            raise StartFailed(f"{self.name} could not start: {cause}; its log is {self.log_file}") from error

    async def rendezvous(self) -> tuple[str, int]:
        """Address of the process's node and a port that is free there."""
        address, port = await self._awaited(self._actor.rendezvous.remote(), "rendezvous")
        return str(address), int(port)

    async def prepare(self, environment: dict[str, str]) -> None:
        """Set environment variables of the process before the object is opened."""
        await self._awaited(self._actor.prepare.remote(environment), "prepare")

    def kill(self) -> None:
        """End the process at once."""
        import ray

        ray.kill(self._actor)
        self.give_back()

    def give_back(self) -> None:
        """Free the place of a process that has ended."""
        if self._placement is not None:
            self._placement.give_back()

    async def _awaited(self, reply: Any, method: str) -> Any:
        from ray.exceptions import RayActorError

        try:
            return await result_of(reply, self.name, self._watch)
        except RayActorError as error:
            if reason := self._watch.raylet_is_gone():
                raise RayLost(reason) from error
            self.give_back()
            raise WorkerDied(f"{self.name} died during {method}(); its log is {self.log_file}") from error


class HostedGroup:
    """The same object in several processes that compute as one. If one fails and the others do not, all end."""

    def __init__(self, name: str, ranks: Sequence[Hosted], placement: Placement) -> None:
        self.name = name
        self.log_file = ranks[0].log_file
        self._ranks = ranks
        self._placement = placement
        self._ended = ""

    async def introduce(self) -> None:
        """Tell every rank its number and where rank 0 listens. If one is gone the group ends and `WorkerDied` rises."""
        try:
            address, port = await self.rendezvous()
            shared = {"WORLD_SIZE": str(len(self._ranks)), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
            shared["LOCAL_RANK"] = "0"  # among the GPUs that Ray lets a process see: its own
            await asyncio.gather(*(rank.prepare({**shared, "RANK": str(n)}) for n, rank in enumerate(self._ranks)))
        except WorkerDied as death:
            self._end(str(death))
            raise

    async def prepare(self, environment: dict[str, str]) -> None:
        """Set environment variables of every rank."""
        await asyncio.gather(*(rank.prepare(environment) for rank in self._ranks))

    async def rendezvous(self) -> tuple[str, int]:
        """Address of rank 0's node and a port that is free there."""
        return await self._ranks[0].rendezvous()

    async def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Await `method(*arguments, **keywords)` on every rank; returns what rank 0 does.

        Raises what a rank raised, with a note that names the rank; an error with an attribute `rank` stands for that
        rank's error. If the others do not fail too within `LAG_SECONDS`, or a process is gone (`WorkerDied`), all
        processes are killed, and later calls raise `WorkerDied`.
        """
        if self._ended:
            raise WorkerDied(f"{self.name} cannot do {method}() any more: {self._ended}")
        calls = [asyncio.ensure_future(rank.call(method, *arguments, **keywords)) for rank in self._ranks]
        try:
            done, running = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            if running:
                await asyncio.wait(running, timeout=LAG_SECONDS)
        finally:
            for call in calls:
                call.cancel()
        errors = {rank: e for rank, c in enumerate(calls) if c.done() and not c.cancelled() and (e := c.exception())}
        if not errors:
            return calls[0].result()
        deaths = [rank for rank, error in errors.items() if isinstance(error, WorkerDied)]
        raised = [error.__cause__ if isinstance(error, StartFailed) else error for error in errors.values()]
        followed = [rank for error in raised if (rank := getattr(error, "rank", None)) in errors]
        # If all fail alike it is rank 0's error, else the earliest.
        earliest = [rank for rank in errors if calls[rank] in done] if len(errors) < len(calls) else [0]
        culprit = [*deaths, *followed, *earliest][0]
        error = errors[culprit]
        error.add_note(f"rank {culprit} of {len(calls)} of {self.name}; its log is {self._ranks[culprit].log_file}")
        if deaths or len(errors) < len(calls):
            self._end(str(error) if deaths else f"rank {culprit} failed in {method}(): {error}")
        raise error

    def _end(self, reason: str) -> None:
        logger.error("%s ends, all its ranks are killed: %s", self.name, reason)
        self._ended = reason
        for rank in self._ranks:
            rank.kill()
        self.give_back()

    def give_back(self) -> None:
        """Free the places of all ranks."""
        self._placement.give_back()


async def result_of(reply: Awaitable[Any], name: str, watch: Watch) -> Any:
    """What the process `name` returns. What it raised there is raised here, its traceback as a note."""
    from ray.exceptions import RayError, RayTaskError, UnserializableException

    try:
        return await watch.unless_lost(reply)
    except (RayTaskError, UnserializableException) as error:
        text = str(error).rpartition("Original exception:\n")[2]
        text = re.sub(r"^.*ray::.*$", _HEADER, text, count=1, flags=re.MULTILINE)  # Ray's own first line
        text = without_secrets(_CALLERS_FRAME.sub("", text))
        raised = getattr(error, "cause", None)
        if raised is None or isinstance(raised, RayError):
            message = failure_text_of_output(text).partition("\n  at ")[0]
            raised = RaisedInWorker(re.sub(r"^(?:\w+\.)+(?=\w+(?::|$))", "", message))
        if is_disk_full(raised):
            raised = disk_full(raised, written_places()) or raised
        redact_error(raised)  # as a task's state, Prefect records it
        raised.add_note(f"{name} raised it:\n{text.strip()}")
        raise raised from None


async def close(hosted: Hosted | HostedGroup) -> None:
    """Let a worker end in its own way, if it still answers."""
    try:
        async with asyncio.timeout(20):
            await hosted.call("close")
    except RayLost:
        return  # the run says so, and there is no place to give back
    except (WorkerDied, TimeoutError, AttributeError) as error:
        logger.warning("%s did not close: %s", hosted.name, str(error) or "no answer for 20 s")
    hosted.give_back()
