"""The producers of a run, and signs of life of those that its driver has not started.

In: a run's log, and the observer's own clock. Out: entries in it, a small file per worker beside it, and the names of
workers that have been silent for too long.

    Presence.join ─▶ give_sign, give_sign, …  ─▶ Presence.leave      by the worker
                        └── Lookout.silent ───▶ withdraw             by another that needs its prompts

The log says which workers take part, but not which are alive. So each worker writes its file again and again, and an
observer looks whether it changes, on its own monotonic clock alone. A live worker that is taken for dead does no harm:
see `conflicts`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable

from settings.errors import InvalidInput
from storage.log.entries import Join, Release
from storage.log.run_log import RunLog
from storage.objects.object_store import StoreError

logger = logging.getLogger("millrace.producers")

SIGNS = 6
"""Signs per patience of the observer; so many must be missed."""


def check_name(name: str) -> None:
    """Raise `InvalidInput` for a name that cannot be a producer's: it becomes part of file names in the store."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,60}", name):
        raise InvalidInput(f"producer name {name!r}: use letters, digits, dot, dash and underscore, at most 60")


def give_sign(log: RunLog, holder: str) -> None:
    """Show that this worker lives. Safe beside another thread that uses the log."""
    log.store.put(_key(log, holder), uuid.uuid4().bytes)


def withdraw(log: RunLog, holder: str, *, reason: str) -> None:
    """End a worker's part: positions leased to it and not committed are free for the others."""
    log.append(Release(holder=holder, reason=reason))
    log.store.delete([_key(log, holder)])


class Presence:
    """A rollout worker's part in a run; use it in one event loop.

    A worker is `outside` if the driver did not start it; it gives several signs of life per `lease_timeout` seconds.
    """

    def __init__(self, log: RunLog, holder: str, *, outside: bool, lease_timeout: float) -> None:
        self._log = log
        self.holder = holder
        self._outside = outside
        self._lease_timeout = lease_timeout
        self._signs: asyncio.Task[None] | None = None

    async def join(self) -> None:
        """Take part from now on, also after having been taken for dead. Nothing else may use the log meanwhile."""
        if self._outside and self._signs is None:
            await asyncio.to_thread(give_sign, self._log, self.holder)
            self._signs = asyncio.create_task(self._give_signs())
        join = Join(holder=self.holder, id=uuid.uuid4().hex, outside=self._outside)
        await asyncio.to_thread(self._log.append, join)

    async def leave(self) -> None:
        """Give back the leased positions and end the signs of life."""
        if self._signs is not None:
            self._signs.cancel()
            await asyncio.wait([self._signs])
        withdraw(self._log, self.holder, reason="left")

    async def _give_signs(self) -> None:
        """Run in the worker's own event loop: if it hangs, the signs end."""
        while True:
            await asyncio.sleep(self._lease_timeout / SIGNS)
            try:
                await asyncio.to_thread(give_sign, self._log, self.holder)
            except (OSError, StoreError) as error:
                logger.warning("%s cannot give a sign of life: %s", self.holder, error)


class Lookout:
    """Watches the workers of a run that its driver has not started."""

    def __init__(self, log: RunLog, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._last_look = -float("inf")
        self._seen: dict[str, tuple[bytes | None, float]] = {}
        """Join id → the last sign, and the time at which it was new."""

    def silent(self, *, patience: float) -> dict[str, float]:
        """Workers without a new sign for `patience` seconds → the seconds. Looks a few times per `patience`."""
        now = self._clock()
        if now - self._last_look < patience / SIGNS:
            return {}
        self._last_look = now
        watched = [join for join in self._log.state.producers.values() if join.outside]
        if not watched:
            return {}
        signs = self._log.store.get_many([_key(self._log, join.holder) for join in watched])
        before, self._seen = self._seen, {}
        for join, sign in zip(watched, signs, strict=True):
            earlier = before.get(join.id)
            self._seen[join.id] = earlier if earlier is not None and earlier[0] == sign else (sign, now)
        quiet = {join.holder: now - self._seen[join.id][1] for join in watched}
        return {holder: seconds for holder, seconds in quiet.items() if seconds >= patience}


def _key(log: RunLog, holder: str) -> str:
    return log.key(f"producers/{holder}")
