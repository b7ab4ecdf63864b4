"""Pause, resume and suspend, between a run's log and Prefect; and the announcement of new policies.

In: a session. Out: workers that begin nothing new, or go on; entries in the log; the state of the flow run, and events.

    `millrace pause` ──▶ entry in the log ──▶ workers told, flow run set to Paused
    Paused in Prefect ─▶ entry in the log ──▶ the same; both ways back with Resume
    Suspended in Prefect (the button in its UI): the process ends, and resuming starts the run again
    Cancelling in Prefect: the process ends. A worker's has a signal too, one on a terminal has only this

The log has the last word. While Prefect's server is down only the log is heard.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.context import FlowRunContext
from prefect.exceptions import Pause as PrefectPause
from prefect.states import State

from settings.places.hints import command
from storage.log.entries import Pause, Resume
from tasks.fleet import ROLLOUT_ALIAS
from tasks.prefect.own_flow_run import OwnFlowRun
from tasks.prefect.run_page import RunPage, announce
from tasks.session import RunSession

logger = logging.getLogger("millrace.control")

_LOOK_SECONDS = 2.0
_LOOKS_BEFORE_CANCELLED = 3
"""A worker ends its process by a signal within a second or two, and a second cancellation would cut off the first."""


class Listener:
    """Carries pauses between the log and Prefect, one look at both at a time."""

    def __init__(self, session: RunSession, platform: OwnFlowRun | None) -> None:
        self._session = session
        self._platform = platform
        self._paused = False
        """What the log said at the last look: a new state of Prefect's that says the same may be ours."""
        self._seen: UUID | None = None
        """The state of Prefect's that we saw last."""
        self._announced: int | None = None
        """Policy version that Prefect has heard of: of those served between two looks only the last."""
        self._looks_while_cancelling = 0
        self.ended: State[Any] | None = None
        """Set once Prefect wants this process to end: the state Suspended, or Cancelling."""

    async def look(self) -> None:
        """Look at Prefect and at the log, and tell each what the other says."""
        log = self._session.log
        state = None if self._platform is None else await self._platform.state()
        if state is not None and state.type == StateType.PAUSED and state.state_details.pause_reschedule:
            self.ended = state
            return
        if state is not None and state.type == StateType.CANCELLING:
            self._looks_while_cancelling += 1
            if self._looks_while_cancelling == _LOOKS_BEFORE_CANCELLED:
                self.ended = state
                return
        shown = None if state is None else _PAUSED.get(state.type)
        if state is not None and shown is not None:
            # By its id, not by its kind: Prefect may have taken in what we showed, answered too late, and been
            # changed back by a user since.
            if self._seen not in (None, state.id) and shown != self._paused:
                log.append(Pause(reason="paused in Prefect") if shown else Resume(reason="resumed in Prefect"))
            self._seen = state.id
        before, self._paused = self._paused, bool(log.refresh().paused)
        if self._platform is not None and shown not in (None, self._paused):
            await self._platform.show(paused=self._paused)
        served = log.state.aliases.get(ROLLOUT_ALIAS)
        if served is not None and served.version != self._announced:
            announce(log, "alias.rollout", version=served.version)
            self._announced = served.version
        if self._paused == before:
            return
        await self._session.fleet.refresh()
        if self._paused:
            logger.warning(
                "paused at step %d (%s): what runs is finished, nothing new begins; `%s` lets the run go on",
                log.state.step,
                log.state.paused,
                command("resume", log.run_id, store=log.store.uri),
            )
        else:
            logger.info("resumed at step %d", log.state.step)


_PAUSED = {StateType.PAUSED: True, StateType.RUNNING: False}


@contextlib.asynccontextmanager
async def listening(session: RunSession, *, platform: OwnFlowRun | None = None) -> AsyncIterator[None]:
    """Hear of pauses, announce policies and keep the run's page while the body runs.

    `platform` is by default the flow run this is called in; outside of one only the log is heard. The body is
    cancelled if the flow run stays Cancelling. Raises `prefect.exceptions.Pause`, which ends the process and leaves the
    flow run Suspended, if Prefect says so.
    """
    async with contextlib.AsyncExitStack() as stack:
        context = FlowRunContext.get()
        if platform is None and context is not None and context.flow_run is not None:
            platform = OwnFlowRun(await stack.enter_async_context(get_client()), context.flow_run.id)
        listener = Listener(session, platform)
        await listener.look()
        body = asyncio.current_task()
        assert body is not None
        listening_on = asyncio.create_task(_listen(listener, session.page, body))
        try:
            yield
        except (asyncio.CancelledError, BaseExceptionGroup, PrefectPause) as error:
            # Prefect raises it by itself when the next of its tasks begins, which may be in minutes, or in a group.
            suspended = _suspension_in(error) or listener.ended
            if suspended is None or suspended.type == StateType.CANCELLING:
                raise
            if body.cancelling():
                body.uncancel()
            logger.warning("suspended in Prefect: resuming it there starts this run again, and so does its command")
            raise PrefectPause(state=suspended) from None
        finally:
            listening_on.cancel()
            await asyncio.gather(listening_on, return_exceptions=True)


def _suspension_in(error: BaseException) -> State[Any] | None:
    if isinstance(error, PrefectPause):
        return error.state
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(_suspension_in, error.exceptions)), None)
    return None


async def resumed(session: RunSession) -> None:
    """Return as soon as the run is not paused."""
    while session.log.refresh().paused:
        await asyncio.sleep(_LOOK_SECONDS / 2)


async def _listen(listener: Listener, page: RunPage, body: asyncio.Task[Any]) -> None:
    warned = False
    while listener.ended is None:
        await asyncio.sleep(_LOOK_SECONDS)
        try:
            await listener.look()
            await page.update()
            warned = False
        except Exception as error:  # noqa: BLE001 - a store that does not answer, say: it may again
            if not warned:
                logger.warning("could not look whether to pause, and looks again: %r", error)
            warned = True
    body.cancel()
