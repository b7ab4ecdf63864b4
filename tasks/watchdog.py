"""No wait is for ever: after so many seconds without progress it fails, and says what every worker was doing.

In: a session and something to wait for. Out: its result, or `Stalled` with the report of every worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from settings.errors import UserError
from tasks.session import RunSession

Result = TypeVar("Result")


class Stalled(UserError):
    """Nothing has moved for too long; the message says what was waited for and where every worker stands."""


async def watched(session: RunSession, waiting: Awaitable[Result], *, what: str, seconds: float) -> Result:
    """Await `waiting`, but no longer than `seconds`. Raises `Stalled`."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await waiting
    except TimeoutError:
        if not limit.expired():
            raise
        raise Stalled(f"{what} has taken more than {seconds:g} s\n{await session.fleet.report()}") from None
