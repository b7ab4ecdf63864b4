"""Who produces for a run, and signs of life of those that its driver has not started.

In: a run's log, and the observer's own clock. Out: entries in it, a small file per worker beside it, and the names of
those who have been silent for too long.

    Presence.join ─▶ give_sign, give_sign, …  ─▶ Presence.leave      by the worker
                        └── Lookout.silent ───▶ withdraw             by whoever needs its prompts

The log says who takes part. Whether they live is no fact that lasts, so each writes its file anew again and again, and
an observer looks whether it changes. No clock is compared with another one, and the observer's is monotonic: clocks
that differ, or jump, decide nothing. One that is given up and lives after all does no harm: see `conflicts`.
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
"""Per patience of the observer: that many must be missed."""


def check_name(name: str) -> None:
    """Raise `ValueError` where a name cannot be that of a producer, which is part of file names in the store."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,60}", name):
        raise InvalidInput(f"producer name {name!r}: use letters, digits, dot, dash and underscore, at most 60")


def give_sign(log: RunLog, holder: str) -> None:
    """Say that this worker lives. Safe beside another thread that uses the log."""
    log.store.put(_key(log, holder), uuid.uuid4().bytes)


def withdraw(log: RunLog, holder: str, *, reason: str) -> None:
    """A worker does not take part any more: what it had leased and not committed is free for the others."""
    log.append(Release(holder=holder, reason=reason))
    log.store.delete([_key(log, holder)])


class Presence:
    """A rollout worker's part in a run; use it in one event loop."""

    def __init__(self, log: RunLog, holder: str, *, outside: bool, lease_timeout: float) -> None:
        """One that is `outside`, not started by the driver, gives several signs of life per `lease_timeout`."""
        self._log = log
        self.holder = holder
        """What the log calls the worker."""
        self._outside = outside
        self._lease_timeout = lease_timeout
        self._signs: asyncio.Task[None] | None = None

    async def join(self) -> None:
        """Take part from now on, also after having been given up. Nobody else may use the log meanwhile."""
        if self._outside and self._signs is None:
            await asyncio.to_thread(give_sign, self._log, self.holder)
            self._signs = asyncio.create_task(self._give_signs())
        join = Join(holder=self.holder, id=uuid.uuid4().hex, outside=self._outside)
        await asyncio.to_thread(self._log.append, join)

    async def leave(self) -> None:
        """Give back what is leased, and say no more."""
        if self._signs is not None:
            self._signs.cancel()
            await asyncio.wait([self._signs])
        withdraw(self._log, self.holder, reason="left")

    async def _give_signs(self) -> None:
        """From the loop that would do nothing more if it hung."""
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
        """By join: the sign that was seen last, and when it was new."""

    def silent(self, *, patience: float) -> dict[str, float]:
        """Who has given no sign for `patience` seconds while it was watched, and the seconds.

        Looks at the store a few times per `patience`, and not at all where nobody is to be watched.
        """
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
            known = before.get(join.id)
            self._seen[join.id] = known if known is not None and known[0] == sign else (sign, now)
        quiet = {join.holder: now - self._seen[join.id][1] for join in watched}
        return {holder: seconds for holder, seconds in quiet.items() if seconds >= patience}


def _key(log: RunLog, holder: str) -> str:
    return log.key(f"producers/{holder}")
