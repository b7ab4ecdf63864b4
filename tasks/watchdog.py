"""No wait is for ever: after so many seconds without progress it fails, and says who was doing what.

In: a session and something to wait for. Out: its result, or `Stalled` with the report of every worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from infra.fleet import Hosted, WorkerDied
from settings.errors import UserError
from tasks.session import RunSession

Result = TypeVar("Result")

_ANSWER_SECONDS = 10.0


class Stalled(UserError):
    """Nothing has moved for too long; the message says what was waited for and where everybody stands."""


async def watched(session: RunSession, waiting: Awaitable[Result], *, what: str, seconds: float) -> Result:
    """Await `waiting`, but no longer than `seconds`. Raises `Stalled`."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await waiting
    except TimeoutError:
        if not limit.expired():
            raise
        raise Stalled(f"{what} has taken more than {seconds:g} s\n{await where_everybody_stands(session)}") from None


async def where_everybody_stands(session: RunSession) -> str:
    """Workers, queue, versions, oldest episode, and what each task of each worker is waiting for."""
    state = session.log.state
    live = state.live.version if state.live else "none"
    queue = f"step {state.step}, live policy {live}, {state.pending_accepted} groups ready, {len(state.leased)} leased"
    if elsewhere := [join.holder for join in state.producers.values() if join.outside]:
        queue += f", producers elsewhere: {', '.join(elsewhere)}"
    elif not session.workers:
        queue += f"; nobody produces: `millrace produce {session.log.run_id}` on another machine starts a producer"
    hosted = [*session.workers.values(), *([session.evaluator] if session.evaluator else [])]
    return "\n".join([queue, *await asyncio.gather(*(_report(worker) for worker in hosted))])


async def num_finished(session: RunSession) -> int:
    """Groups that all workers have finished so far; what does not answer adds nothing."""
    return sum(await asyncio.gather(*(_progress(worker) for worker in session.workers.values())))


async def _report(worker: Hosted) -> str:
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            return f"{worker.name}: {await worker.call('report')}"
    except TimeoutError:
        return f"{worker.name} does not answer: see the stacks in its log, {worker.log_file}"
    except WorkerDied as death:
        return str(death)


async def _progress(worker: Hosted) -> int:
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            finished: int = await worker.call("progress")
            return finished
    except (TimeoutError, WorkerDied):
        return 0
